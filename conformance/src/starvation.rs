//! [`Starvation`]: how long threads of the engine and the kit waited for a CPU on a busy machine. This time does not count
//! against an engine's limits. Only Linux reports it, in `/proc`; elsewhere it is zero.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The time that each thread has waited for a CPU since its start.
type Waits = BTreeMap<PathBuf, Duration>;

/// The name of all check threads.
pub(crate) const CHECK_THREAD: &str = "conformance-check";

/// The thread of one check, once it runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct CheckThread {
    id: Arc<OnceLock<OsString>>,
}

impl CheckThread {
    /// Marks the calling thread as the check's.
    pub(crate) fn is_this(&self) {
        let link = fs::read_link("/proc/thread-self").ok();
        if let Some(id) = link.as_deref().and_then(Path::file_name) {
            // It is set once.
            let _ = self.id.set(id.to_owned());
        }
    }

    /// How long it has waited for a CPU since its start; zero if the system does not report it.
    pub(crate) fn starved(&self) -> Duration {
        let thread = self
            .id
            .get()
            .map(|id| Path::new("/proc/self/task").join(id));
        let text = thread.and_then(|thread| fs::read_to_string(thread.join("schedstat")).ok());
        text.as_deref().and_then(wait_of).unwrap_or_default()
    }

    /// Whether a thread belongs to another check, which runs at the same time and has its own limits.
    fn is_of_another(&self, thread: &Path) -> bool {
        if self.id.get().map(OsString::as_os_str) == thread.file_name() {
            return false;
        }
        // The kernel keeps the first 15 bytes of a name.
        let name = fs::read_to_string(thread.join("comm")).unwrap_or_default();
        CHECK_THREAD.get(..15) == Some(name.trim_end())
    }
}

/// The waits of this process's threads, except other checks', and of its child processes' threads.
#[derive(Debug, Default)]
pub(crate) struct Starvation {
    check: CheckThread,
    before: Option<Waits>,
}

impl Starvation {
    /// For the threads that a check depends on. Reads nothing yet: most checks end before the first look.
    pub(crate) fn of(check: CheckThread) -> Self {
        Self {
            check,
            before: None,
        }
    }

    /// The longest wait of a thread since the last look; zero for the first. The engine can be no faster than that thread.
    pub(crate) fn since_last_look(&mut self) -> Duration {
        let now = waits_of(&self.check);
        let before = self.before.as_ref();
        let longest = before.map_or(Duration::ZERO, |before| longest_since(before, &now));
        self.before = Some(now);
        longest
    }
}

fn waits_of(check: &CheckThread) -> Waits {
    let mut waits = Waits::new();
    read_process(Path::new("/proc/self"), check, &mut waits);
    waits
}

/// For a new thread, its whole wait is since the last look.
fn longest_since(before: &Waits, now: &Waits) -> Duration {
    let grown = now.iter().map(|(thread, wait)| {
        let until_then = before.get(thread).copied().unwrap_or_default();
        wait.saturating_sub(until_then)
    });
    grown.max().unwrap_or_default()
}

fn read_process(process: &Path, check: &CheckThread, waits: &mut Waits) {
    let threads = fs::read_dir(process.join("task"));
    for thread in threads.into_iter().flatten().flatten() {
        let thread = thread.path();
        if check.is_of_another(&thread) {
            continue;
        }
        let text = fs::read_to_string(thread.join("schedstat"));
        if let Some(wait) = text.ok().as_deref().and_then(wait_of) {
            waits.insert(thread.clone(), wait);
        }
        let children = fs::read_to_string(thread.join("children"));
        for child in children.unwrap_or_default().split_whitespace() {
            read_process(&Path::new("/proc").join(child), check, waits);
        }
    }
}

/// The second number in `schedstat`: the nanoseconds in which the thread was runnable and did not run.
fn wait_of(schedstat: &str) -> Option<Duration> {
    let wait = schedstat.split_whitespace().nth(1)?;
    wait.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(of: &[(&str, u64)]) -> Waits {
        let wait = |(thread, ms): &(&str, u64)| (PathBuf::from(thread), Duration::from_millis(*ms));
        of.iter().map(wait).collect()
    }

    #[test]
    fn the_thread_that_waited_longest_since_the_last_look_counts() {
        let before = waits(&[("1", 900), ("2", 100), ("gone", 5000)]);
        let now = waits(&[("1", 910), ("2", 400), ("new", 50)]);
        assert_eq!(longest_since(&before, &now), Duration::from_millis(300));
        assert_eq!(longest_since(&now, &now), Duration::ZERO);
        assert_eq!(longest_since(&now, &Waits::new()), Duration::ZERO);
    }

    #[test]
    fn the_second_number_is_the_wait() {
        assert_eq!(
            wait_of("168155 3631649 2\n"),
            Some(Duration::from_nanos(3_631_649))
        );
        assert_eq!(wait_of(""), None);
    }

    #[test]
    fn a_system_that_says_nothing_lets_nobody_starve() {
        let mut waits = Waits::new();
        let check = CheckThread::default();
        read_process(Path::new("/no/such/process"), &check, &mut waits);
        assert!(waits.is_empty());
    }
}
