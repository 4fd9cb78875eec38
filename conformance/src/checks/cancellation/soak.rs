//! A thousand requests that nobody waits for.

use std::time::Duration;

use genset_backend_common::CancelReason;

use crate::check::{CheckResult, Stop, ensure};
use crate::checks::growth::{Holdings, Slack};
use crate::checks::pressure::{
    end_of_cancelled, ensure_nothing_held, long_request, pace, patience, serve_first_token,
};
use crate::trial::{Live, Trial};

const CYCLES: u64 = 1000;

/// Cycles before the first look: caches fill, pools grow.
const WARM_CYCLES: u64 = 100;

/// One thing leaked a cycle is nine hundred.
const SLACK: Slack = Slack {
    things: 200,
    memory_kib: 64 * 1024,
};

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
    let leaks = Holdings::now().leaks_since(&before, SLACK);
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
