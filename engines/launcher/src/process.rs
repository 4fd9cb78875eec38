//! The server's process, in a group that dies with this process.

use std::io;
use std::process::Stdio;

use genset_child::{GuardedGroup, OomKills};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::command::Plan;
use crate::config::LauncherConfig;

/// A server that runs.
#[derive(Debug)]
pub(crate) struct Process {
    /// Dropped first: the group is killed while its leader is still ours.
    pub(crate) group: GuardedGroup,
    pub(crate) child: Child,
    pub(crate) oom_kills: Option<OomKills>,
}

impl Process {
    /// Starts the program, listening on `port`.
    ///
    /// # Errors
    /// As the system says; `NotFound` when there is no such program.
    pub(crate) fn spawn(config: &LauncherConfig, plan: &Plan, port: u16) -> io::Result<Self> {
        let group = GuardedGroup::start()?;
        let mut command = Command::new(&plan.program);
        command
            .args(plan.args(port))
            // Without it, Python holds its lines back while it has a pipe to write to.
            .env("PYTHONUNBUFFERED", "1")
            .envs(&config.env)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(group.id())
            .kill_on_drop(true);
        let child = command.spawn()?;
        Ok(Self {
            oom_kills: child.id().and_then(OomKills::of),
            child,
            group,
        })
    }

    /// Asks the server itself to go; what it started is its own to end.
    pub(crate) fn terminate(&self) {
        let pid = self
            .child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It is gone already: then there is nothing to ask.
            kill_process(pid, Signal::TERM).unwrap_or_default();
        }
    }

    /// Kills whoever is left and reaps them.
    pub(crate) async fn end(mut self) {
        self.group.kill();
        // Killed, so this ends; a process that the kernel cannot end is the kernel's to report.
        drop(self.child.wait().await);
        self.group.end().await;
    }
}
