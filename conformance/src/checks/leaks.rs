//! What an engine leaves behind in the process: threads, open files and sockets, children. Seen from outside, in `/proc`.
//!
//! Other tests may come and go in the same process, and a library may make a pool once for all. So one look proves
//! nothing: a leak is what every one of several cycles leaves behind for good.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::check::{CheckResult, Stop, fail, skip};

/// Cycles that must all leave something of the same kind behind.
const CYCLES: usize = 3;
/// How often, and how far apart in real time, what is left is looked at again before it counts as left for good.
const LOOKS: usize = 50;
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// What the process holds: by its identity, which no other thing has, its kind, which a leak of the next cycle shares.
type Holdings = BTreeMap<String, String>;

/// Runs `cycle` and fails if it leaves threads, files, sockets or children behind, time after time. `what` names the cycle.
pub(super) async fn leaves_nothing<F>(what: &str, cycle: impl Fn() -> F) -> CheckResult
where
    F: Future<Output = CheckResult>,
{
    if holdings().is_none() {
        skip!(
            NoProbe,
            "what a process holds is read from /proc, which this system does not have"
        );
    }
    let mut left: Vec<Holdings> = Vec::new();
    for _ in 0..CYCLES {
        let before = holdings().unwrap_or_default();
        cycle().await?;
        left.push(still_new(&before).await);
        if common_kinds(&left).is_empty() {
            return Ok(());
        }
    }
    let kinds: Vec<&str> = common_kinds(&left).into_iter().collect();
    fail!("{what} leaves behind, every time: {}", kinds.join(", "))
}

/// What is new since `before` and does not go away.
async fn still_new(before: &Holdings) -> Holdings {
    let mut new = Holdings::new();
    for look in 0..LOOKS {
        let mut now = holdings().unwrap_or_default();
        now.retain(|held, _| !before.contains_key(held) && (look == 0 || new.contains_key(held)));
        // The last look names the kinds: a thread has its maker's name until it runs.
        new = now;
        if new.is_empty() {
            break;
        }
        // Tasks need the runtime's clock to end, threads the real one.
        tokio::time::sleep(BETWEEN_LOOKS).await;
        real_pause(BETWEEN_LOOKS);
    }
    new
}

/// Waits in real time, also where the runtime's clock is paused. Blocks the thread, which is the check's own.
fn real_pause(pause: Duration) {
    let (_sender, never) = std::sync::mpsc::sync_channel::<()>(0);
    let _ = never.recv_timeout(pause);
}

/// The kinds that every cycle left.
fn common_kinds(left: &[Holdings]) -> BTreeSet<&str> {
    left.iter()
        .map(|held| held.values().map(String::as_str).collect::<BTreeSet<_>>())
        .reduce(|common, also| &common & &also)
        .unwrap_or_default()
}

/// What the process holds now; `None` where that cannot be seen.
fn holdings() -> Option<Holdings> {
    let mut held = Holdings::new();
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let id = task.file_name();
        let name = read("comm");
        held.insert(
            format!("thread {}", id.display()),
            format!("a thread named {}", name.trim()),
        );
        for child in read("children").split_whitespace() {
            held.insert(format!("child {child}"), "a child process".into());
        }
    }
    for file in std::fs::read_dir("/proc/self/fd").ok()?.flatten() {
        let Ok(target) = std::fs::read_link(file.path()) else {
            continue;
        };
        let target = target.to_string_lossy();
        // The look itself opens a folder, which is closed by now.
        if !target.starts_with("/proc/") {
            let number = file.file_name();
            held.insert(
                format!("file {} {target}", number.display()),
                format!("open {}", kind_of(&target)),
            );
        }
    }
    Some(held)
}

/// The target of a file descriptor without its number: `socket`, `anon_inode`, or a path.
fn kind_of(target: &str) -> &str {
    match target.split_once(':') {
        Some((kind, _)) if !target.starts_with('/') => kind,
        _ => target,
    }
}

/// Tasks that are alive on the check's own runtime.
pub(super) fn tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}

/// Waits until no more than `before` tasks are alive on the check's own runtime.
pub(super) async fn tasks_end(
    trial: &crate::trial::Trial,
    what: &str,
    before: usize,
) -> Result<(), Stop> {
    let wait = async {
        while tasks() > before {
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    };
    trial
        .within(
            &format!("the end of the tasks that {what} began"),
            trial.limits().cancel,
            wait,
        )
        .await
}
