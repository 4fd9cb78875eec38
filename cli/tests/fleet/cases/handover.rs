//! Faults between the two legs of a request: while KV blocks are fetched, or wait to be fetched.

use rustix::process::Signal;
use tempfile::NamedTempFile;

use super::apart::until_all_take_part;
use crate::answers::Stream;
use crate::fleet::Fleet;
use crate::load::{same_text, streams};
use crate::meeting::Meeting;
use crate::support::{Server, tiny_chat, until};
use crate::worker::Worker;

/// Tokens of an answer.
const SHORT: u64 = 30;

/// Mockers with a slow transfer of blocks, two of each role: prefill, then decode.
async fn two_pools<M: Meeting>(fleet: &Fleet<M>, lease_s: f64) -> [Worker; 4] {
    let settings = NamedTempFile::new().expect("a file for the settings");
    let text = format!(
        "{{\"enable_prefix_caching\": false, \"kv_transfer_gbps\": 0.02, \"kv_lease_s\": {lease_s}}}"
    );
    std::fs::write(settings.path(), text).expect("a file");
    let start = async |role: &str| {
        let mut command = fleet.worker_command("out=mocker", &["--role", role]);
        command.arg("--model-path").arg(tiny_chat());
        command.arg("--extra-engine-args").arg(settings.path());
        Worker::ready(command).await
    };
    [
        start("prefill").await,
        start("prefill").await,
        start("decode").await,
        start("decode").await,
    ]
}

async fn until_empty(worker: &Worker) {
    until(async || worker.metric("genset_mocker_kv_usage").await <= 0.0).await;
}

/// Streams that have their first token and whose blocks are in transfer.
async fn handed_over(frontend: &Server, count: usize) -> Vec<Stream> {
    let begun = (0..count).map(|_| Stream::begin(frontend.address, SHORT));
    let begun = futures_util::future::try_join_all(begun).await;
    begun.expect("streams")
}

/// Whether the frontend's metrics contain this text.
async fn has_counted(frontend: &Server, text: &str) -> bool {
    frontend.get("/metrics").await.body.contains(text)
}

/// A decode worker computed a prompt because its blocks could not be fetched.
const COMPUTED_ANEW: &str = "reason=\"decode_refused\"";

pub(crate) async fn either_side_of_a_fetch_may_be_killed<M: Meeting>(fleet: Fleet<M>) {
    let [prefill, other_prefill, decode, other_decode] = two_pools(&fleet, 30.0).await;
    let frontend = fleet.frontend(&[]).await;
    let all = [&prefill, &other_prefill, &decode, &other_decode];
    until_all_take_part(&frontend, &all).await;
    let expected = same_text(streams(&frontend, 1, SHORT).await).await;
    let begun = handed_over(&frontend, 8).await;
    decode.kill().await;
    assert_eq!(same_text(begun).await, expected);
    assert!(has_counted(&frontend, COMPUTED_ANEW).await);
    let begun = handed_over(&frontend, 8).await;
    prefill.kill().await;
    assert_eq!(same_text(begun).await, expected);
    until_empty(&other_prefill).await;
    until_empty(&other_decode).await;
}

pub(crate) async fn blocks_whose_lease_ends_are_computed_anew<M: Meeting>(fleet: Fleet<M>) {
    let [prefill, other_prefill, decode, other_decode] = two_pools(&fleet, 1.0).await;
    let frontend = fleet.frontend(&[]).await;
    let all = [&prefill, &other_prefill, &decode, &other_decode];
    until_all_take_part(&frontend, &all).await;
    let expected = same_text(streams(&frontend, 1, SHORT).await).await;
    for worker in [&decode, &other_decode] {
        worker.signal(Signal::STOP);
    }
    let begun = handed_over(&frontend, 4).await;
    for worker in [&prefill, &other_prefill] {
        worker.until_log("nobody fetched").await;
    }
    for worker in [&decode, &other_decode] {
        worker.signal(Signal::CONT);
    }
    assert_eq!(same_text(begun).await, expected);
    assert!(has_counted(&frontend, COMPUTED_ANEW).await);
    until_empty(&prefill).await;
    until_empty(&decode).await;
}

pub(crate) async fn what_had_begun_moves_when_its_decode_worker_freezes<M: Meeting>(
    fleet: Fleet<M>,
) {
    let slow = "--token-delay-ms=10";
    let _prefill = fleet.worker(&["--role=prefill", slow]).await;
    let [decode, other] = fleet.two_workers(&["--role=decode", slow]).await;
    let frontend = fleet.frontend(&[]).await;
    until_all_take_part(&frontend, &[&decode, &other]).await;
    let expected = same_text(streams(&frontend, 1, SHORT * 10).await).await;
    let begun = streams(&frontend, 10, SHORT * 10).await;
    until(async || decode.running().await != 0.0).await;
    decode.signal(Signal::STOP);
    assert_eq!(same_text(begun).await, expected);
    decode.signal(Signal::CONT);
    until_all_take_part(&frontend, &[&decode]).await;
}
