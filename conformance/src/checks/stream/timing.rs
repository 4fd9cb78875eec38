//! The checks of ST for what an engine does while nobody reads, and how soon it sends what it has.

use genset_backend_common::output::Output;
use tokio::time::{Duration, Instant};

use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::limits::Limits;
use crate::trial::{Live, Trial};

/// How far an engine may run ahead of its reader: far beyond any sensible buffer.
const AHEAD_TOKENS: u64 = 1024;

/// The number of tokens of the unread answer.
const UNREAD_TOKENS: u32 = 4096;

/// The number of tokens after the first item that determine the engine's pace, and the maximum read before the pause.
const PACED_TOKENS: usize = 8;
const READ_TOKENS: u64 = 128;

/// An engine waits for its reader if no token comes for the time of this many tokens.
const STILL_TOKENS: u32 = 64;

/// Only the engine's own counter distinguishes tokens computed and kept from tokens not computed yet.
pub(super) async fn a_stalled_reader_bounds_memory(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let produced = || live.produced();
    let Some(before) = produced() else {
        trial.note_indirect();
        skip!(NoProbe, "no probe says how many tokens were computed");
    };
    let room = live.config.context_length_tokens.saturating_sub(4);
    let wanted = room.min(UNREAD_TOKENS);
    if u64::from(wanted) <= AHEAD_TOKENS + READ_TOKENS {
        skip!(
            NotMeasured,
            "an answer that fits in the context is too short to tell a buffer from none"
        );
    }
    let mut running = live.generate(live.request(4, wanted)).await?;
    let first = running.read_tokens(1).await?.len();
    let begun = Instant::now();
    let paced = running.read_tokens(PACED_TOKENS).await?.len();
    let token = begun.elapsed() / u32::try_from(paced).unwrap_or(u32::MAX).max(1);
    let read = u64::try_from(first + paced).unwrap_or(u64::MAX);
    let read = before.saturating_add(read);

    let Limits { cancel, wall, .. } = trial.limits();
    let pause = (token * STILL_TOKENS).max(cancel / 8);
    let stalled = Instant::now();
    let mut seen = produced();
    // An engine may have a buffer. So it runs ahead without bound once it exceeds the limit, and has stopped once the counter
    // stands still.
    loop {
        tokio::time::sleep(pause).await;
        let now = produced();
        let ahead = now.unwrap_or(before).saturating_sub(read);
        ensure!(
            ahead <= AHEAD_TOKENS,
            "{ahead} tokens wait for a reader that does not read"
        );
        if now == seen && stalled.elapsed() >= cancel {
            return Ok(());
        }
        if !trial.keeps_virtual_time() && stalled.elapsed() >= wall / 2 {
            skip!(
                NotMeasured,
                "the engine is {ahead} tokens ahead of its reader, and it takes too long to see whether it goes on"
            );
        }
        seen = now;
    }
}

/// The number of tokens of the answer whose first item is checked.
const ANSWER_TOKENS: u32 = 96;
/// The number of tokens that one step may produce: some engines compute blocks of 32.
const STEP_TOKENS: u32 = ANSWER_TOKENS / 2;
/// The time that a scheduler's step may add to the first item of a longer answer.
const STEP: Duration = Duration::from_millis(10);

pub(super) async fn the_first_item_is_not_held_back(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let room = live.config.context_length_tokens.saturating_sub(4).max(1);
    // The rest is not read, so a slow engine is asked for no less.
    let wanted = ANSWER_TOKENS.min(room);
    let (first_tokens, first_item_after) = first_item(&live, wanted).await?;
    ensure!(
        first_tokens <= STEP_TOKENS,
        "the first item came with {first_tokens} of {wanted} tokens"
    );
    // Real time would judge the machine; a paused clock is exact.
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

/// The number of tokens in the first item of an answer of `wanted`, and its time.
async fn first_item(live: &Live, wanted: u32) -> Result<(u32, Duration), Stop> {
    let started = Instant::now();
    let mut running = live.generate(live.request(4, wanted)).await?;
    match running.next().await? {
        Some(Ok(output @ (Output::Tokens(_) | Output::Text(_) | Output::Finished(_)))) => {
            Ok((output.token_count(), started.elapsed()))
        }
        other => fail!("the first item is {other:?}"),
    }
}
