//! The server's process, in a group that dies with this process.
//!
//! A guard, a shell that does nothing but read from a pipe of ours, leads the group. When this process ends, however it
//! ends, the pipe closes and the guard kills the group: the server and what it started. And as long as we have not reaped
//! the guard, the group's id is nobody else's, so that a kill never meets a stranger.

use std::io;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};

use crate::command::Plan;
use crate::config::LauncherConfig;

/// What the guard runs. The signals that a terminal sends to everybody are not for it.
const GUARD: &str = "trap '' HUP INT TERM; read -r line; kill -KILL 0";

/// A server that runs.
#[derive(Debug)]
pub(crate) struct Process {
    /// Dropped first: the group is killed while its leader is still ours.
    pub(crate) group: Group,
    pub(crate) child: Child,
}

impl Process {
    /// Starts the program, listening on `port`.
    ///
    /// # Errors
    /// As the system says; `NotFound` when there is no such program.
    pub(crate) fn spawn(config: &LauncherConfig, plan: &Plan, port: u16) -> io::Result<Self> {
        let group = Group::start()?;
        let mut command = Command::new(&plan.program);
        command
            .args(plan.args(port))
            // Without it, Python holds its lines back while it has a pipe to write to.
            .env("PYTHONUNBUFFERED", "1")
            .envs(&config.env)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(group.id()?)
            .kill_on_drop(true);
        Ok(Self {
            child: command.spawn()?,
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

    /// Kills whoever is left and reaps both children.
    pub(crate) async fn end(mut self) {
        self.group.kill();
        // Killed, so these end; a process that the kernel cannot end is the kernel's to report.
        drop(self.child.wait().await);
        drop(self.group.guard.wait().await);
        self.group.pid = None;
    }
}

/// A process group and its guard. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Group {
    guard: Child,
    /// Our end of the pipe; the guard waits for it to close.
    _pipe: Option<ChildStdin>,
    pid: Option<Pid>,
}

impl Group {
    fn start() -> io::Result<Self> {
        let mut guard = Command::new("sh")
            .args(["-c", GUARD])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = guard
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        Ok(Self {
            _pipe: guard.stdin.take(),
            guard,
            pid,
        })
    }

    fn id(&self) -> io::Result<i32> {
        let pid = self
            .pid
            .ok_or_else(|| io::Error::other("the guard ended before it was seen"))?;
        Ok(pid.as_raw_nonzero().get())
    }

    fn kill(&self) {
        if let Some(pid) = self.pid {
            // Nobody is left: the usual case at an orderly end.
            kill_process_group(pid, Signal::KILL).unwrap_or_default();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}
