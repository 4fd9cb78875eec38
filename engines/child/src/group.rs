//! [`Group`]: a child and all that it started. [`GuardedGroup`]: one that dies with this process.

use std::io;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};

/// What the guard runs. The signals that a terminal sends to everybody are not for it.
const GUARD: &str = "trap '' HUP INT TERM; read -r line; kill -KILL 0";

/// A process group. Killed when dropped; to be dropped before its leader is reaped, or be told that it was.
#[derive(Debug)]
pub struct Group(Option<Pid>);

impl Group {
    /// The group that process `pid` leads.
    #[must_use]
    pub fn led_by(pid: u32) -> Self {
        Self(i32::try_from(pid).ok().and_then(Pid::from_raw))
    }

    /// Kills whoever is left of the group.
    pub fn kill(&self) {
        if let Some(pid) = self.0 {
            // Nobody is left: the usual case at an orderly end.
            kill_process_group(pid, Signal::KILL).unwrap_or_default();
        }
    }

    /// Kills for the last time; the leader is reaped, and the id may belong to others soon.
    pub fn finish(&mut self) {
        self.kill();
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A group led by a guard: a shell that does nothing but read from a pipe of ours.
///
/// When this process ends, however it ends, the pipe closes and the guard kills the group. And as long as the guard is not
/// reaped, the group's id is nobody else's, so that a kill never meets a stranger.
#[derive(Debug)]
pub struct GuardedGroup {
    /// Dropped first: the group is killed while its leader is still ours.
    group: Group,
    id: i32,
    guard: Child,
    /// Our end of the pipe; the guard waits for it to close.
    _pipe: Option<ChildStdin>,
}

impl GuardedGroup {
    /// A group of a guard alone.
    ///
    /// # Errors
    /// When there is no shell, or the system starts no more processes.
    pub fn start() -> io::Result<Self> {
        let mut guard = Command::new("sh")
            .args(["-c", GUARD])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let pid = guard.id().and_then(|pid| i32::try_from(pid).ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            return Err(io::Error::other("the guard ended before it was seen"));
        };
        Ok(Self {
            group: Group(Some(pid)),
            id: pid.as_raw_nonzero().get(),
            _pipe: guard.stdin.take(),
            guard,
        })
    }

    /// The group's id, for processes that are to join it.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.id
    }

    /// Kills whoever is left of the group, the guard included.
    pub fn kill(&self) {
        self.group.kill();
    }

    /// Kills whoever is left and reaps the guard.
    pub async fn end(mut self) {
        self.group.kill();
        // Killed, so this ends; a process that the kernel cannot end is the kernel's to report.
        drop(self.guard.wait().await);
        self.group.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(group: &GuardedGroup) -> Child {
        let mut command = Command::new("sleep");
        command.arg("1000").process_group(group.id());
        command.spawn().unwrap()
    }

    #[tokio::test]
    async fn an_ended_group_takes_its_members_along() {
        let group = GuardedGroup::start().unwrap();
        let mut member = sleeper(&group);
        group.end().await;
        assert!(!member.wait().await.unwrap().success());
    }

    #[tokio::test]
    async fn a_dropped_group_takes_its_members_along() {
        let group = GuardedGroup::start().unwrap();
        let mut member = sleeper(&group);
        drop(group);
        assert!(!member.wait().await.unwrap().success());
    }

    #[tokio::test]
    async fn the_guard_kills_when_its_pipe_closes() {
        let mut group = GuardedGroup::start().unwrap();
        let mut member = sleeper(&group);
        // As when this process ends.
        drop(group._pipe.take());
        assert!(!member.wait().await.unwrap().success());
    }
}
