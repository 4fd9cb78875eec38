//! What grows in the process when something is repeated many times. For the soak checks of CN and SH.

use tokio::runtime::Handle;

/// The resources of the process. Threads, files and memory are known only on Linux.
#[derive(Debug, Clone, Copy)]
pub(super) struct Holdings {
    tasks: u64,
    threads: Option<u64>,
    files: Option<u64>,
    memory_kib: Option<u64>,
}

/// Growth between two looks that does not count as a leak.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slack {
    /// For tasks, threads and open files each: how many may come and go by themselves.
    pub(super) things: u64,
    /// For resident memory: the allocator's own.
    pub(super) memory_kib: u64,
}

/// The resources that grew by more than their slack from each look to the next. Growth that occurs once is a pool or a cache.
pub(super) fn leaks(looks: &[Holdings], slack: Slack) -> Vec<String> {
    let all_grow = |row: usize| {
        let values: Option<Vec<u64>> = looks.iter().map(|look| look.rows(slack)[row].1).collect();
        let (what, _, slack) = looks.first()?.rows(slack)[row];
        let values = values.filter(|values| values.len() > 1)?;
        let is_leak = values.windows(2).all(|w| w[1] > w[0].saturating_add(slack));
        is_leak.then(|| format!("{values:?} {what}"))
    };
    (0..ROWS).filter_map(all_grow).collect()
}

/// The number of resource kinds.
const ROWS: usize = 4;

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

    /// The amount of each kind, with its name and its slack.
    fn rows(&self, slack: Slack) -> [(&'static str, Option<u64>, u64); ROWS] {
        [
            ("tasks", Some(self.tasks), slack.things),
            ("threads", self.threads, slack.things),
            ("open files", self.files, slack.things),
            ("KiB", self.memory_kib, slack.memory_kib),
        ]
    }
}

fn status_field(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(tasks: u64, memory_kib: u64) -> Holdings {
        Holdings {
            tasks,
            threads: Some(9),
            files: None,
            memory_kib: Some(memory_kib),
        }
    }

    #[test]
    fn what_grows_at_every_look_is_a_leak_and_what_grows_once_is_not() {
        let slack = Slack {
            things: 10,
            memory_kib: 100,
        };
        let looks = [look(0, 0), look(20, 5000), look(40, 5000), look(60, 5100)];
        assert_eq!(leaks(&looks, slack), ["[0, 20, 40, 60] tasks"]);
        assert!(leaks(&looks[..1], slack).is_empty());
    }
}
