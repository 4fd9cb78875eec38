//! A long random workload, after which a router's index must still equal the cache.

use futures_util::future::join_all;
use genset_backend_common::random::{STEP, mix};
use genset_backend_common::{CancelReason, TokenId};

use super::{
    GENERATED, GENERATED_TOKENS, Index, block_count, block_size, chain, ensure_within_total,
    greedy, send,
};
use crate::check::{CheckResult, Stop, ensure, skip};
use crate::trial::{Live, Trial};

/// The number of bursts of requests; the index is compared after every 20th.
const BURSTS: u64 = 120;
const COMPARE_EVERY: u64 = 20;
/// The number of prompts that are sent for each comparison.
const COMPARED: u64 = 12;
/// The maximum number of concurrent requests.
const BURST: u64 = 5;
/// The maximum number of prompts: twice what the cache holds, for caches up to a size.
const MOST_PROMPTS: u64 = 512;
/// The maximum number of blocks in each of a prompt's three parts.
const PART_BLOCKS: usize = 4;

/// Prompts with common prefixes, like conversations: a few roots, each with a few branches, each with its leaves.
struct Prompts {
    part_tokens: usize,
    count: u64,
}

impl Prompts {
    fn of(live: &Live) -> Result<Self, Stop> {
        let size = block_size(live)?;
        let context = usize::try_from(live.config.context_length_tokens).unwrap_or(usize::MAX);
        if block_count(live, 3, 1 + GENERATED_TOKENS)? < 3 {
            skip!(
                NotDeclared,
                "a context of {context} tokens has no room for three KV blocks"
            );
        }
        let part_blocks = (context / 2 / size / 3).clamp(1, PART_BLOCKS);
        let prompt_blocks = u64::try_from(3 * part_blocks).unwrap_or(u64::MAX);
        let total = live.config.kv_total_blocks.unwrap_or(u64::MAX);
        if total < 2 * prompt_blocks {
            skip!(
                NotDeclared,
                "a cache of {total} blocks is too small for prompts of {prompt_blocks}"
            );
        }
        // Each leaf has its own part.
        let leaves = total.saturating_mul(2) / (prompt_blocks / 3);
        Ok(Self {
            part_tokens: part_blocks * size,
            count: leaves.clamp(16, MOST_PROMPTS),
        })
    }

    fn prompt(&self, live: &Live, number: u64) -> Vec<TokenId> {
        let leaf = number % self.count;
        let parts = [1 + leaf % 4, 1000 + leaf % 16, 100_000 + leaf];
        let mut prompt = parts
            .map(|seed| live.prompt(self.part_tokens, seed))
            .concat();
        // The last token is always computed; with one more token, every block can be reused.
        prompt.push(live.token(leaf));
        prompt
    }
}

/// Pseudo-random numbers, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }
}

pub(super) async fn index_is_the_cache(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let prompts = Prompts::of(&live)?;
    let mut index = Index::of(&live);
    let mut random = Random(1);
    for burst in 1..=BURSTS {
        let requests: Vec<_> = (0..=random.next() % BURST)
            .map(|_| serve(&live, prompts.prompt(&live, random.next()), random.next()))
            .collect();
        for served in join_all(requests).await {
            served?;
        }
        index.read()?;
        if burst.is_multiple_of(COMPARE_EVERY) {
            compare(&live, &prompts, &mut index, &mut random).await?;
        }
    }
    ensure_sound(&live, &index)
}

/// Runs one request: reads it to its end, cancels it, or drops it.
async fn serve(live: &Live, prompt: Vec<TokenId>, way: u64) -> CheckResult {
    let most = GENERATED + 16;
    let mut running = live.generate(greedy(live, prompt, most)).await?;
    match way % 4 {
        0 => drop(running),
        1 => {
            running.read_tokens(1).await?;
            drop(running);
        }
        2 => {
            running.read_tokens(1).await?;
            running.ctx.cancel(CancelReason::Client);
            drop(running.finish().await?);
        }
        _ => drop(running.finish().await?),
    }
    Ok(())
}

/// While nothing runs, a router that has listened from the start, a new one, and the cache must agree.
async fn compare(
    live: &Live,
    prompts: &Prompts,
    index: &mut Index,
    random: &mut Random,
) -> CheckResult {
    let is_idle = live
        .await_probe("the end of abandoned requests", |probe| {
            probe.active_requests().map(|active| active == 0)
        })
        .await?;
    if !is_idle {
        tokio::time::sleep(live.trial.limits().cancel / 4).await;
    }
    let newcomer = Index::of(live).live;
    index
        .until(live, "agreement of the changes with a snapshot", |index| {
            index.live == newcomer
        })
        .await?;
    for _ in 0..COMPARED {
        compare_one(live, &prompts.prompt(live, random.next()), index).await?;
    }
    Ok(())
}

async fn compare_one(live: &Live, prompt: &[TokenId], index: &mut Index) -> CheckResult {
    index.read()?;
    let blocks = chain(live, prompt);
    let known = index.known(&blocks);
    let (_, cached) = send(live, prompt).await?;
    let Some(cached) = cached else {
        skip!(NoProbe, "the engine does not count cached tokens");
    };
    ensure!(
        usize::try_from(cached) == Ok(known * block_size(live)?),
        "by the events {known} blocks of a prompt are there, but {cached} tokens were reused"
    );
    index.until_live(live, &blocks).await
}

fn ensure_sound(live: &Live, index: &Index) -> CheckResult {
    ensure!(
        index.orphans.is_empty(),
        "{} blocks were stored after parents that are not there",
        index.orphans.len()
    );
    ensure!(
        index.unknown_removals.is_empty(),
        "{} blocks were removed that were not there",
        index.unknown_removals.len()
    );
    ensure_within_total(live, index)
}
