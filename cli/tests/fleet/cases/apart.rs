//! Disaggregated prefill and decode: two pools, whose instances may die.

use crate::answers::{End, Stream};
use crate::fleet::{Fleet, metric, until_listed};
use crate::load::{burst, ends, same_text, streams};
use crate::meeting::Meeting;
use crate::support::{Server, soon, until};
use crate::worker::Worker;

/// Tokens of an answer: it takes longer than a worker needs to exit.
const LONG: u64 = 400;

/// The number of requests whose decode worker has generated a token.
pub(crate) const HANDED_OVER: &str = "genset_disaggregated_handover_seconds_count";

/// Starts the workers of one role.
async fn pool<M: Meeting>(fleet: &Fleet<M>, role: &str, words: &[&str]) -> [Worker; 2] {
    let role = format!("--role={role}");
    let words: Vec<&str> = [&[role.as_str()], words].concat();
    fleet.two_workers(&words).await
}

/// Sends requests of two tokens until every worker has finished one more.
pub(crate) async fn until_all_take_part(frontend: &Server, workers: &[&Worker]) {
    until_listed(frontend).await;
    soon(async {
        for worker in workers {
            let before = worker.finished().await;
            while worker.finished().await == before {
                let stream = Stream::begin(frontend.address, 2).await.expect("a stream");
                assert!(matches!(stream.end().await, End::Done(2)));
            }
        }
    })
    .await;
}

/// Waits until the frontend's metrics have a line with this prefix and a count other than 0.
async fn until_counted(frontend: &Server, line: &str) {
    until(async || frontend.get("/metrics").await.body.contains(line)).await;
}

pub(crate) async fn prefill_and_decode_answer_as_one<M: Meeting>(fleet: Fleet<M>) {
    // Canaries of an idle worker would count as requests.
    let whole = fleet.worker(&["--canary-interval=0"]).await;
    let frontend = fleet.frontend(&[]).await;
    until_listed(&frontend).await;
    let expected = same_text(streams(&frontend, 1, LONG).await).await;
    let [prefill, _second] = pool(&fleet, "prefill", &[]).await;
    let [decode, _other] = pool(&fleet, "decode", &[]).await;
    until_all_take_part(&frontend, &[&prefill, &decode]).await;
    let before = whole.finished().await;
    assert_eq!(
        same_text(streams(&frontend, 20, LONG).await).await,
        expected
    );
    // If both pools have instances, aggregated workers get no requests.
    assert_eq!(whole.finished().await, before);
    let metrics = frontend.get("/metrics").await.body;
    for name in ["handover_seconds_count", "requests_total{"] {
        assert!(
            metrics.contains(&format!("genset_disaggregated_{name}")),
            "{metrics}"
        );
    }
}

pub(crate) async fn either_leg_may_be_killed<M: Meeting>(fleet: Fleet<M>) {
    let slow = ["--token-delay-ms=20"];
    let [prefill, other_prefill] = pool(&fleet, "prefill", &slow).await;
    let [decode, other_decode] = pool(&fleet, "decode", &slow).await;
    let frontend = fleet.frontend(&[]).await;
    let all = [&prefill, &other_prefill, &decode, &other_decode];
    until_all_take_part(&frontend, &all).await;
    let expected = same_text(streams(&frontend, 1, LONG).await).await;
    let handed_over = metric(&frontend, HANDED_OVER).await;
    let begun = streams(&frontend, 20, LONG).await;
    // The first token comes from a prefill worker: only requests in a decode worker migrate.
    until(async || metric(&frontend, HANDED_OVER).await >= handed_over + 20.0).await;
    assert!(decode.running().await > 0.0);
    decode.kill().await;
    let also_begun = streams(&frontend, 20, LONG).await;
    prefill.kill().await;
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
    assert_eq!(same_text(begun).await, expected);
    assert_eq!(same_text(also_begun).await, expected);
    let metrics = frontend.get("/metrics").await.body;
    assert!(metrics.contains("genset_migrations_total{"), "{metrics}");
    other_prefill.until_running(0.0).await;
    other_decode.until_running(0.0).await;
}

