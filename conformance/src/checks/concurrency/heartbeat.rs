//! A task that must run every few milliseconds during requests, as health checks and lease renewals must.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::check::{CheckResult, Stop, ensure};
use crate::checks::pressure::{one_after_the_other, request};
use crate::trial::{Live, Trial};

/// More requests than the runtime has threads, so that blocking requests occupy all of them.
const REQUESTS: u32 = 4;

/// A busy machine delays the heartbeat too, but hardly every time.
const ATTEMPTS: u32 = 3;

const BEAT: Duration = Duration::from_millis(5);

/// The number of tokens in each answer.
const ANSWER_TOKENS: u32 = 6;

pub(super) async fn goes_on(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let bound = trial.limits().cancel / 8;
    let mut best = Duration::MAX;
    for attempt in 0..ATTEMPTS {
        best = best.min(longest_gap(&live, attempt).await?);
        if best <= bound {
            return Ok(());
        }
    }
    ensure!(
        best <= bound,
        "while requests ran, no other task did for {best:?}; each of {ATTEMPTS} times at least"
    );
    Ok(())
}

/// The longest time between two beats during the requests.
async fn longest_gap(live: &Live, attempt: u32) -> Result<Duration, Stop> {
    let prompt_tokens = live.config.context_length_tokens.min(128) / 2;
    let prompt_len = usize::try_from(prompt_tokens).unwrap_or(1);
    let turn = one_after_the_other(live, REQUESTS, prompt_tokens + ANSWER_TOKENS);
    let is_over = Arc::new(AtomicBool::new(false));
    let mut heart = JoinSet::new();
    heart.spawn(beat(Arc::clone(&is_over)));
    let mut requests = JoinSet::new();
    for index in 0..REQUESTS {
        let live = live.clone();
        requests.spawn(async move {
            let seed = u64::from(attempt * REQUESTS + index);
            let request = request(&live, prompt_len, seed, ANSWER_TOKENS);
            let answer = live.answer_within(turn, request).await?;
            ensure!(
                answer.finished().is_some(),
                "a plain request failed: {:?}",
                answer.error()
            );
            Ok(())
        });
    }
    let mut result = Ok(());
    while let Some(joined) = requests.join_next().await {
        let one = joined.unwrap_or_else(|error| Err(Stop::Fail(format!("a reader: {error}"))));
        result = result.and(one);
    }
    is_over.store(true, Ordering::Relaxed);
    let gap = heart.join_next().await.and_then(Result::ok);
    result?;
    gap.ok_or_else(|| Stop::Fail("the task beside the requests did not run".into()))
}

async fn beat(is_over: Arc<AtomicBool>) -> Duration {
    let mut longest = Duration::ZERO;
    let mut last = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        tokio::time::sleep(BEAT).await;
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    longest
}
