//! A cancel at every position around the end of an answer.

use std::time::Duration;

use futures_util::future::join;
use genset_backend_common::{CancelReason, FinishReason};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure};
use crate::checks::pressure::{Begun, end_of_cancelled, pace, request};
use crate::trial::{Live, Trial};

/// The number of tokens of each answer.
const TOKENS: u32 = 4;

/// The number of moments within a token's time at which the cancel comes.
const MOMENTS: u32 = 3;

pub(super) async fn with_the_terminal(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    for read_items in 0..=TOKENS + 1 {
        judge(&after_items(&live, read_items).await?)?;
    }
    for moment in 0..=(TOKENS + 1) * MOMENTS {
        judge(&after_delay(&live, pace * moment / MOMENTS).await?)?;
    }
    for yields in 0..8 {
        judge(&after_yields(&live, yields).await?)?;
    }
    Ok(())
}

async fn after_items(live: &Live, count: u32) -> Result<Answer, Stop> {
    let mut running = live.generate(request(live, 4, 1, TOKENS)).await?;
    let mut before = Vec::new();
    for _ in 0..count {
        match running.next().await? {
            Some(item) => before.push(item),
            None => break,
        }
    }
    running.ctx.cancel(CancelReason::Client);
    let mut rest = end_of_cancelled(live, running).await?;
    rest.items.splice(0..0, before);
    Ok(rest)
}

async fn after_delay(live: &Live, delay: Duration) -> Result<Answer, Stop> {
    let running = live.generate(request(live, 4, 1, TOKENS)).await?;
    let ctx = running.ctx.clone();
    let cancel = async {
        tokio::time::sleep(delay).await;
        ctx.cancel(CancelReason::Client);
    };
    join(running.finish(), cancel).await.0
}

/// Cancels while the last items are being read.
async fn after_yields(live: &Live, yields: u32) -> Result<Answer, Stop> {
    let begun = Begun::new(live, request(live, 4, 1, TOKENS)).await?;
    let ctx = begun.running.ctx.clone();
    let cancel = async {
        for _ in 0..yields {
            tokio::task::yield_now().await;
        }
        ctx.cancel(CancelReason::Client);
    };
    join(begun.finish(), cancel).await.0
}

fn judge(answer: &Answer) -> CheckResult {
    ensure!(
        answer.violation.is_none(),
        "a cancel at the end broke a rule of the stream: {:?}",
        answer.violation
    );
    let Some(finished) = answer.finished() else {
        return Err(Stop::Fail(format!(
            "a cancel at the end gave {:?} for a terminal item",
            answer.items.last()
        )));
    };
    let count = answer.generated().len();
    let is_whole = u32::try_from(count) == Ok(TOKENS);
    ensure!(
        finished.reason == FinishReason::Cancelled || is_whole,
        "{count} of {TOKENS} tokens came and then {:?}",
        finished.reason
    );
    Ok(())
}