pub(crate) async fn a_prefill_that_dies_with_prompts_under_way_loses_none<M: Meeting>(
    fleet: Fleet<M>,
) {
    let [prefill, other] = pool(&fleet, "prefill", &["--token-delay-ms=2000"]).await;
    let [_decode, _other] = pool(&fleet, "decode", &[]).await;
    let frontend = fleet.frontend(&[]).await;
    until_all_take_part(&frontend, &[&prefill, &other]).await;
    let killed = async {
        prefill.until_running(10.0).await;
        prefill.kill().await;
    };
    let answers = async { ends(streams(&frontend, 20, 5).await).await };
    let (answers, ()) = tokio::join!(answers, killed);
    for end in answers {
        assert!(matches!(end, End::Done(5)), "{end:?}");
    }
}

pub(crate) async fn an_empty_pool_falls_back_and_comes_back<M: Meeting>(fleet: Fleet<M>) {
    let [prefill, other] = pool(&fleet, "prefill", &[]).await;
    let [decode, other_decode] = pool(&fleet, "decode", &[]).await;
    let frontend = fleet.frontend(&[]).await;
    until_all_take_part(&frontend, &[&prefill, &decode]).await;
    // Decode instances compute prompts themselves if there is no prefill instance.
    prefill.kill().await;
    other.stop().await;
    for end in ends(streams(&frontend, 20, LONG).await).await {
        assert!(matches!(end, End::Done(LONG)), "{end:?}");
    }
    until_counted(&frontend, "genset_disaggregated_whole_requests_total{").await;
    // An aggregated worker takes over if there is no decode instance left.
    let [prefill, _other] = pool(&fleet, "prefill", &[]).await;
    let whole = fleet.worker(&[]).await;
    until_all_take_part(&frontend, &[&prefill]).await;
    decode.kill().await;
    other_decode.stop().await;
    until_all_take_part(&frontend, &[&whole]).await;
    // Then both pools come back.
    let [decode, _other] = pool(&fleet, "decode", &[]).await;
    until_all_take_part(&frontend, &[&prefill, &decode]).await;
}

pub(crate) async fn pools_are_rolled_under_load<M: Meeting>(fleet: Fleet<M>) {
    let slow = ["--token-delay-ms=5"];
    let mut prefills = pool(&fleet, "prefill", &slow).await;
    let mut decodes = pool(&fleet, "decode", &slow).await;
    let frontend = fleet.frontend(&[]).await;
    until_all_take_part(&frontend, &[&prefills[0], &decodes[0]]).await;
    let hammer = crate::load::Hammer::start(&frontend, 4);
    let begun = streams(&frontend, 10, LONG).await;
    for place in 0..2 {
        for (role, pool) in [("prefill", &mut prefills), ("decode", &mut decodes)] {
            let role = format!("--role={role}");
            let next = fleet.worker(&[&role, slow[0], "--grace=1"]).await;
            std::mem::replace(&mut pool[place], next).leave().await;
        }
    }
    same_text(begun).await;
    hammer.expect_no_failure().await;
}

pub(crate) async fn real_blocks_go_over_the_wire_and_none_stays<M: Meeting>(fleet: Fleet<M>) {
    let start = async |role: &str| {
        let role = format!("--role={role}");
        fleet.candle(&["--kv-cache-memory=8MiB", &role]).await
    };
    let whole = start("aggregated").await;
    let frontend = fleet.frontend(&[]).await;
    until_listed(&frontend).await;
    let expected = same_text(streams(&frontend, 1, 60).await).await;
    let (prefill, decode) = (start("prefill").await, start("decode").await);
    until_all_take_part(&frontend, &[&prefill, &decode]).await;
    whole.stop().await;
    assert_eq!(same_text(streams(&frontend, 8, 60).await).await, expected);
    // Clients that disconnect before, at and after the handover.
    for begun in 0..6 {
        let mut stream = Stream::begin(frontend.address, 200)
            .await
            .expect("a stream");
        if begun % 2 == 0 {
            stream.until_text().await;
        }
    }
    for worker in [&prefill, &decode] {
        until(async || worker.metric("genset_candle_kv_usage").await <= 0.0).await;
    }
    // Losing a prefill instance fails no answer.
    prefill.kill().await;
    assert_eq!(same_text(streams(&frontend, 4, 60).await).await, expected);
}
