//! The nats-server goes down and comes back.

use crate::answers::End;
use crate::fleet::{Fleet, until_all_answer};
use crate::load::{ask, burst, ends, streams};
use crate::nats::EtcdAndNats;
use crate::support::until;

pub(crate) async fn requests_work_again_when_nats_is_back(mut fleet: Fleet<EtcdAndNats>) {
    let [one, two] = fleet.two_workers(&["--token-delay-ms=20"]).await;
    let frontend = fleet.frontend_of(&[&one, &two]).await;
    let begun = streams(&frontend, 10, 1_000_000).await;
    fleet.meeting.kill_nats().await;
    // Nothing hangs: streams in progress end, and new requests are refused.
    for end in ends(begun).await {
        let End::Error(error) = end else {
            panic!("{end:?}")
        };
        assert_eq!(error["type"], "server_error", "{error}");
    }
    let refusal = ask(frontend.address).await.expect_err("no way to a worker");
    assert!(
        refusal.starts_with("503 ") || refusal.starts_with("502 "),
        "{refusal}"
    );
    tokio::join!(one.until_running(0.0), two.until_running(0.0));
    fleet.meeting.start_nats_again().await;
    until(async || ask(frontend.address).await.is_ok()).await;
    until(async || burst(&frontend, 20).await.is_empty()).await;
    until_all_answer(&frontend, &[&one, &two]).await;
    one.stop().await;
    two.stop().await;
}
