//! Workers that let a deadline pass although their connection is alive.

use genset_wire::{Cancel, decode_payload};

use super::*;

/// Shorter than the patience of the tests.
const DEADLINE: Duration = Duration::from_secs(30);

/// A request with a deadline, which [`pass_deadline`] lets pass.
fn hurried() -> RequestContext {
    ctx().with_deadline(Instant::now() + DEADLINE)
}

async fn pass_deadline() {
    tokio::time::pause();
    tokio::time::advance(DEADLINE).await;
    tokio::time::resume();
}

/// The worker learns that nobody waits for the stream any more.
async fn expect_left(peer: &mut Peer) {
    let cancel = peer.expect(FrameKind::Cancel).await;
    let cancel: Cancel = decode_payload(&cancel.payload).unwrap();
    assert_eq!(
        (cancel.reason, cancel.discard),
        (CancelReason::Deadline, true)
    );
}

#[tokio::test]
async fn a_worker_that_never_answers_is_not_waited_for_beyond_the_deadline() {
    let trap = Trap::set(deaf()).await;
    let silent = async {
        let mut peer = Peer::greeting(&trap.listener).await;
        peer.expect(FrameKind::Request).await;
        pass_deadline().await;
        expect_left(&mut peer).await;
    };
    let (response, ()) = tokio::join!(trap.call_as(hurried()), silent);
    let error = error(response);
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
}

#[tokio::test]
async fn a_worker_that_stops_in_the_middle_is_not_waited_for_beyond_the_deadline() {
    let trap = Trap::set(deaf()).await;
    let (mut response, mut peer) = trap.open_as(hurried()).await;
    pass_deadline().await;
    let error = next_error(&mut response).await;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    expect_left(&mut peer).await;
    // Later items are ignored, and the connection continues.
    peer.send(FrameKind::Item, 1, &1u32).await;
    let again = async {
        let request = peer.expect(FrameKind::Request).await;
        peer.send_frame(FrameKind::End, request.stream, &[]).await;
    };
    let (response, ()) = tokio::join!(trap.call(), again);
    let rest: Vec<u32> = soon(response.unwrap().try_collect()).await.unwrap();
    assert!(rest.is_empty());
}
