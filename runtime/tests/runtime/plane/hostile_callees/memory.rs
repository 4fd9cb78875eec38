//! Workers that send more than this process has room for.

use super::*;

const BUDGET: usize = 1 << 20;

/// The worker is not at fault, and no other one would do better.
#[tokio::test]
async fn an_answer_that_finds_no_room_here_is_for_no_other_worker() {
    let trap = Trap::set(WireConfig {
        max_memory_bytes: BUDGET,
        max_connection_memory_bytes: BUDGET,
        ..deaf()
    })
    .await;
    let (mut response, mut peer) = trap.open().await;
    let item = encode_payload(&"x".repeat(BUDGET / 4)).unwrap();
    for _ in 0..8 {
        peer.send_frame(FrameKind::Item, 1, &item).await;
    }
    peer.expect(FrameKind::Cancel).await;
    // The items before it are not numbers, and yield their own errors.
    let refusal = loop {
        let error = soon(response.next()).await.unwrap().unwrap_err();
        if error.kind() != ErrorKind::Internal {
            break error;
        }
    };
    assert_eq!(refusal.kind(), ErrorKind::Overloaded, "{refusal}");
    assert!(!refusal.may_go_elsewhere());
    assert!(refusal.details().retry_after.is_some());
}
