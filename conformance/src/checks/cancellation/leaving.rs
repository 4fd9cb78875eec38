//! Less common ways to leave: for another reason, during prefill, before the engine has begun.

use futures_util::FutureExt;
use genset_backend_common::{CancelReason, RequestContext};

use crate::check::{CheckResult, ensure};
use crate::checks::pressure::{
    end_of_cancelled, ensure_cancelled, ensure_complete, ensure_nothing_held, ensure_serves_again,
    long_request, pace, request, slots,
};
use crate::checks::words::words_of;
use crate::trial::Trial;

/// Every reason that a Worker cancels for.
const REASONS: [CancelReason; 4] = [
    CancelReason::Client,
    CancelReason::Deadline,
    CancelReason::Shutdown,
    CancelReason::EngineDead,
];

pub(super) async fn for_every_reason(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for (reason, seed) in REASONS.into_iter().zip(1..) {
        let mut running = live.generate(long_request(&live, seed)).await?;
        running.read_tokens(1).await?;
        running.ctx.cancel(reason);
        let late = format!("the end of a request that was cancelled for {reason:?}");
        let limit = trial.limits().cancel;
        let answer = trial.within(&late, limit, running.finish()).await??;
        ensure!(
            ensure_cancelled(&answer).is_ok(),
            "a request that was cancelled for {reason:?} ended otherwise: {:?}",
            answer.items.last()
        );
    }
    Ok(())
}

/// A prompt whose prefill takes a moment.
const PROMPT_TOKENS: u32 = 512;

/// Requests beyond the engine's slots, so that leaking all of them shows.
const BEYOND: u32 = 4;

pub(super) async fn during_prefill(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    let len = PROMPT_TOKENS
        .min(live.config.context_length_tokens / 2)
        .max(1);
    let len = words_of(&live, len).await?;
    for dropped in 0..u64::from(slots(&live) + BEYOND) {
        // The engine has begun it or is about to; nothing was read yet.
        let mut running = live.generate(request(&live, len, dropped, 64)).await?;
        let first = running.next().now_or_never();
        if let Some(item) = first.transpose()?.flatten() {
            ensure!(item.is_ok(), "a long prompt was answered by {item:?}");
        }
        tokio::task::yield_now().await;
        drop(running);
    }
    ensure_serves_again(&live, pace, "after streams were dropped during prefill").await?;
    ensure_nothing_held(&live, None).await
}

pub(super) async fn aborts_at_any_time(trial: Trial) -> CheckResult {
    let subject = trial.build();
    let early = RequestContext::new("before-start");
    trial
        .call("abort before start", subject.engine.abort(&early))
        .await?;
    let live = trial.start().await?;
    let ctx = live.context(&live.request(4, 4));
    trial
        .call(
            "abort of an unknown request",
            live.subject.engine.abort(&ctx),
        )
        .await?;
    let answer = live.answer(request(&live, 4, 1, 4)).await?;
    ensure_complete(&answer, 4, "the answer after an abort before its start")?;
    let running = live.generate(long_request(&live, 2)).await?;
    running.ctx.cancel(CancelReason::Client);
    let ctx = running.ctx.clone();
    drop(end_of_cancelled(&live, running).await?);
    // SH01 judges the result.
    drop(
        trial
            .cleaning("cleanup", live.subject.engine.cleanup())
            .await?,
    );
    trial
        .call("abort after cleanup", live.subject.engine.abort(&ctx))
        .await?;
    Ok(())
}
