//! [`Tracks`]: the processes that a check is responsible for. It finds them in `/proc` by an environment variable, which every
//! process passes on to its children.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::check::{CheckResult, Stop, fail, skip};
use crate::subject::ChildCommand;

/// The variable that marks them.
const VARIABLE: &str = "GENSET_CONFORMANCE_MARK";

const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// The processes with one mark.
pub(super) struct Tracks {
    mark: String,
}

impl Tracks {
    /// Marks `command` and all its descendants.
    ///
    /// # Errors
    /// Skips the check if processes cannot be listed.
    pub(super) fn on(command: &mut ChildCommand) -> Result<Self, Stop> {
        static MARKS: AtomicU64 = AtomicU64::new(0);
        if !PathBuf::from("/proc/self/environ").exists() {
            skip!(
                NoProbe,
                "processes are seen in /proc, which this system does not have"
            );
        }
        let number = MARKS.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{number}", std::process::id());
        command.env.insert(VARIABLE.into(), mark.clone());
        Ok(Self { mark })
    }

    /// What no other process has.
    pub(super) fn mark(&self) -> &str {
        &self.mark
    }

    /// The running processes with the mark. Zombies have no environment and are left out.
    pub(super) fn running(&self) -> Vec<u32> {
        let wanted = format!("{VARIABLE}={}", self.mark);
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid: &u32| {
                let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environ
                    .split(|byte| *byte == 0)
                    .any(|one| one == wanted.as_bytes())
            })
            .collect()
    }

    /// The children of this process with the mark.
    pub(super) fn children(&self) -> Vec<u32> {
        let mut running = self.running();
        running.retain(|pid| parent(*pid) == Some(std::process::id()));
        running
    }

    /// Waits until none of them runs.
    ///
    /// # Errors
    /// Fails with `when`.
    pub(super) async fn end(&self, when: &str, limit: Duration) -> CheckResult {
        let deadline = Instant::now() + limit;
        loop {
            let left = self.running();
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let names: Vec<String> = left.iter().map(|pid| name(*pid)).collect();
                self.kill();
                fail!("{when} these still run: {}", names.join(", "));
            }
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    }

    fn kill(&self) {
        for pid in self.running() {
            kill(pid);
        }
    }
}

/// A check may end early; its processes must not stay.
impl Drop for Tracks {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether such a process exists, possibly as a zombie.
pub(super) fn exists(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}

fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may contain anything, even parentheses.
    let mut fields = stat.rsplit(')').next()?.split_whitespace();
    fields.nth(1)?.parse().ok()
}

fn name(pid: u32) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{} ({pid})", comm.trim_end())
}

/// Sends SIGKILL.
pub(super) fn kill(pid: u32) {
    let mut kill = Command::new("/bin/sh");
    kill.args(["-c", "kill -9 \"$1\"", "sh", &pid.to_string()]);
    kill.stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // Fails if the process is gone already.
    let _ = kill.status();
}
