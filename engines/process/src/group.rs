//! [`GuardedGroup`]: a child and its descendants, which die with this process.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};

/// Both shells run this first: they ignore signals that a terminal or a group member sends to the whole group.
const DEAF: &str = "trap '' HUP INT QUIT TERM USR1 USR2 PIPE ALRM TSTP";

/// The guard's script. `$0` is the number of seconds that the group has after our end of the pipe closes.
const GUARD: &str = "read -r line; sleep \"$0\"; echo over; kill -KILL 0";

/// The sweeper's script; it removes its arguments. It waits until the pipe from the guard closes: then the group is dead, and a
/// file system that hangs delays only the sweeper. If the guard prints no line, we ended the group ourselves.
const SWEEPER: &str = "read -r line || exit 0; read -r line; rm -rf -- \"$@\"";

/// A process group, killed on drop. Drop it before its leader is reaped, or clear the id once it is.
#[derive(Debug)]
struct Group(Option<Pid>);

impl Group {
    /// Kills the remaining members of the group.
    fn kill(&self) {
        if let Some(pid) = self.0 {
            // Fails if the group is empty, the usual case after an orderly exit.
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
/// When this process ends, however it ends, the pipe closes and the guard kills the group. The group's id cannot be reused
/// until the guard is reaped, so a kill never hits another process.
#[derive(Debug)]
pub(crate) struct GuardedGroup {
    /// Dropped first: the group is killed before its leader can be reaped.
    group: Group,
    id: i32,
    guard: Child,
    /// Our end of the pipe; the guard waits for it to close.
    _pipe: Option<ChildStdin>,
    /// Set if there are files to remove. It has a group of its own because it outlives this one.
    sweeper: Option<Child>,
}

impl GuardedGroup {
    /// Starts a group that contains only the guard. `grace`, in whole seconds: how long members may take to exit after this
    /// process is gone. `leftovers`: our files and folders to remove after the members are dead.
    ///
    /// # Errors
    /// Fails if there is no shell or the system cannot start another process.
    pub(crate) fn start(grace: Duration, leftovers: &[PathBuf]) -> io::Result<Self> {
        let no_shell = |error: io::Error| {
            io::Error::other(format!("no shell (sh) guards the process: {error}"))
        };
        let mut guard = shell(GUARD);
        guard.arg(grace.as_secs().to_string()).stdin(Stdio::piped());
        if !leftovers.is_empty() {
            guard.stdout(Stdio::piped());
        }
        let mut guard = guard.spawn().map_err(no_shell)?;
        let sweeper = match guard.stdout.take() {
            Some(printed) => {
                let printed: Stdio = printed.try_into()?;
                let mut sweeper = shell(SWEEPER);
                sweeper.arg("sh").args(leftovers).stdin(printed);
                Some(sweeper.spawn().map_err(no_shell)?)
            }
            None => None,
        };
        let pid = guard.id().and_then(|pid| i32::try_from(pid).ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            return Err(io::Error::other("the guard ended before it was seen"));
        };
        Ok(Self {
            group: Group(Some(pid)),
            id: pid.as_raw_nonzero().get(),
            _pipe: guard.stdin.take(),
            guard,
            sweeper,
        })
    }

    /// The group's id, for processes that join it.
    pub(crate) fn id(&self) -> i32 {
        self.id
    }

    /// Kills the remaining members of the group, including the guard.
    pub(crate) fn kill(&self) {
        self.group.kill();
    }

    /// Kills the remaining members, reaps the guard, and ends the sweeper.
    pub(crate) async fn end(mut self) {
        self.group.kill();
        // The guard was killed, so this returns unless the kernel cannot end the process.
        drop(self.guard.wait().await);
        self.group.0 = None;
        if let Some(mut sweeper) = self.sweeper.take() {
            drop(sweeper.kill().await);
        }
    }
}

/// A shell in a group of its own.
fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg(format!("{DEAF}; {script}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    command
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use rustix::process::kill_process;

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

    /// Whether the shell has run its `trap`.
    fn ignores_term(pid: i32) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
        ignored & (1 << 14) != 0
    }

    #[tokio::test]
    async fn the_guard_outlives_the_signals_of_its_members() {
        let mut group = GuardedGroup::start(Duration::ZERO, &[]).unwrap();
        let deaf = async {
            while !ignores_term(group.id()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let patience = Duration::from_secs(60);
        tokio::time::timeout(patience, deaf).await.unwrap();
        // Sent to the whole group, including the guard.
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
    async fn all_are_killed_and_then_what_is_left_is_removed_when_the_pipe_closes() {
        let folder = tempfile::tempdir().unwrap();
        let leftovers = ["-rf file", "folder"].map(|name| folder.path().join(name));
        std::fs::write(&leftovers[0], "").unwrap();
        std::fs::create_dir_all(leftovers[1].join("in it")).unwrap();
        let mut group = GuardedGroup::start(Duration::ZERO, &leftovers).unwrap();
        let mut member = sleeper(&group);
        let mut sweeper = group.sweeper.take().unwrap();
        let signal = |signal| {
            let pid = sweeper.id().and_then(|pid| i32::try_from(pid).ok());
            kill_process(pid.and_then(Pid::from_raw).unwrap(), signal).unwrap();
        };
        let left = || std::fs::read_dir(folder.path()).unwrap().count();
        // Simulates a sweeper that hangs on its file system.
        signal(Signal::STOP);
        // Simulates the end of this process.
        drop(group._pipe.take());
        assert!(!member.wait().await.unwrap().success());
        assert_eq!(left(), 2);
        signal(Signal::CONT);
        assert!(sweeper.wait().await.unwrap().success());
        assert_eq!(left(), 0);
    }

    #[tokio::test]
    async fn an_end_that_is_ours_removes_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let leftovers = [file.path().to_owned()];
        let mut group = GuardedGroup::start(Duration::ZERO, &leftovers).unwrap();
        let mut sweeper = group.sweeper.take().unwrap();
        group.end().await;
        assert!(sweeper.wait().await.unwrap().success());
        assert!(file.path().exists());
    }
}
