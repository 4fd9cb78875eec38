//! A request's resources are freed. With a probe, the engine's own counters show that; without one, the next request must get a
//! slot.

use std::time::Duration;

use futures_util::FutureExt;
use genset_backend_common::{CancelReason, ErrorKind};

use crate::check::{CheckResult, Stop, ensure, fail};
use crate::checks::pressure::{
    crowd, end_of_cancelled, ensure_all_tried, ensure_cancelled, ensure_nothing_held,
    ensure_serves_again, in_turn, long_request, pace, patience, serve_first_token, slots,
};
use crate::trial::{Live, Trial};

/// Requests beyond the engine's slots, so that leaking all of them shows.
const BEYOND: u32 = 4;

pub(super) async fn on_drop(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    let mut kv_before = live.kv_used();
    let tried = in_turn(&live, pace);
    for dropped in 0..u64::from(tried + BEYOND) {
        if dropped % 3 == 0 {
            drop(live.generate(long_request(&live, dropped)).await);
        }
        let when = format!("after {dropped} streams were dropped");
        let mut running = serve_first_token(&live, 0, patience(&live, pace), &when).await?;
        if dropped % 2 == 1 {
            running.read_tokens(1).await?;
        }
        drop(running);
        if dropped == 0 {
            // A prefix cache may keep the first request's blocks, but has no reason to keep more of the same.
            kv_before = kv_before.max(settled_kv(&live, pace).await);
        }
    }
    ensure_serves_again(&live, pace, "after streams were dropped").await?;
    ensure_nothing_held(&live, kv_before).await?;
    ensure_all_tried(&live, tried)
}

/// The number of KV blocks in use after a moment of rest.
async fn settled_kv(live: &Live, pace: Duration) -> Option<u64> {
    live.kv_used()?;
    tokio::time::sleep(patience(live, pace)).await;
    live.kv_used()
}

pub(super) async fn while_queued(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    let mut crowd = crowd(&live, slots(&live) + BEYOND).await?;
    let has_queue = !crowd.waiting.is_empty();
    if !has_queue {
        // Nothing queues here: the cancelled requests have just begun.
        trial.note_indirect();
        crowd.waiting.extend(crowd.running.pop());
    }
    for queued in &crowd.waiting {
        queued.ctx.cancel(CancelReason::Client);
    }
    for queued in crowd.waiting {
        live.abort(&queued.ctx).await?;
        let answer = end_of_cancelled(&live, queued).await?;
        if has_queue {
            ensure_cancelled(&answer)?;
        }
    }
    for running in crowd.running {
        running.ctx.cancel(CancelReason::Client);
    }
    ensure_serves_again(&live, pace, "after queued requests were cancelled").await
}

pub(super) async fn computing_stops(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    for is_dropped in [false, true] {
        let mut running = live.generate(long_request(&live, 1)).await?;
        let read = running.read_tokens(2).await?.len();
        if is_dropped {
            drop(running);
        } else {
            running.ctx.cancel(CancelReason::Client);
            end_of_cancelled(&live, running).await?;
        }
        ensure_counter_stands(&live, pace, read).await?;
    }
    // Without a probe: a request that is still computed keeps its slot.
    let crowd = crowd(&live, slots(&live)).await?;
    for running in crowd.running.into_iter().chain(crowd.waiting) {
        running.ctx.cancel(CancelReason::Client);
        drop(end_of_cancelled(&live, running).await?);
    }
    ensure_serves_again(&live, pace, "after a full engine was cancelled").await
}

async fn ensure_counter_stands(live: &Live, pace: Duration, read: usize) -> Result<(), Stop> {
    let produced = || live.produced();
    if produced().is_none() {
        live.trial.note_indirect();
        return Ok(());
    }
    tokio::time::sleep(live.trial.limits().cancel).await;
    let before = produced();
    tokio::time::sleep(patience(live, pace) / 4).await;
    let after = produced();
    ensure!(
        before >= u64::try_from(read).ok(),
        "the probe counts {before:?} tokens after {read} were read"
    );
    ensure!(
        before == after,
        "{before:?} tokens were produced when a request was cancelled, {after:?} a while later"
    );
    Ok(())
}

pub(super) async fn on_dropped_future(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    let tried = in_turn(&live, pace);
    // One in four is dropped unpolled, which reserves nothing.
    let calls = (tried + BEYOND).div_ceil(3) * 4;
    for dropped in 0..calls {
        let request = long_request(&live, u64::from(dropped));
        let ctx = live.context(&request);
        let mut call = live.subject.engine.generate(request, ctx);
        if dropped % 4 == 0 {
            continue;
        }
        match (&mut call).now_or_never() {
            Some(Err(error)) if error.kind() != ErrorKind::Overloaded => {
                fail!(
                    "a good request was refused after {dropped} dropped calls: {error} ({})",
                    error.kind()
                )
            }
            _ => drop(call),
        }
    }
    ensure_serves_again(&live, pace, "after calls of generate were dropped").await?;
    ensure_nothing_held(&live, None).await?;
    ensure_all_tried(&live, tried)
}
