//! What an engine leaves behind in the process: threads, open files and sockets, children. Seen from outside, in `/proc`.
//!
//! Other tests may come and go in the same process, and a library may make a pool once for all. So one look proves
//! nothing: a leak is what every one of several cycles leaves behind for good.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::check::{CheckResult, Stop, fail, skip};

/// Cycles that must all leave something of the same kind behind.
const CYCLES: usize = 3;
/// For how long in real time what is left is looked at again before it counts as left for good.
const PATIENCE: Duration = Duration::from_millis(500);
/// The first pause between two looks. Each further one is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(160);

/// What the process holds: by its identity, which no other thing has, its kind, which a leak of the next cycle shares.
type Holdings = BTreeMap<String, String>;

/// Runs `cycle` and fails if it leaves threads, files, sockets or children behind, time after time. `what` names the cycle.
pub(super) async fn leaves_nothing<F>(what: &str, cycle: impl Fn() -> F) -> CheckResult
where
    F: Future<Output = CheckResult>,
{
    let mut left: Vec<Holdings> = Vec::new();
    for _ in 0..CYCLES {
        let Some(before) = new_holdings(&Holdings::new()) else {
            skip!(
                NoProbe,
                "what a process holds is read from /proc, which this system does not have"
            );
        };
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
    let mut new = new_holdings(before).unwrap_or_default();
    let mut pause = FIRST_PAUSE;
    let mut left = PATIENCE;
    while !new.is_empty() && !left.is_zero() {
        pause = pause.min(left);
        // Tasks need the runtime's clock to end, threads the real one.
        tokio::time::sleep(pause).await;
        real_pause(pause);
        left -= pause;
        pause = (pause * 2).min(LONGEST_PAUSE);
        let mut now = new_holdings(before).unwrap_or_default();
        now.retain(|held, _| new.contains_key(held));
        // The last look names the kinds: a thread has its maker's name until it runs.
        new = now;
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

/// What the process holds now and did not `before`; `None` where that cannot be seen.
fn new_holdings(before: &Holdings) -> Option<Holdings> {
    let mut held = Holdings::new();
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let thread = format!("thread {}", task.file_name().display());
        if !before.contains_key(&thread) {
            held.insert(thread, format!("a thread named {}", read("comm").trim()));
        }
        // Those of an old thread too: it may have a new child.
        for child in read("children").split_whitespace() {
            let child = format!("child {child}");
            if !before.contains_key(&child) {
                held.insert(child, "a child process".into());
            }
        }
    }
    for file in std::fs::read_dir("/proc/self/fd").ok()?.flatten() {
        let Ok(target) = std::fs::read_link(file.path()) else {
            continue;
        };
        let target = target.to_string_lossy();
        let open = format!("file {} {target}", file.file_name().display());
        // The look itself opens a folder, which is closed by now.
        if !target.starts_with("/proc/") && !before.contains_key(&open) {
            held.insert(open, format!("open {}", kind_of(&target)));
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
            tokio::time::sleep(FIRST_PAUSE).await;
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
