//! [`GuardedGroup`]: a child and all that it started, which die with this process.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};

/// What both shells run first: signals that a terminal sends to everybody, or a member of the group to all of it, are not for them.
const DEAF: &str = "trap '' HUP INT QUIT TERM USR1 USR2 PIPE ALRM TSTP";

/// What the guard runs, with the seconds that the group has when our end of the pipe is gone.
const GUARD: &str = "read -r line; sleep \"$0\"; echo over; kill -KILL 0";

/// What the sweeper runs, with what it removes: it reads what the guard prints. The end of that is the group's, which nothing keeps
/// waiting: a folder may be on a file system that hangs. Without a line it is an end that we made.
const SWEEPER: &str = "read -r line || exit 0; read -r line; rm -rf -- \"$@\"";

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
    /// Where there is something to remove. It is in a group of its own, for it outlives this one.
    sweeper: Option<Child>,
}

impl GuardedGroup {
    /// A group of a guard alone. `grace`, in whole seconds: what its members may take to end by themselves when this process
    /// is gone. `leftovers`: files and folders of ours that are removed once they are dead.
    ///
    /// # Errors
    /// When there is no shell, or the system starts no more processes.
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

    /// The group's id, for processes that are to join it.
    pub(crate) fn id(&self) -> i32 {
        self.id
    }

    /// Kills whoever is left of the group, the guard included.
    pub(crate) fn kill(&self) {
        self.group.kill();
    }

    /// Kills whoever is left and reaps the guard, and what was to sweep behind it.
    pub(crate) async fn end(mut self) {
        self.group.kill();
        // Killed, so this ends; a process that the kernel cannot end is the kernel's to report.
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
        // As one that a file system keeps waiting.
        signal(Signal::STOP);
        // As when this process ends.
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
