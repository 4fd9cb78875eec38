//! [`Process`]: a running program, with its group and its output.

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::Level;

use crate::end::End;
use crate::group::GuardedGroup;
use crate::lines::{Tail, follow, last_lines};
use crate::oom::OomKills;
use crate::throttle::{LogLimit, Throttle};

/// A running program and its descendants. Dropping it kills them.
#[derive(Debug)]
pub struct Process {
    /// Dropped first: the group is killed before its leader can be reaped.
    group: GuardedGroup,
    child: Child,
    pid: u32,
    oom_kills: Option<OomKills>,
    tail: Arc<Tail>,
    readers: Vec<AbortOnDropHandle<()>>,
    /// Values that live as long as the process, such as a file that it reads.
    _kept: Box<dyn Any + Send + Sync>,
}

/// Which lines of a process are kept for errors, and how many are logged.
#[derive(Debug, Clone, Copy)]
pub struct LineLimits {
    /// The maximum number of last lines in an error.
    pub kept: usize,
    /// Whether lines of standard output are kept too; those of standard error always are.
    pub keeps_stdout: bool,
    /// How much is logged.
    pub log: LogLimit,
}

impl Process {
    /// Starts the program in its own group, with no input and with both outputs piped to us. `orphan_grace`: how long it may
    /// take to exit after this process is gone. `leftovers`: files to remove then. `kept` is dropped after the process.
    ///
    /// # Errors
    /// The system's error; `NotFound` if there is no such program.
    pub fn spawn(
        mut command: Command,
        orphan_grace: Duration,
        leftovers: &[PathBuf],
        kept: impl Any + Send + Sync,
    ) -> io::Result<Self> {
        let group = GuardedGroup::start(orphan_grace, leftovers)?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // The worker handles signals to the terminal's foreground group: it drains first.
            .process_group(group.id())
            .kill_on_drop(true);
        let child = command.spawn()?;
        let pid = child
            .id()
            .ok_or_else(|| io::Error::other("the process ended before it was seen"))?;
        Ok(Self {
            group,
            child,
            pid,
            oom_kills: OomKills::of(pid),
            tail: Arc::new(Tail::new(0)),
            readers: Vec::new(),
            _kept: Box::new(kept),
        })
    }

    /// Reads the process's output. Call it once. `log` receives the lines within the log limit, each with a default level:
    /// `WARN` for standard error, else `INFO`.
    pub fn follow(
        &mut self,
        tasks: &TaskTracker,
        limits: LineLimits,
        log: impl Fn(Level, &str) + Clone + Send + 'static,
    ) {
        let tail = Arc::new(Tail::new(limits.kept));
        self.tail = Arc::clone(&tail);
        let throttle = Arc::new(Throttle::new(limits.log));
        let take = |level, is_kept| {
            let (tail, throttle, log) = (Arc::clone(&tail), Arc::clone(&throttle), log.clone());
            move |line: &str| {
                if is_kept {
                    tail.keep(line);
                }
                throttle.pass(line, |line| log(level, line));
            }
        };
        let stdout = self.child.stdout.take();
        let stdout =
            stdout.map(|it| tasks.spawn(follow(it, take(Level::INFO, limits.keeps_stdout))));
        let stderr = self.child.stderr.take();
        let stderr = stderr.map(|it| tasks.spawn(follow(it, take(Level::WARN, true))));
        let readers = stdout.into_iter().chain(stderr);
        self.readers = readers.map(AbortOnDropHandle::new).collect();
    }

    /// The process's id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// The last lines that it printed.
    #[must_use]
    pub fn tail(&self) -> Arc<Tail> {
        Arc::clone(&self.tail)
    }

    /// Waits until the process ends by itself.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub async fn ended(&mut self) -> End {
        match self.child.wait().await {
            Ok(status) => End::of(status, self.oom_kills.as_ref()),
            Err(error) => {
                tracing::error!(%error, "the end of a process cannot be awaited; it is killed");
                End::Killed
            }
        }
    }

    /// Asks the process itself to exit. It must end its own children.
    pub fn terminate(&self) {
        // A process without an id is reaped already.
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).unwrap_or_default();
        }
    }

    /// Waits up to `limit` for a process that was asked to exit. If it has not exited by then, logs that and leaves the process
    /// running.
    pub async fn leave(&mut self, limit: Duration, name: &str) {
        if timeout(limit, self.child.wait()).await.is_err() {
            tracing::warn!(
                "{name} did not exit within {limit:?} after it was told to; it is killed"
            );
        }
    }

    /// Kills and reaps all remaining processes, and waits a short time for the last lines. Returns how the process ended, if
    /// known: by this kill, unless it ended earlier.
    pub async fn end(mut self) -> Option<End> {
        // Also kill the process directly: it may have left the group. Usually it has exited already.
        self.child.start_kill().unwrap_or_default();
        self.group.kill();
        // It was killed, so this returns unless the kernel cannot end the process.
        let status = self.child.wait().await.ok();
        self.group.end().await;
        last_lines(self.readers).await;
        status.map(|status| End::of(status, self.oom_kills.as_ref()))
    }
}
