//! Determines how a process ended, from its socket and its exit status: which of the two says more.

use genset_process::{End, Process};
use tokio::time::{Duration, timeout};

use crate::failure::ChildFailure;
use crate::link::Link;

/// How long a process may take to exit after it closed its socket, and how long its last frames are read after it exited.
const SETTLE: Duration = Duration::from_secs(1);

/// Waits until the process has ended by itself or must be ended.
pub(crate) async fn ended(process: &mut Process, link: &Link) -> ChildFailure {
    tokio::select! {
        biased;
        trouble = link.trouble() => after_trouble(process, trouble).await,
        end = process.ended() => {
            // Frames that it sent before its exit are read first; they may say more.
            let trouble = timeout(SETTLE, link.trouble()).await;
            conclude(trouble.ok(), Some(end))
        }
    }
}

/// Handles trouble on the socket. A closed socket is usually the first sign of an exit.
async fn after_trouble(process: &mut Process, trouble: ChildFailure) -> ChildFailure {
    if !matches!(
        trouble,
        ChildFailure::ClosedSocket | ChildFailure::HalfFrame
    ) {
        return trouble;
    }
    let end = timeout(SETTLE, process.ended()).await;
    conclude(Some(trouble), end.ok())
}

/// Determines the failure after the process was reaped. A process that closed its socket may have exited after the time limit;
/// then its exit status says more, unless it was our kill.
pub(crate) fn settle(failure: ChildFailure, end: Option<End>) -> ChildFailure {
    let is_slow = failure == ChildFailure::ClosedSocket;
    match end {
        Some(End::OutOfMemory) if is_slow || failure == ChildFailure::Killed => {
            ChildFailure::OutOfMemory
        }
        Some(end @ (End::Exited { .. } | End::Crashed { .. })) if is_slow => end.into(),
        Some(End::Exited { .. } | End::Crashed { .. } | End::Killed | End::OutOfMemory) | None => {
            failure
        }
    }
}

/// Determines the failure from what was seen on the socket and, if the process has ended, how.
fn conclude(trouble: Option<ChildFailure>, end: Option<End>) -> ChildFailure {
    let end = end.map(ChildFailure::from);
    match (trouble, end) {
        (None | Some(ChildFailure::ClosedSocket), Some(end)) => end,
        // The exit cut the frame off.
        (
            Some(ChildFailure::HalfFrame),
            Some(
                end @ (ChildFailure::Crashed { .. }
                | ChildFailure::Killed
                | ChildFailure::OutOfMemory),
            ),
        ) => end,
        (Some(trouble), _) => trouble,
        (None, None) => ChildFailure::ClosedSocket,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_ran_out_is_told_from_our_kill_and_from_anothers() {
        let settled = |failure| settle(failure, Some(End::OutOfMemory));
        assert_eq!(settled(ChildFailure::Killed), ChildFailure::OutOfMemory);
        assert_eq!(
            settled(ChildFailure::ClosedSocket),
            ChildFailure::OutOfMemory
        );
        assert_eq!(settled(ChildFailure::HalfFrame), ChildFailure::HalfFrame);
        let killed = settle(ChildFailure::Killed, Some(End::Killed));
        assert_eq!(killed, ChildFailure::Killed);
    }

    #[test]
    fn an_end_that_took_its_time_is_told_from_a_socket_that_was_closed() {
        let settled = |end| settle(ChildFailure::ClosedSocket, end);
        let exited = End::Exited { code: 3 };
        assert_eq!(settled(Some(exited)), ChildFailure::Exited { code: 3 });
        assert_eq!(settled(Some(End::Killed)), ChildFailure::ClosedSocket);
        assert_eq!(settled(None), ChildFailure::ClosedSocket);
        assert_eq!(
            settle(ChildFailure::HalfFrame, Some(exited)),
            ChildFailure::HalfFrame
        );
    }
}
