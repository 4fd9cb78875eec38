//! The checks of ST about what an engine does while nobody reads, and how soon it lets go of what it has.

use genset_backend_common::output::Output;
use tokio::time::{Duration, Instant};

use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::trial::{Live, Trial};

/// How far ahead of its reader an engine may run: far beyond any sensible buffer.
const AHEAD_TOKENS: u64 = 1024;

/// Only the engine's own counter tells tokens computed and kept from tokens not yet computed.
pub(super) async fn a_stalled_reader_bounds_memory(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let produced = || {
        live.subject
            .probe
            .as_ref()
            .and_then(|probe| probe.produced_tokens())
    };
    let Some(before) = produced() else {
        trial.note_indirect();
        skip!(NoProbe, "no probe says how many tokens were computed");
    };
    let room = live.config.context_length_tokens.saturating_sub(4);
    let mut running = live.generate(live.request(4, room.clamp(1, 4096))).await?;
    let read = running.read_tokens(1).await?.len();
    tokio::time::sleep(trial.limits().cancel).await;
    let read = before.saturating_add(u64::try_from(read).unwrap_or(u64::MAX));
    let ahead = produced().unwrap_or(before).saturating_sub(read);
    ensure!(
        ahead <= AHEAD_TOKENS,
        "{ahead} tokens wait for a reader that does not read"
    );
    Ok(())
}

/// Tokens of the answer whose first item is looked at.
const ANSWER_TOKENS: u32 = 96;
/// Tokens that one step may bring: some engines compute blocks of 32.
const STEP_TOKENS: u32 = ANSWER_TOKENS / 2;
/// What a scheduler's step may add to the first item of a longer answer.
const STEP: Duration = Duration::from_millis(10);

pub(super) async fn the_first_item_is_not_held_back(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let (first_tokens, first_item_after) = first_item(&live).await?;
    ensure!(
        first_tokens <= STEP_TOKENS,
        "the first item came with {first_tokens} of {ANSWER_TOKENS} tokens"
    );
    // Real time would judge the machine, not the engine; a paused clock is exact.
    if live.trial.keeps_virtual_time() {
        let started = Instant::now();
        live.answer(live.request(4, 1)).await?;
        let one_token_after = started.elapsed();
        ensure!(
            first_item_after <= one_token_after * 2 + STEP,
            "an answer of one token took {one_token_after:?}, the first item of a longer one {first_item_after:?}"
        );
    }
    Ok(())
}

/// The tokens in the first item of an answer, and when it came.
async fn first_item(live: &Live) -> Result<(u32, Duration), Stop> {
    let started = Instant::now();
    let answer = live.affordable_answer(4, ANSWER_TOKENS);
    let mut running = live.generate(live.request(4, answer)).await?;
    match running.next().await? {
        Some(Ok(output @ (Output::Tokens(_) | Output::Text(_) | Output::Finished(_)))) => {
            Ok((output.token_count(), started.elapsed()))
        }
        other => fail!("the first item is {other:?}"),
    }
}
