//! The order in which waiting requests are served.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use genset_backend_common::GenerateRequest;
use tokio::sync::Notify;

use crate::check::{CheckResult, Stop, fail, skip};
use crate::checks::pressure::{one_after_the_other, request};
use crate::running::Running;
use crate::trial::{Live, Trial};

/// Requests beyond those that run at once.
const WAITING: u32 = 8;

/// The maximum number of concurrent sequences for an engine that is filled here.
const MOST_RUNNING: u32 = 64;

/// The number of concurrent sequences of an engine that declares none.
const USUALLY_RUNNING: u32 = 16;

/// The number of tokens per answer: enough that running requests do not end before the last one arrives.
const ANSWER_TOKENS: u32 = 32;

/// Records the order of first tokens.
#[derive(Default)]
struct Started {
    count: AtomicU32,
    first: Notify,
}

impl Started {
    /// Sends a request and reads its first token, which may take `turn`. Returns how many requests began before it.
    async fn begin(
        &self,
        live: &Live,
        request: GenerateRequest,
        turn: Duration,
    ) -> Result<Option<(u32, Running)>, Stop> {
        let ctx = live.context(&request);
        // A full engine may refuse; only waiting requests count.
        let Ok(mut running) = live.try_generate_within(turn, request, ctx).await? else {
            return Ok(None);
        };
        while let Some(Ok(output)) = running.next_within(turn).await? {
            if output.token_count() > 0 {
                let before = self.count.fetch_add(1, Ordering::AcqRel);
                self.first.notify_one();
                return Ok(Some((before, running)));
            }
        }
        Ok(None)
    }

    /// As [`Self::begin`], and reads the answer to its end. Returns whether it began.
    async fn read(
        &self,
        live: &Live,
        request: GenerateRequest,
        turn: Duration,
    ) -> Result<bool, Stop> {
        let Some((_, mut running)) = self.begin(live, request, turn).await? else {
            return Ok(false);
        };
        while let Some(Ok(_)) = running.next().await? {}
        Ok(true)
    }
}

/// The number of attempts: on a machine that stops for a while, others may begin unnoticed, but not every time.
const TRIES: u64 = 3;

pub(super) async fn higher_first(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    if !live.config.capabilities.priority {
        skip!(NotDeclared, "the engine does not declare priority");
    }
    let mut seen = None;
    for round in 0..TRIES {
        let (waited, overtaken) = overtaken(&live, round).await?;
        if overtaken <= waited / 2 {
            return Ok(());
        }
        seen = Some((waited, overtaken));
    }
    if let Some((waited, overtaken)) = seen {
        fail!(
            "of {waited} requests that waited, {overtaken} of priority 0 began before the one of priority 10"
        );
    }
    Ok(())
}

/// How many low priority requests waited when a high priority one came, and how many of them began before it.
async fn overtaken(live: &Live, round: u64) -> Result<(u32, u32), Stop> {
    let declared = live.config.max_num_seqs;
    let running = declared.unwrap_or(USUALLY_RUNNING);
    let count = running.clamp(1, MOST_RUNNING) + WAITING;
    // They have their seats when the first of them begins; the other first tokens may still be in flight.
    let seated = declared.map_or(0, |seats| seats.min(count));
    let turn = one_after_the_other(live, count + 1, 4 + ANSWER_TOKENS);
    let started = Started::default();
    let low = join_all((0..count).map(|seed| {
        let low = request(live, 4, u64::from(seed) + 1000 * round, ANSWER_TOKENS);
        started.read(live, low, turn)
    }));
    let high = async {
        let first = started.first.notified();
        live.trial.call("the first of many answers", first).await?;
        // Count those that began in the same step first.
        tokio::task::yield_now().await;
        let begun = started.count.load(Ordering::Acquire).max(seated);
        let mut high = request(live, 4, u64::from(count) + 1000 * round, ANSWER_TOKENS);
        high.priority = 10;
        let high = started.begin(live, high, turn).await?;
        Ok::<_, Stop>((begun, high.map(|(before, _)| before)))
    };
    // Several seats may become free at once. Requests that begin in the same step do not overtake each other, so poll the high
    // one first.
    let (high, low) = futures_util::future::join(high, low).await;
    let (begun, before_high) = high?;
    let mut low_begun = 0;
    for has_begun in low {
        low_begun += u32::from(has_begun?);
    }
    let waited = low_begun.saturating_sub(begun);
    let Some(before_high) = before_high.filter(|_| waited >= WAITING / 2) else {
        skip!(
            NotDeclared,
            "the engine refuses what it does not run at once, or runs {count} requests"
        );
    };
    Ok((waited, before_high.saturating_sub(begun)))
}
