//! How a process ended: what was seen of its socket and of itself, and which of both says more.

use genset_process::{End, Process};
use tokio::time::{Duration, timeout};

use crate::failure::ChildFailure;
use crate::link::Link;

/// How long a process that closed its socket may take to exit, and one that exited leaves for its last frames to be read.
const SETTLE: Duration = Duration::from_secs(1);

/// Waits until the process has ended by itself or has to.
pub(crate) async fn ended(process: &mut Process, link: &Link) -> ChildFailure {
    tokio::select! {
        biased;
        trouble = link.trouble() => after_trouble(process, trouble).await,
        end = process.ended() => {
            // What it sent before it went is read first, and may say more.
            let trouble = timeout(SETTLE, link.trouble()).await;
            conclude(trouble.ok(), Some(end))
        }
    }
}

/// A closed socket is mostly the first sign of an exit.
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

/// What happened, now that the process is reaped. One that closed its socket may have been slower to end than it was given:
/// how it ended says more, unless that was our kill.
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

/// What happened, given what was seen on the socket and how the process ended, where it did.
fn conclude(trouble: Option<ChildFailure>, end: Option<End>) -> ChildFailure {
    let end = end.map(ChildFailure::from);
    match (trouble, end) {
        (None | Some(ChildFailure::ClosedSocket), Some(end)) => end,
        // It was cut off by what ended it.
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
