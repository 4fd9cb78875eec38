//! A thousand requests that are abandoned.

use std::time::Duration;

use genset_backend_common::CancelReason;

use crate::check::{CheckResult, Stop, ensure};
use crate::checks::growth::{Holdings, Slack, leaks};
use crate::checks::pressure::{
    end_of_cancelled, ensure_nothing_held, long_request, pace, patience, serve_first_token,
};
use crate::trial::{Live, Trial};

const CYCLES: u64 = 1000;

/// The number of cycles before the first look, in which caches and pools fill, and between looks.
const BETWEEN_LOOKS: u64 = 250;

/// The slack between looks: a leak in one of ten cycles adds twenty-five.
const SLACK: Slack = Slack {
    things: 20,
    memory_kib: 16 * 1024,
};

/// The best of a few measurements, since noise only adds.
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
    let mut looks = Vec::new();
    for cycle in 0..CYCLES {
        abandon(&live, cycle, pace_before).await?;
        if (cycle + 1).is_multiple_of(BETWEEN_LOOKS) {
            ensure_nothing_held(&live, None).await?;
            looks.push(Holdings::now());
        }
    }
    let leaks = leaks(&looks, SLACK);
    ensure!(
        leaks.is_empty(),
        "every {BETWEEN_LOOKS} abandoned requests there were more: {}",
        leaks.join(", ")
    );
    let pace_after = best_pace(&live).await?;
    // Plus the granularity of timers and schedulers.
    let most = pace_before.mul_f64(1.5) + trial.limits().cancel / 100;
    ensure!(
        pace_after <= most,
        "a request of one token took {pace_before:?} at first, {pace_after:?} after {CYCLES} abandoned ones"
    );
    Ok(())
}

/// Sends one request and leaves it in one of four ways.
async fn abandon(live: &Live, cycle: u64, pace: Duration) -> CheckResult {
    let when = format!("after {cycle} abandoned requests");
    if cycle.is_multiple_of(4) {
        drop(live.generate(long_request(live, cycle)).await?);
        return Ok(());
    }
    let running = serve_first_token(live, cycle, patience(live, pace), &when).await?;
    match cycle % 4 {
        1 => drop(running),
        2 => {
            running.ctx.cancel(CancelReason::Client);
            end_of_cancelled(live, running).await?;
        }
        _ => {
            running.ctx.cancel(CancelReason::Client);
            live.abort(&running.ctx).await?;
            drop(running);
        }
    }
    Ok(())
}
