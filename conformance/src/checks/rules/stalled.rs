//! A reader that pauses for a while, and the items that are ready when it continues.

use std::time::Duration;

use genset_backend_common::GenerateRequest;
use tokio::time::Instant;

use crate::check::{CheckResult, Stop, fail, skip};
use crate::rules::{AHEAD_TOKENS, FASTER};
use crate::running::Running;
use crate::trial::{Live, Trial};

/// The length of the pause, in tokens: the maximum, and the minimum for a slow engine.
const STALL_TOKENS: u32 = 50;
const LEAST_STALL_TOKENS: u32 = 20;

/// The number of tokens in the answer that it then reads.
const ANSWER_TOKENS: u32 = 600;

/// The number of attempts in real time: a busy machine does not distort both measurements alike every time.
const TRIES: u64 = 3;

/// # Errors
/// A failure of the engine, or the reason why it cannot be judged.
pub(super) async fn come_soon_enough(trial: &Trial) -> CheckResult {
    let live = trial.start().await?;
    if let Some(token) = trial.limits().token {
        return by_the_clock(&live, token).await;
    }
    let mut seen = String::new();
    for round in 0..TRIES {
        match beside_another(&live, round).await? {
            None => return Ok(()),
            Some(rush) => seen = rush,
        }
    }
    fail!("{seen}, in each of {TRIES} tries")
}

/// On a paused clock: the reader checks each item itself.
async fn by_the_clock(live: &Live, token: Duration) -> CheckResult {
    let wanted = live.affordable_answer(4, ANSWER_TOKENS);
    let mut running = live.generate(live.request(4, wanted)).await?;
    running.read_tokens(1).await?;
    tokio::time::sleep(token * STALL_TOKENS).await;
    running.finish().await?;
    Ok(())
}

/// In real time, where a busy machine disturbs the clock. So the tokens of a neighbour that is always read are a second clock:
/// an answer is read at once, then the same answer after a pause. Tokens that come too soon by only one of the clocks are no
/// breach.
async fn beside_another(live: &Live, round: u64) -> Result<Option<String>, Stop> {
    if live.at_once(2) < 2 {
        skip!(
            NotMeasured,
            "in real time a neighbour's tokens are the clock, and one request runs at a time"
        );
    }
    let affordable = live.affordable_answer(4, 8 * STALL_TOKENS) / 8;
    let stall = affordable.clamp(LEAST_STALL_TOKENS, STALL_TOKENS);
    let over = 2 * stall;
    let room = live.config.context_length_tokens.saturating_sub(4);
    let wanted = room.min(ANSWER_TOKENS);
    if wanted < FASTER * over + AHEAD_TOKENS + stall {
        skip!(
            NotMeasured,
            "an answer that fits in the context is too short to tell a rush from a step"
        );
    }
    let request = |seed| live.greedy(live.prompt(4, 2 * round + seed), wanted);
    let mut neighbour = live.generate(request(0)).await?;
    neighbour.read_tokens(1).await?;
    let read = Stall { tokens: 0, over };
    let stalled = Stall {
        tokens: stall,
        ..read
    };
    let usual = read.beside(live, &mut neighbour, request(1)).await?;
    let after = stalled.beside(live, &mut neighbour, request(1)).await?;
    let (Some(usual), Some(after)) = (usual, after) else {
        skip!(
            NotMeasured,
            "in real time a neighbour's tokens are the clock, and two requests do not run at once"
        );
    };
    Ok(after.rush(&usual, over))
}

/// How long an answer is left alone and watched, in tokens of its neighbour since its own first one.
#[derive(Clone, Copy)]
struct Stall {
    tokens: u32,
    over: u32,
}

/// The part of an answer that came meanwhile.
#[derive(Debug, Clone, Copy)]
struct Came {
    tokens: u32,
    took: Duration,
}

impl Stall {
    /// `None` if the neighbour or the answer ended early, so that nothing can be judged.
    async fn beside(
        self,
        live: &Live,
        neighbour: &mut Running,
        request: GenerateRequest,
    ) -> Result<Option<Came>, Stop> {
        let ctx = live.context(&request);
        let Ok(mut running) = live.try_generate(request, ctx).await? else {
            return Ok(None);
        };
        let mut begun: Option<Instant> = None;
        let (mut tokens, mut beats) = (0, 0);
        while beats < self.over {
            let is_away = begun.is_some() && beats < self.tokens;
            tokio::select! {
                beat = neighbour.next() => match beat? {
                    Some(Ok(output)) if !output.is_terminal() => {
                        beats += begun.map_or(0, |_| output.token_count());
                    }
                    _ => return Ok(None),
                },
                item = running.next(), if !is_away => match item? {
                    Some(Ok(output)) => {
                        tokens += output.token_count();
                        if tokens > 0 {
                            begun.get_or_insert_with(Instant::now);
                        }
                        if output.is_terminal() {
                            break;
                        }
                    }
                    _ => return Ok(None),
                },
            }
        }
        let took = begun.map(|begun| begun.elapsed());
        Ok(took.map(|took| Came { tokens, took }))
    }
}

impl Came {
    /// How it came sooner than `usual` explains, by both clocks.
    fn rush(&self, usual: &Self, over: u32) -> Option<String> {
        let most = |usually: u32| usually.saturating_mul(FASTER).saturating_add(AHEAD_TOKENS);
        let in_time = u128::from(usual.tokens) * self.took.as_micros();
        let in_time = in_time / usual.took.as_micros().max(1);
        let in_time = u32::try_from(in_time).unwrap_or(u32::MAX);
        let Self { tokens, took } = self;
        (*tokens > most(usual.tokens) && *tokens > most(in_time)).then(|| {
            format!(
                "after a stall {tokens} tokens came within {took:?} and {over} tokens of another answer; read at once it were {} \
                 within {:?}",
                usual.tokens, usual.took
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(tokens: u32, ms: u64) -> Came {
        let took = Duration::from_millis(ms);
        Came { tokens, took }
    }

    #[test]
    fn a_rush_is_one_by_both_clocks() {
        let is_rush = |after: Came| after.rush(&came(100, 100), 100).is_some();
        assert!(is_rush(came(600, 100)));
        assert!(is_rush(came(600, 20)));
        // The machine was busy with the neighbour, or during the reference measurement.
        assert!(!is_rush(came(600, 600)));
        assert!(!is_rush(came(400, 20)));
        // The whole answer always comes at once.
        assert!(came(600, 0).rush(&came(600, 0), 100).is_none());
    }
}
