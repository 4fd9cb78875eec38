//! [`Process`]: a program that runs, with its group and what it prints.

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

/// A program that runs, and all that it started. Dropped, they are killed.
#[derive(Debug)]
pub struct Process {
    /// Dropped first: the group is killed while its leader is still ours.
    group: GuardedGroup,
    child: Child,
    pid: u32,
    oom_kills: Option<OomKills>,
    tail: Arc<Tail>,
    readers: Vec<AbortOnDropHandle<()>>,
    /// What lasts as long as the process, such as a file that it reads.
    _kept: Box<dyn Any + Send + Sync>,
}

/// What of a process's lines is kept for errors, and what of them reaches the log.
#[derive(Debug, Clone, Copy)]
pub struct LineLimits {
    /// How many of the last lines an error carries.
    pub kept: usize,
    /// Whether lines of standard output are among them; those of standard error are.
    pub keeps_stdout: bool,
    /// How much reaches the log.
    pub log: LogLimit,
}

impl Process {
    /// Starts the program in a group of its own, with nothing to read and its outputs piped to us. `orphan_grace`: what it may
    /// take to end by itself when this process is gone. `leftovers`: what is removed then. `kept` is dropped after the process.
    ///
    /// # Errors
    /// As the system says; `NotFound` when there is no such program.
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
            // A signal for the terminal's foreground group is the worker's: it drains first.
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

    /// Follows what the process prints; to be called once. `log` gets the lines that the log takes, with the level of those
    /// that name none: of standard error `WARN`, else `INFO`.
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

    /// Waits until it ends by itself.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn ended(&mut self) -> End {
        match self.child.wait().await {
            Ok(status) => End::of(status, self.oom_kills.as_ref()),
            Err(error) => {
                tracing::error!(%error, "the end of a process cannot be awaited; it is killed");
                End::Killed
            }
        }
    }

    /// Asks the process itself to go; what it started is its own to end.
    pub fn terminate(&self) {
        // Without an id it is reaped already: then there is nothing to ask.
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM).unwrap_or_default();
        }
    }

    /// Waits until a process that was told to go has exited, for `limit` at most; says so in the log when it did not, and
    /// leaves it as it is.
    pub async fn leave(&mut self, limit: Duration, name: &str) {
        if timeout(limit, self.child.wait()).await.is_err() {
            tracing::warn!(
                "{name} did not exit within {limit:?} after it was told to; it is killed"
            );
        }
    }

    /// Kills whoever is left of it, reaps them, and waits for the last lines; not for long. How the process ended, where that
    /// is known: by this, unless it was faster.
    pub async fn end(mut self) -> Option<End> {
        // By itself too: it may have left the group. It is gone already: the usual case.
        self.child.start_kill().unwrap_or_default();
        self.group.kill();
        // Killed, so this ends; a process that the kernel cannot end is the kernel's to report.
        let status = self.child.wait().await.ok();
        self.group.end().await;
        last_lines(self.readers).await;
        status.map(|status| End::of(status, self.oom_kills.as_ref()))
    }
}
