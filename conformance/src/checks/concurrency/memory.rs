//! Requests that together need more KV blocks than there are.

use std::num::NonZeroU32;

use futures_util::future::join_all;
use genset_backend_common::GenerateRequest;

use super::capacity::send;
use super::mixed::Known;
use crate::check::{CheckResult, Stop, ensure, skip};
use crate::checks::near;
use crate::checks::pressure::{one_after_the_other, request, slots};
use crate::trial::{Live, Trial};

/// The total number of tokens: takes a moment on a paused clock, and in real time on a slow CPU.
const VIRTUAL_TIME_TOKENS: u64 = 65_536;
const REAL_TIME_TOKENS: u64 = 4096;

/// The lengths of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rush {
    count: u32,
    prompt_len: u32,
    max_tokens: u32,
}

impl Rush {
    /// As many requests as run at once. Their prompts fit in the KV blocks and their answers do not: they need a quarter more
    /// tokens than there is room for.
    ///
    /// # Errors
    /// Skips an engine whose KV blocks cannot run out in this way, or not soon.
    fn of(live: &Live) -> Result<Self, Stop> {
        let config = &live.config;
        let sizes = config.kv_block_size.zip(config.kv_total_blocks);
        let Some((size, blocks)) = sizes.filter(|(_, blocks)| *blocks > 0) else {
            skip!(NotDeclared, "the engine declares no KV blocks");
        };
        let room = blocks.saturating_mul(u64::from(NonZeroU32::get(size)));
        let count = slots(live);
        let Some(rush) = Self::over(room, count, config.context_length_tokens) else {
            skip!(
                NotDeclared,
                "{count} requests at once do not fill KV blocks for {room} tokens"
            );
        };
        let most = match live.trial.keeps_virtual_time() {
            true => VIRTUAL_TIME_TOKENS,
            false => REAL_TIME_TOKENS,
        };
        let is_slow = rush.max_tokens > live.trial.limits().answer_tokens;
        if room > most || is_slow {
            skip!(
                Level,
                "it takes too long to fill KV blocks for {room} tokens"
            );
        }
        Ok(rush)
    }

    /// `None` if that many requests, each within the context, exceed the room by at most a tenth.
    fn over(room: u64, count: u32, context: u32) -> Option<Self> {
        let wanted = room.saturating_mul(5) / 4 / u64::from(count.max(1));
        let len = u32::try_from(wanted).unwrap_or(u32::MAX).min(context);
        let all = u64::from(len) * u64::from(count);
        if len < 4 || all < room.saturating_mul(11) / 10 {
            return None;
        }
        let prompt_len = len / 4 * 3;
        Some(Self {
            count,
            prompt_len,
            max_tokens: len - prompt_len,
        })
    }

    /// Prompts without a common prefix, which a prefix cache would store once.
    fn requests(self, live: &Live) -> Vec<GenerateRequest> {
        let prompt_len = usize::try_from(self.prompt_len).unwrap_or(1);
        let of = |seed| {
            let one = request(live, prompt_len, 60 + u64::from(seed), self.max_tokens);
            near::rated(live, one)
        };
        (0..self.count).map(of).collect()
    }
}

pub(super) async fn more_than_there_is(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let rush = Rush::of(&live)?;
    let known = Known::of(&live).await?;
    let requests = rush.requests(&live);
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(live.answer(request.clone()).await?);
    }
    let turn = one_after_the_other(&live, rush.count, rush.prompt_len + rush.max_tokens);
    let sent = requests
        .iter()
        .map(|request| send(&live, request.clone(), turn));
    let mut answered = 0;
    for (served, alone) in join_all(sent).await.into_iter().zip(&alone) {
        if let Some(answer) = served? {
            let when = "among others that fill the KV blocks";
            known.ensure_same(&answer, rush.max_tokens, alone, when)?;
            answered += 1;
        }
    }
    ensure!(
        answered > 0,
        "all of {} requests that fill the KV blocks were refused",
        rush.count
    );
    for (request, alone) in requests.iter().zip(&alone).take(1) {
        let next = live.answer(request.clone()).await?;
        let when = "after others that filled the KV blocks";
        known.ensure_same(&next, rush.max_tokens, alone, when)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_fit_and_answers_do_not() {
        let rush = Rush::over(1024, 8, 512).unwrap();
        assert_eq!((rush.prompt_len, rush.max_tokens), (120, 40));
        assert!(rush.prompt_len * rush.count <= 1024);
        assert!((rush.prompt_len + rush.max_tokens) * rush.count > 1024);
    }

    #[test]
    fn no_request_is_longer_than_the_context() {
        let rush = Rush::over(1024, 8, 144).unwrap();
        assert_eq!(rush.prompt_len + rush.max_tokens, 144);
        assert_eq!(Rush::over(1024, 8, 128), None);
        assert_eq!(Rush::over(1 << 40, 32, 4096), None);
        assert_eq!(Rush::over(4, 8, 64), None);
    }
}
