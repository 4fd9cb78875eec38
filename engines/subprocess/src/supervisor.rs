//! [`Supervisor`]: waits for the end of the process, makes sure of it, and says what it was.

use std::os::unix::net::UnixStream;
use std::process::ExitStatus;
use std::sync::Arc;

use genset_backend_common::HealthReporter;
use tokio::process::Child;
use tokio::time::{Duration, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::failure::ChildFailure;
use crate::lines::Tail;
use crate::link::Link;
use crate::oom::OomKills;
use crate::process::{Group, classify};

/// How long a process that closed its socket may take to exit, and one that exited leaves for its last frames to be read.
const SETTLE: Duration = Duration::from_secs(1);
/// How long the last lines may take after the process group is gone.
const LAST_LINES: Duration = Duration::from_millis(500);

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
    pub(crate) group: Group,
    pub(crate) child: Child,
    /// Dropped with the rest: the process sees its end when this one's process is gone.
    pub(crate) leash: UnixStream,
    pub(crate) oom_kills: Option<OomKills>,
    pub(crate) link: Arc<Link>,
    pub(crate) tail: Arc<Tail>,
    pub(crate) readers: Vec<AbortOnDropHandle<()>>,
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
        let failure = name_kill(failure, self.oom_kills.as_ref());
        // Where it was reaped already, its group's id is free for others only once nobody is left in the group, and the kernel
        // does not give a number out again so soon.
        self.group.kill();
        // It was killed, so this ends; a process that the kernel cannot end is the kernel's to report.
        let status = self.child.wait().await;
        self.group.finish();
        tracing::debug!(?status, %failure, "the engine's process ended");
        for reader in &mut self.readers {
            drop(timeout(LAST_LINES, reader).await);
        }
        if failure == ChildFailure::Stopped {
            self.link.fail(failure.to_error(&[]));
            return;
        }
        let error = failure.to_error(&self.tail.lines());
        let message = error.message().to_owned();
        if self.is_mended {
            // Before anybody can see it in an answer, so that nobody takes it for the end.
            self.health.report_down(message);
            self.link.fail(error);
        } else {
            self.link.fail(error);
            self.health.report_dead(message);
        }
        drop(self.leash);
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
                    () = self.leave() => {}
                }
                ChildFailure::Stopped
            }
            trouble = self.link.trouble() => self.after_trouble(trouble).await,
            status = self.child.wait() => {
                // What it sent before it went is read first, and may say more.
                let trouble = timeout(SETTLE, self.link.trouble()).await;
                conclude(trouble.ok(), status.ok())
            }
        }
    }

    /// Lets the process exit by itself, for as long as it may.
    async fn leave(&mut self) {
        let limit = self.exit_timeout;
        if timeout(limit, self.child.wait()).await.is_err() {
            tracing::warn!(
                "the engine's process did not exit within {limit:?} after its cleanup; it is killed"
            );
        }
    }

    /// A closed socket is mostly the first sign of an exit.
    async fn after_trouble(&mut self, trouble: ChildFailure) -> ChildFailure {
        if !matches!(
            trouble,
            ChildFailure::ClosedSocket | ChildFailure::HalfFrame
        ) {
            return trouble;
        }
        let status = timeout(SETTLE, self.child.wait()).await;
        conclude(Some(trouble), status.ok().and_then(Result::ok))
    }
}

/// A kill that nobody owns up to is the kernel's where its counter says so.
fn name_kill(failure: ChildFailure, oom_kills: Option<&OomKills>) -> ChildFailure {
    if failure == ChildFailure::Killed && oom_kills.is_some_and(OomKills::have_grown) {
        return ChildFailure::OutOfMemory;
    }
    failure
}

/// What happened, given what was seen on the socket and how the process ended, where it did.
fn conclude(trouble: Option<ChildFailure>, status: Option<ExitStatus>) -> ChildFailure {
    let end = status.map(classify);
    match (trouble, end) {
        (None | Some(ChildFailure::ClosedSocket), Some(end)) => end,
        // It was cut off by what ended it.
        (
            Some(ChildFailure::HalfFrame),
            Some(end @ (ChildFailure::Crashed { .. } | ChildFailure::Killed)),
        ) => end,
        (Some(trouble), _) => trouble,
        (None, None) => ChildFailure::ClosedSocket,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_is_the_kernels_where_the_count_of_its_group_grew() {
        let root = tempfile::tempdir().unwrap();
        let kills = OomKills::in_test(root.path(), 3);
        let named = |failure| name_kill(failure, Some(&kills));
        assert_eq!(named(ChildFailure::Killed), ChildFailure::Killed);
        OomKills::count_in_test(root.path(), 4);
        assert_eq!(named(ChildFailure::Killed), ChildFailure::OutOfMemory);
        assert_eq!(named(ChildFailure::HalfFrame), ChildFailure::HalfFrame);
        assert_eq!(name_kill(ChildFailure::Killed, None), ChildFailure::Killed);
    }
}
