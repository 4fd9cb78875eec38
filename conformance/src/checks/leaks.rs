//! Resources that an engine leaves in the process: threads, open files and sockets, children. Read from `/proc`.
//!
//! Other tests may run in the same process, and a library may create a pool once. So one look proves nothing: a leak is what
//! every one of several cycles leaves permanently.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::check::{CheckResult, Stop, fail, skip};

/// The number of cycles. A leak is a kind of resource that all of them leave.
const CYCLES: usize = 3;
/// How long, in real time, to look again at what is left before it counts as permanent.
const PATIENCE: Duration = Duration::from_millis(500);
/// The first pause between two looks. Each further pause is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(160);

/// The resources of the process: the unique identity of each, and its kind, which leaks of several cycles share.
type Holdings = BTreeMap<String, String>;

/// Runs `cycle` several times and fails if it leaves threads, files, sockets or children each time. `what` names the cycle.
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
    fail!(
        "{what} leaves behind, every time: {}",
        common_kinds(&left).join(", ")
    )
}

/// The resources that are new since `before` and stay.
async fn still_new(before: &Holdings) -> Holdings {
    let mut new = new_holdings(before).unwrap_or_default();
    let mut pause = FIRST_PAUSE;
    let mut left = PATIENCE;
    while !new.is_empty() && !left.is_zero() {
        pause = pause.min(left);
        // Tasks need the runtime's clock to end, threads need the real one.
        tokio::time::sleep(pause).await;
        real_pause(pause);
        left -= pause;
        pause = (pause * 2).min(LONGEST_PAUSE);
        let mut now = new_holdings(before).unwrap_or_default();
        now.retain(|held, _| new.contains_key(held));
        // The last look determines the kinds: a thread has its creator's name until it runs.
        new = now;
    }
    new
}

/// Waits in real time, even if the runtime's clock is paused. Blocks the thread, which is the check's own.
fn real_pause(pause: Duration) {
    let (_sender, never) = std::sync::mpsc::sync_channel::<()>(0);
    let _ = never.recv_timeout(pause);
}

/// The kinds that every cycle left.
fn common_kinds(left: &[Holdings]) -> Vec<&str> {
    let kinds = left.iter().take(1).flat_map(BTreeMap::values);
    let mut kinds: Vec<&str> = kinds.map(String::as_str).collect();
    kinds.retain(|kind| {
        left.iter()
            .all(|held| held.values().any(|also| also == kind))
    });
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// The resources of the process that are new since `before`; `None` if they cannot be listed.
fn new_holdings(before: &Holdings) -> Option<Holdings> {
    let mut held = Holdings::new();
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let thread = format!("thread {}", task.file_name().display());
        if !before.contains_key(&thread) {
            held.insert(thread, format!("a thread named {}", read("comm").trim()));
        }
        // Also the children of an old thread: they may be new.
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
        // The listing itself opens a folder, which is closed by now.
        if !target.starts_with("/proc/") && !before.contains_key(&open) {
            held.insert(open, format!("open {}", kind_of(&target)));
        }
    }
    Some(held)
}

/// The kind of a file descriptor's target: `socket`, `anon_inode`, or a path.
fn kind_of(target: &str) -> &str {
    match target.split_once(':') {
        Some((kind, _)) if !target.starts_with('/') => kind,
        _ => target,
    }
}

/// The number of tasks alive on the check's own runtime.
pub(super) fn tasks() -> usize {
    tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks()
}

/// Waits until at most `before` tasks are alive on the check's own runtime.
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
