//! Launched servers whose workers die, and disaggregated prefill and decode; here stand-ins that replay observed vLLM answers.

use crate::answers::chat;
use crate::cases::{HANDED_OVER, until_all_take_part};
use crate::fleet::{Fleet, metric, until_all_answer, until_listed};
use crate::load::{burst, same_text, streams};
use crate::meeting::Directory;
use crate::support::{Exchange, stand_in, tiny_chat, until};
use crate::worker::Worker;

const TOKENS: u64 = 20;

/// Tokens of an answer that takes longer than a worker needs to exit, at [`SLOW`] speed.
const LONG: u64 = 80;

/// The stand-in's flag for 50 ms per token.
const SLOW: &str = "--delay 0.05";

/// The `max_tokens` with which the server of a stand-in exits under `--fault poison`.
const POISON_TOKENS: u64 = 13;

/// Starts a worker whose server is a stand-in with its own flag, and waits until it is ready.
async fn worker(fleet: &Fleet<Directory>, role: &str, fault: &str) -> Worker {
    worker_with(fleet, role, fault, &[]).await
}

/// Like [`worker`], with more flags for the worker.
async fn worker_with(fleet: &Fleet<Directory>, role: &str, fault: &str, words: &[&str]) -> Worker {
    let server = stand_in(&format!("vllm {fault}"));
    let mut command = fleet.worker_command("out=vllm", &[&server, "--role", role]);
    command
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .args(words)
        .arg(tiny_chat());
    Worker::ready(command).await
}

#[tokio::test]
async fn answers_of_a_launched_server_go_on_at_another() {
    let fleet = Fleet::new(Directory::new());
    let (one, two) = tokio::join!(
        worker(&fleet, "aggregated", SLOW),
        worker(&fleet, "aggregated", SLOW)
    );
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let whole = same_text(streams(&frontend, 1, LONG).await).await;
    let begun = streams(&frontend, 12, LONG).await;
    assert!(one.running().await > 0.0);
    one.kill().await;
    assert_eq!(same_text(begun).await, whole);
    let metrics = frontend.get("/metrics").await.body;
    assert!(metrics.contains("genset_migrations_total{"), "{metrics}");
    two.until_running(0.0).await;
    two.stop().await;
}

/// The server never generates the first token, so over the wire no worker has accepted the request by then.
#[tokio::test]
async fn a_request_that_brings_down_its_worker_goes_to_few() {
    let fleet = Fleet::new(Directory::new());
    let start = || {
        let words = &["--migration-limit=1"];
        worker_with(&fleet, "aggregated", "--fault poison", words)
    };
    let (one, two, three, four, five) = tokio::join!(start(), start(), start(), start(), start());
    let mut workers = [one, two, three, four, five];
    let frontend = fleet.frontend_of(&workers.each_ref()).await;
    let body = chat(POISON_TOKENS, false).to_string();
    let path = "/v1/chat/completions";
    let exchange = Exchange::try_begin(frontend.address, "POST", path, &body).await;
    let response = exchange.expect("a response").response().await;
    assert_eq!(response.status, 502, "{}", response.body);
    let mut ended = || {
        let ended = workers.iter_mut().map(Worker::has_ended);
        ended.filter(|has_ended| *has_ended).count()
    };
    until(async || ended() >= 2).await;
    assert_eq!(burst(&frontend, 20).await, [""; 0]);
    assert_eq!(ended(), 2);
}

#[tokio::test]
async fn answers_of_a_launched_decode_server_go_on_at_another() {
    let fleet = Fleet::new(Directory::new());
    let (prefill, one, two) = tokio::join!(
        worker(&fleet, "prefill", ""),
        worker(&fleet, "decode", SLOW),
        worker(&fleet, "decode", SLOW)
    );
    let frontend = fleet.frontend(&[]).await;
    until_listed(&frontend).await;
    until_all_take_part(&frontend, &[&prefill, &one, &two]).await;
    let whole = same_text(streams(&frontend, 1, LONG).await).await;
    let handed_over = metric(&frontend, HANDED_OVER).await;
    let begun = streams(&frontend, 12, LONG).await;
    // The first token comes from the prefill server.
    until(async || metric(&frontend, HANDED_OVER).await >= handed_over + 12.0).await;
    assert!(one.running().await > 0.0);
    one.kill().await;
    assert_eq!(same_text(begun).await, whole);
    let metrics = frontend.get("/metrics").await.body;
    assert!(metrics.contains("genset_migrations_total{"), "{metrics}");
    two.until_running(0.0).await;
}

#[tokio::test]
async fn two_servers_answer_as_one() {
    let fleet = Fleet::new(Directory::new());
    // Canaries of an idle worker would count as requests.
    let whole = worker_with(&fleet, "aggregated", "", &["--canary-interval=0"]).await;
    let frontend = fleet.frontend(&[]).await;
    until_listed(&frontend).await;
    until_all_answer(&frontend, &[&whole]).await;
    let expected = same_text(streams(&frontend, 1, TOKENS).await).await;
    let (prefill, decode) =
        tokio::join!(worker(&fleet, "prefill", ""), worker(&fleet, "decode", ""));
    until_all_take_part(&frontend, &[&prefill, &decode]).await;
    let before = whole.finished().await;
    assert_eq!(
        same_text(streams(&frontend, 8, TOKENS).await).await,
        expected
    );
    assert_eq!(whole.finished().await, before);
    let metrics = frontend.get("/metrics").await.body;
    assert!(
        metrics.contains("genset_disaggregated_handover_seconds_count"),
        "{metrics}"
    );
    for worker in [prefill, decode, whole] {
        worker.stop().await;
    }
}

#[tokio::test]
async fn a_server_that_cannot_fetch_blocks_computes_the_prompt() {
    let fleet = Fleet::new(Directory::new());
    let (prefill, decode) = tokio::join!(
        worker(&fleet, "prefill", ""),
        worker(&fleet, "decode", "--fault fetch-fails")
    );
    let frontend = fleet.frontend(&[]).await;
    until_listed(&frontend).await;
    until_all_take_part(&frontend, &[&prefill, &decode]).await;
    // All answers are complete and equal.
    same_text(streams(&frontend, 8, TOKENS).await).await;
    let metrics = frontend.get("/metrics").await.body;
    assert!(
        metrics.contains("genset_disaggregated_whole_requests_total{"),
        "{metrics}"
    );
    prefill.stop().await;
    decode.stop().await;
}
