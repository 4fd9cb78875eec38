//! A thousand requests that nobody waits for.

use std::time::Duration;

use genset_backend_common::CancelReason;
use tokio::runtime::Handle;

use crate::check::{CheckResult, Stop, ensure};
use crate::checks::pressure::{
    end_of_cancelled, ensure_nothing_held, long_request, pace, patience, serve_first_token,
};
use crate::trial::{Live, Trial};

const CYCLES: u64 = 1000;

/// Cycles before the first look: caches fill, pools grow.
const WARM_CYCLES: u64 = 100;

/// What may come and go by itself; one leaked a cycle is nine hundred.
const SLACK: u64 = 200;

/// Growth of resident memory that is not called a leak: the allocator's own.
const SLACK_KIB: u64 = 64 * 1024;

/// What the process holds. Threads, files and memory are known on Linux only.
#[derive(Debug, Clone, Copy)]
struct Holdings {
    tasks: u64,
    threads: Option<u64>,
    files: Option<u64>,
    memory_kib: Option<u64>,
}

impl Holdings {
    fn now() -> Self {
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
    fn leaks_since(&self, before: &Self) -> Vec<String> {
        let rows = [
            ("tasks", Some(before.tasks), Some(self.tasks), SLACK),
            ("threads", before.threads, self.threads, SLACK),
            ("open files", before.files, self.files, SLACK),
            ("KiB", before.memory_kib, self.memory_kib, SLACK_KIB),
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

/// The best of a few, which noise does not touch.
async fn best_pace(live: &Live) -> Result<Duration, Stop> {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        best = best.min(pace(live).await?);
    }
    Ok(best)
}

pub(super) async fn thousand_cycles(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace_before = best_pace(&live).await?;
    let mut before = Holdings::now();
    for cycle in 0..CYCLES {
        if cycle == WARM_CYCLES {
            before = Holdings::now();
        }
        abandon(&live, cycle, pace_before).await?;
    }
    ensure_nothing_held(&live, None).await?;
    let leaks = Holdings::now().leaks_since(&before);
    ensure!(leaks.is_empty(), "leaked: {}", leaks.join(", "));
    let pace_after = best_pace(&live).await?;
    // The grain of timers and schedulers comes on top.
    let most = pace_before.mul_f64(1.5) + trial.limits().cancel / 100;
    ensure!(
        pace_after <= most,
        "a request of one token took {pace_before:?} at first, {pace_after:?} after {CYCLES} abandoned ones"
    );
    Ok(())
}

/// One request, left in one of four ways.
async fn abandon(live: &Live, cycle: u64, pace: Duration) -> CheckResult {
    let when = format!("after {cycle} abandoned requests");
    if cycle.is_multiple_of(4) {
        drop(live.generate(long_request(live, cycle)).await?);
        return Ok(());
    }
    let running = serve_first_token(live, cycle, patience(live, pace), &when).await?;
    match cycle % 4 {
        1 => drop(running.into_outputs()),
        2 => {
            running.ctx.cancel(CancelReason::Client);
            end_of_cancelled(live, running).await?;
        }
        _ => {
            running.ctx.cancel(CancelReason::Client);
            let abort = live.subject.engine.abort(&running.ctx);
            live.trial.call("abort", abort).await?;
            drop(running);
        }
    }
    Ok(())
}
