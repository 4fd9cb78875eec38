//! What grows in the process while something is done many times. For the soak checks of CN and SH.

use tokio::runtime::Handle;

/// What the process holds. Threads, files and memory are known on Linux only.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holdings {
    tasks: u64,
    threads: Option<u64>,
    files: Option<u64>,
    memory_kib: Option<u64>,
}

/// Growth that is not called a leak.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slack {
    /// Tasks, threads and open files, of each: what may come and go by itself.
    pub(super) things: u64,
    /// Resident memory: the allocator's own.
    pub(super) memory_kib: u64,
}

impl Holdings {
    pub(super) fn now() -> Self {
        let tasks = Handle::current().metrics().num_alive_tasks();
        let files = std::fs::read_dir("/proc/self/fd").ok();
        Self {
            tasks: u64::try_from(tasks).unwrap_or(u64::MAX),
            threads: status_field("Threads:"),
            files: files.and_then(|files| u64::try_from(files.count()).ok()),
            memory_kib: status_field("VmRSS:"),
        }
    }

    /// What grew by more than its slack.
    pub(super) fn leaks_since(&self, before: &Self, slack: Slack) -> Vec<String> {
        let rows = [
            ("tasks", Some(before.tasks), Some(self.tasks), slack.things),
            ("threads", before.threads, self.threads, slack.things),
            ("open files", before.files, self.files, slack.things),
            ("KiB", before.memory_kib, self.memory_kib, slack.memory_kib),
        ];
        rows.into_iter()
            .filter_map(|(what, before, after, slack)| {
                let (before, after) = (before?, after?);
                let has_leaked = after > before.saturating_add(slack);
                has_leaked.then(|| format!("{before} {what} became {after}"))
            })
            .collect()
    }
}

fn status_field(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}
