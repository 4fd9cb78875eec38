//! [`GuardedGroup`]: a child and all that it started, which die with this process.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};

/// What the guard runs, with the seconds that the group has when our end of the pipe is gone, and what is removed then. Signals that a terminal sends to
/// everybody, or a member of the group to all of it, are not for the guard.
const GUARD: &str = "trap '' HUP INT QUIT TERM USR1 USR2 PIPE ALRM TSTP; read -r line; sleep \"$0\"; rm -rf -- \"$@\"; kill -KILL 0";

/// A process group. Killed when dropped; to be dropped before its leader is reaped, or be told that it was.
#[derive(Debug)]
struct Group(Option<Pid>);

impl Group {
    /// Kills whoever is left of the group.
    fn kill(&self) {
        if let Some(pid) = self.0 {
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

/// A group led by a guard: a shell that does nothing but read from a pipe of ours.
///
/// When this process ends, however it ends, the pipe closes and the guard kills the group. And as long as the guard is not
/// reaped, the group's id is nobody else's, so that a kill never meets a stranger.
#[derive(Debug)]
pub(crate) struct GuardedGroup {
    /// Dropped first: the group is killed while its leader is still ours.
    group: Group,
    id: i32,
    guard: Child,
    /// Our end of the pipe; the guard waits for it to close.
    _pipe: Option<ChildStdin>,
}

impl GuardedGroup {
    /// A group of a guard alone. `grace`, in whole seconds: what its members may take to end by themselves when this process
    /// is gone. `leftovers`: files and folders of ours that the guard removes then.
    ///
    /// # Errors
    /// When there is no shell, or the system starts no more processes.
    pub(crate) fn start(grace: Duration, leftovers: &[PathBuf]) -> io::Result<Self> {
        let mut guard = Command::new("sh")
            .args(["-c", GUARD, &grace.as_secs().to_string()])
            .args(leftovers)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| {
                io::Error::other(format!("no shell (sh) guards the process: {error}"))
            })?;
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
    pub(crate) fn id(&self) -> i32 {
        self.id
    }

    /// Kills whoever is left of the group, the guard included.
    pub(crate) fn kill(&self) {
        self.group.kill();
    }

    /// Kills whoever is left and reaps the guard.
    pub(crate) async fn end(mut self) {
        self.group.kill();
        // Killed, so this ends; a process that the kernel cannot end is the kernel's to report.
        drop(self.guard.wait().await);
        self.group.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn sleeper(group: &GuardedGroup) -> Child {
        let mut command = Command::new("sleep");
        command.arg("1000").process_group(group.id());
        command.spawn().unwrap()
    }

    #[tokio::test]
    async fn an_ended_group_takes_its_members_along() {
        let group = GuardedGroup::start(Duration::ZERO, &[]).unwrap();
        let mut member = sleeper(&group);
        group.end().await;
        assert!(!member.wait().await.unwrap().success());
    }

    #[tokio::test]
    async fn a_dropped_group_takes_its_members_along() {
        let group = GuardedGroup::start(Duration::ZERO, &[]).unwrap();
        let mut member = sleeper(&group);
        drop(group);
        assert!(!member.wait().await.unwrap().success());
    }

    /// Whether the shell has come to its `trap`.
    fn ignores_term(pid: i32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
        ignored & (1 << 14) != 0
    }

    #[tokio::test]
    async fn the_guard_outlives_the_signals_of_its_members() {
        let mut group = GuardedGroup::start(Duration::ZERO, &[]).unwrap();
        while !ignores_term(group.id()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Sent to all, the guard included.
        let to_all = "for s in HUP INT QUIT TERM USR1; do kill -s $s 0; done; exec sleep 1000";
        let script = format!("trap '' HUP INT QUIT TERM USR1; {to_all}");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).process_group(group.id());
        let mut member = command.spawn().unwrap();
        drop(group._pipe.take());
        let status = member.wait().await.unwrap();
        assert_eq!(status.signal(), Some(9));
    }

    #[tokio::test]
    async fn the_guard_removes_what_is_left_and_kills_when_its_pipe_closes() {
        let folder = tempfile::tempdir().unwrap();
        let leftovers = ["-rf file", "folder"].map(|name| folder.path().join(name));
        std::fs::write(&leftovers[0], "").unwrap();
        std::fs::create_dir_all(leftovers[1].join("in it")).unwrap();
        let mut group = GuardedGroup::start(Duration::ZERO, &leftovers).unwrap();
        let mut member = sleeper(&group);
        // As when this process ends.
        drop(group._pipe.take());
        assert!(!member.wait().await.unwrap().success());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
