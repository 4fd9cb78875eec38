//! [`Supervisor`]: waits for the end of the process, makes sure of it, and says what it was.

use std::sync::Arc;

use genset_backend_common::HealthReporter;
use genset_process::{End, Process};
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;

use crate::failure::ChildFailure;
use crate::link::Link;

/// How long a process that closed its socket may take to exit, and one that exited leaves for its last frames to be read.
const SETTLE: Duration = Duration::from_secs(1);

/// How the worker lets the process go.
#[derive(Debug, Clone, Default)]
pub(crate) struct Release {
    /// It was told to go, and may take its time.
    pub(crate) leave: CancellationToken,
    /// It ends now.
    pub(crate) kill: CancellationToken,
}

impl Release {
    /// For one of several processes: let go with the others, or alone.
    pub(crate) fn child(&self) -> Self {
        Self {
            leave: self.leave.child_token(),
            kill: self.kill.child_token(),
        }
    }
}

/// The one owner of the process.
pub(crate) struct Supervisor {
    pub(crate) process: Process,
    pub(crate) link: Arc<Link>,
    pub(crate) health: HealthReporter,
    /// Whether another process takes this one's place.
    pub(crate) is_mended: bool,
    pub(crate) release: Release,
    pub(crate) exit_timeout: Duration,
}

impl Supervisor {
    /// Returns when the process and its group are gone, it was reaped, and every call has its error.
    pub(crate) async fn run(mut self) {
        let failure = self.end().await;
        let tail = self.process.tail();
        let end = self.process.end().await;
        let failure = settle(failure, end);
        tracing::debug!(?end, %failure, "the engine's process ended");
        if failure == ChildFailure::Stopped {
            self.link.fail(failure.to_error(&[]));
            return;
        }
        let error = failure.to_error(&tail.lines());
        let message = error.to_string();
        if self.is_mended {
            // Before anybody can see it in an answer, so that nobody takes it for the end.
            self.health.report_down(message);
            self.link.fail(error);
        } else {
            self.link.fail(error);
            self.health.report_dead(message);
        }
    }

    /// Waits until the process has ended or has to.
    async fn end(&mut self) -> ChildFailure {
        let release = self.release.clone();
        tokio::select! {
            biased;
            () = release.kill.cancelled() => ChildFailure::Stopped,
            () = release.leave.cancelled() => {
                tokio::select! {
                    biased;
                    () = release.kill.cancelled() => {}
                    () = self.process.leave(self.exit_timeout, "the engine's process") => {}
                }
                ChildFailure::Stopped
            }
            failure = ended(&mut self.process, &self.link) => failure,
        }
    }
}

/// Waits until the process has ended by itself or has to.
async fn ended(process: &mut Process, link: &Link) -> ChildFailure {
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
fn settle(failure: ChildFailure, end: Option<End>) -> ChildFailure {
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
