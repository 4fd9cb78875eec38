//! Workers that publish different cards under the same name.

use crate::fleet::{Fleet, until_listed};
use crate::load::burst;
use crate::meeting::Meeting;
use crate::support::until;

pub(crate) async fn workers_whose_cards_disagree_are_kept_apart<M: Meeting>(fleet: Fleet<M>) {
    let (short, long) = tokio::join!(
        fleet.worker(&["--context-length=100"]),
        fleet.worker(&["--context-length=200"])
    );
    let frontend = fleet.frontend(&[]).await;
    until_listed(&frontend).await;
    until(async || frontend.log().contains("card differs")).await;
    let before = (short.finished().await, long.finished().await);
    assert_eq!(burst(&frontend, 40).await, [""; 0]);
    let (short_did, long_did) = (
        short.finished().await - before.0,
        long.finished().await - before.1,
    );
    // One card is served, only by its worker.
    assert!(short_did.max(long_did) >= 40.0, "{short_did} {long_did}");
    assert!(short_did.min(long_did) < 2.0, "{short_did} {long_did}");
    // When that worker leaves, the other's card is served.
    let (served, other) = if short_did > long_did {
        (short, long)
    } else {
        (long, short)
    };
    served.stop().await;
    let before = other.finished().await;
    until(async || burst(&frontend, 1).await.is_empty()).await;
    assert!(other.finished().await > before);
}
