//! KV: the events of the prefix cache. Routers learn from them which instance has which blocks.
//!
//! The publisher assigns event ids in order. KV05 checks that the engine publishes changes, and few enough for a subscriber to
//! follow.
//!
//! Changed from the catalogue, with the reason:
//! - KV11: an engine has no list of its blocks. Its own view of the cache is the number of prompt tokens reused, which it counts.

mod soak;

use std::time::Duration;

use genset_backend_common::kv::{BlockHash, hash_blocks, salt_root};
use genset_backend_common::{ErrorKind, GenerateRequest, TokenId};
use tokio::time::Instant;

use super::usage::unique_salt;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::kv_index::Index;
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("KV01", Core, KvEvents, "the blocks of every request are published where start said",
        clause: "StartContext::kv_events",
        breaks: "a router that stops learning about an instance and sends its prompts elsewhere", every_request_published),
    check!("KV02", Core, KvEvents, "stored blocks form chains: each follows the block it was computed after",
        clause: "KvEventData::Stored",
        breaks: "prefix indexes with loose ends: reuse that no router finds", parent_chains),
    check!("KV03", Core, KvEvents, "no block is removed before it was stored",
        clause: "KvEventData::Removed",
        breaks: "indexes that drift from the cache for good", removed_after_stored),
    check!("KV04", Core, KvEvents, "block hashes are those of the reference function, of full blocks only",
        clause: "kv::hash_blocks",
        breaks: "a router and an engine that never agree: no prefix hit at all", reference_hashes),
    check!("KV05", Core, KvEvents, "a subscriber can follow the events of a few requests",
        clause: "KvEventSubscription::next",
        breaks: "event storms: every subscriber falls behind and takes snapshot after snapshot", no_storm),
    check!("KV06", Core, KvEvents, "clearing the prefix cache is published, and the cache is empty",
        clause: "EngineControls::clear_prefix_cache",
        breaks: "prompts routed to a cache that is gone, or answers from blocks of old weights", clear),
    check!("KV07", Core, KvEvents, "blocks have the size that the config declares",
        clause: "EngineConfig::kv_block_size",
        breaks: "a router that scores twice or half the reuse there is", block_size_holds),
    check!("KV08", Strict, KvEvents, "a prompt reuses exactly the blocks that the events say are there",
        clause: "Usage::cached_tokens",
        breaks: "routing decisions on a state that the engine does not have", events_tell_reuse),
    check!("KV09", Core, KvEvents, "published blocks never exceed the blocks there are",
        clause: "EngineConfig::kv_total_blocks",
        breaks: "evictions that nobody hears of: indexes that grow until they are all wrong", within_total),
    check!("KV10", Strict, KvEvents, "blocks are published before a request that reuses them has its first token",
        clause: "StartContext::kv_events",
        breaks: "bursts on one prompt that are spread over instances without it", visible_in_time),
    check!("KV11", Soak, KvEvents, "after a long random workload the index built from events is what the cache is",
        clause: "StartContext::kv_events",
        breaks: "indexes that drift by a block in a thousand requests: after a day the router is guessing", soak::index_is_the_cache),
    check!("KV12", Core, KvEvents, "prompts of different salts, and those without one, reuse nothing of each other, and their blocks have salted hashes",
        clause: "GenerateRequest::cache_salt",
        breaks: "a tenant that finds out another's prompts by what is cached of its own", salts_keep_apart),
    check!("KV13", Strict, KvEvents, "blocks of prompts that come together are stored after blocks of their own prompt",
        clause: "KvEventData::Stored",
        breaks: "indexes in which one prompt continues another: what is evicted with one is lost for both", own_parent_each),
];

impl Index {
    fn of(live: &Live) -> Self {
        Self::following(&live.start.kv_events)
    }

    /// The number of blocks at the start of `chain` that are live.
    fn known(&self, chain: &[BlockHash]) -> usize {
        let is_live = |block: &&BlockHash| self.live.contains_key(block);
        chain.iter().take_while(is_live).count()
    }

    /// Reads events until `is_done`.
    async fn until(
        &mut self,
        live: &Live,
        what: &str,
        is_done: impl Fn(&Self) -> bool,
    ) -> CheckResult {
        let trial = &live.trial;
        let wait = async {
            loop {
                self.read()?;
                if is_done(self) {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        trial.within(what, trial.limits().cancel, wait).await?
    }

    pub(super) async fn until_live(&mut self, live: &Live, chain: &[BlockHash]) -> CheckResult {
        let is_live = |index: &Self| chain.iter().all(|block| index.live.contains_key(block));
        self.until(live, "the publication of a prompt's blocks", is_live)
            .await
    }

    async fn until_any(&mut self, live: &Live) -> CheckResult {
        let what = "the publication of any block";
        self.until(live, what, |index| index.stored > 0).await
    }

    /// The blocks of a sequence must be stored each after the one before it, unless they were evicted meanwhile.
    fn ensure_parents(&self, blocks: &[BlockHash], whose: &str) -> CheckResult {
        for (place, block) in blocks.iter().enumerate() {
            let expected = place.checked_sub(1).map(|before| blocks[before]);
            if let Some(parent) = self.live.get(block) {
                ensure!(
                    *parent == expected,
                    "block {place} of {whose} was stored after {parent:?}, not after {expected:?}"
                );
            }
        }
        Ok(())
    }
}

/// The number of tokens per block, which every check of this group needs.
pub(super) fn block_size(live: &Live) -> Result<usize, Stop> {
    let Some(size) = live.config.kv_block_size else {
        fail!("the engine declares kv_events, but its config has no kv_block_size");
    };
    Ok(usize::try_from(size.get()).unwrap_or(usize::MAX))
}

/// The number of full blocks of a prompt: `wanted`, or as many as the context holds besides `beside` tokens.
pub(super) fn block_count(live: &Live, wanted: usize, beside: usize) -> Result<usize, Stop> {
    let context = usize::try_from(live.config.context_length_tokens).unwrap_or(usize::MAX);
    match context.saturating_sub(beside) / block_size(live)? {
        0 => skip!(
            NotDeclared,
            "a context of {context} tokens has no room for a full block"
        ),
        most => Ok(most.min(wanted)),
    }
}

/// The reference hashes of the full blocks of `tokens`.
pub(super) fn chain(live: &Live, tokens: &[TokenId]) -> Vec<BlockHash> {
    salted_chain(live, None, tokens)
}

fn salted_chain(live: &Live, salt: Option<&str>, tokens: &[TokenId]) -> Vec<BlockHash> {
    let size = live
        .config
        .kv_block_size
        .unwrap_or(std::num::NonZeroU32::MIN);
    hash_blocks(salt.map(salt_root), tokens, size)
}

/// A request of this group. Each rank has its own cache, so all requests go to one rank.
fn greedy(live: &Live, prompt: Vec<TokenId>, max_tokens: u32) -> GenerateRequest {
    let mut request = live.greedy(prompt, max_tokens);
    request.data_parallel_rank = (live.config.data_parallel_size > 1).then_some(0);
    request
}

/// The number of tokens that each request of this group generates.
const GENERATED: u32 = 3;
/// The same, as a length.
const GENERATED_TOKENS: usize = 3;

/// Sends a request, which must not end with an error. Returns its tokens, and the number of prompt tokens reused.
pub(super) async fn answered(
    live: &Live,
    request: GenerateRequest,
) -> Result<(Vec<TokenId>, Option<u32>), Stop> {
    let answer = live.answer(request).await?;
    let Some(usage) = answer.usage() else {
        fail!("a plain request ended with {:?}", answer.error());
    };
    Ok((answer.tokens(), usage.cached_tokens))
}

/// Sends a prompt and reads its answer. Returns the whole sequence, and the number of prompt tokens reused.
async fn send(live: &Live, prompt: &[TokenId]) -> Result<(Vec<TokenId>, Option<u32>), Stop> {
    let request = greedy(live, prompt.to_vec(), GENERATED);
    let (tokens, cached) = answered(live, request).await?;
    Ok(([prompt, &tokens].concat(), cached))
}

/// Fills the cache twice with prompts without common prefixes; reads the events meanwhile.
async fn fill(live: &Live, index: &mut Index) -> CheckResult {
    const MOST_TOKENS: usize = 65_536;
    let size = block_size(live)?;
    let total = live
        .config
        .kv_total_blocks
        .map_or(usize::MAX, |t| usize::try_from(t).unwrap_or(usize::MAX));
    if total.saturating_mul(size) > MOST_TOKENS / 2 {
        skip!(
            NoProbe,
            "the cache is too large to be filled by a test, or of unknown size"
        );
    }
    let blocks = block_count(live, 16, GENERATED_TOKENS)?;
    let prompts = u32::try_from(2 * total / blocks + 1).unwrap_or(u32::MAX);
    let begun = Instant::now();
    for sent in 0..prompts {
        let prompt = live.prompt(blocks * size, u64::from(sent) + 100);
        send(live, &prompt).await?;
        index.read()?;
        ensure_soon_filled(live, begun.elapsed(), sent + 1, prompts)?;
    }
    index.until_any(live).await
}

/// The number of prompts that tell how long all of them will take.
const TELLING_PROMPTS: u32 = 4;

/// Skips a check of an engine that in real time would not fill its cache before the check is given up: `time` is that of `sent`
/// prompts.
fn ensure_soon_filled(live: &Live, time: Duration, sent: u32, prompts: u32) -> CheckResult {
    if sent < TELLING_PROMPTS || live.trial.keeps_virtual_time() {
        return Ok(());
    }
    // Half of what a check has whose answers continue.
    let most = live.trial.limits().wall * 4;
    if (time / sent).saturating_mul(prompts) > most {
        skip!(
            Level,
            "it takes too long to fill the cache with {prompts} prompts"
        );
    }
    Ok(())
}

async fn every_request_published(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let len = block_count(&live, 3, GENERATED_TOKENS)? * block_size(&live)?;
    let mut index = Index::of(&live);
    for seed in 0..3 {
        let prompt = live.prompt(len, seed);
        send(&live, &prompt).await?;
        index.until_live(&live, &chain(&live, &prompt)).await?;
    }
    Ok(())
}

async fn parent_chains(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let begun = size / 2;
    let blocks = block_count(&live, 3, begun + GENERATED_TOKENS)?;
    let prompt = live.prompt(blocks * size + begun, 1);
    let shared = &prompt[..(blocks - 1) * size];
    let other = [shared, &live.prompt(size + begun, 2)].concat();
    for prompt in [prompt, other] {
        let mut request = greedy(&live, prompt.clone(), 2);
        // Enough to fill blocks with generated tokens, if the context has room for them.
        let wanted = u32::try_from(2 * size).unwrap_or(u32::MAX).max(4);
        request.stop.max_tokens = Some(live.affordable_answer(prompt.len(), wanted));
        let (generated, _) = answered(&live, request).await?;
        let prompt_blocks = chain(&live, &prompt);
        index.until_live(&live, &prompt_blocks).await?;
        let whole = chain(&live, &[prompt, generated].concat());
        index.ensure_parents(&whole, "a sequence")?;
    }
    ensure!(
        index.orphans.is_empty(),
        "blocks were stored after parents that are not: {:?}",
        index.orphans
    );
    Ok(())
}

/// The number of prompts sent at once.
const TOGETHER: u32 = 8;

async fn own_parent_each(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let len = block_count(&live, 3, GENERATED_TOKENS)? * block_size(&live)?;
    let count = live.at_once(TOGETHER);
    if count < 2 {
        skip!(NotDeclared, "the engine runs one request at a time");
    }
    let mut index = Index::of(&live);
    let prompts: Vec<Vec<TokenId>> = (1..)
        .take(count)
        .map(|seed| live.prompt(len, seed))
        .collect();
    let requests = prompts
        .iter()
        .map(|prompt| greedy(&live, prompt.clone(), GENERATED));
    let answers = live.answers(requests.collect()).await?;
    for (prompt, answer) in prompts.iter().zip(answers) {
        if answer.usage().is_none() {
            fail!("a plain request ended with {:?}", answer.error());
        }
        index.read()?;
        index.ensure_parents(&chain(&live, prompt), "a prompt beside others")?;
    }
    Ok(())
}

async fn removed_after_stored(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut index = Index::of(&live);
    fill(&live, &mut index).await?;
    ensure!(
        index.unknown_removals.is_empty(),
        "{} blocks were removed that were not stored, such as {:?}",
        index.unknown_removals.len(),
        index.unknown_removals[0]
    );
    Ok(())
}

async fn reference_hashes(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let begun = size / 2;
    let blocks = block_count(&live, 4, begun + GENERATED_TOKENS)?;
    let prompt = live.prompt(blocks * size + begun, 1);
    // A worker that serves already has blocks of other requests.
    let before = index.live.clone();
    let (sequence, _) = send(&live, &prompt).await?;
    index.until_live(&live, &chain(&live, &prompt)).await?;
    let expected = chain(&live, &sequence);
    for block in index.live.keys() {
        ensure!(
            expected.contains(block) || before.contains_key(block),
            "{block:?} was stored, which is the hash of no full block of the sequence"
        );
    }
    Ok(())
}

async fn no_storm(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let blocks = block_count(&live, 16, GENERATED_TOKENS)?;
    for seed in 0..8 {
        send(&live, &live.prompt(blocks * size, seed)).await?;
    }
    // A subscriber that was busy all the time.
    index.until_any(&live).await
}

async fn clear(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let prompt = live.prompt(block_count(&live, 3, 1 + GENERATED_TOKENS)? * size + 1, 1);
    send(&live, &prompt).await?;
    index.until_live(&live, &chain(&live, &prompt)).await?;
    let Some(controls) = live.subject.engine.controls() else {
        skip!(NotDeclared, "the engine has no controls");
    };
    match live
        .trial
        .call("clear_prefix_cache", controls.clear_prefix_cache())
        .await?
    {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            skip!(NotDeclared, "the engine cannot clear its prefix cache");
        }
        Err(error) => fail!("clear_prefix_cache failed: {error} ({})", error.kind()),
    }
    index
        .until(&live, "the event of the clearing", |index| {
            index.live.is_empty()
        })
        .await?;
    let (_, cached) = send(&live, &prompt).await?;
    ensure!(
        cached.is_none_or(|cached| cached == 0),
        "a prompt reused {cached:?} tokens of a cache that was cleared"
    );
    index.until_live(&live, &chain(&live, &prompt)).await
}

/// The maximum number of prompts to try for one whose blocks the worker does not have.
const MOST_PROMPTS: usize = 64;

async fn block_size_holds(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let blocks = block_count(&live, 4, GENERATED_TOKENS)?;
    // A worker that serves already has other blocks, possibly those of some of our prompts. They may be evicted.
    let before: Vec<BlockHash> = index.live.keys().copied().collect();
    let made = |index: &Index| {
        let live = index.live.keys();
        live.filter(|block| before.binary_search(block).is_err())
            .count()
    };
    let prompts = (1..).map(|seed| live.prompt(blocks * size, seed));
    let is_new = |prompt: &Vec<TokenId>| {
        let first = chain(&live, prompt).into_iter().next();
        first.is_none_or(|first| !index.live.contains_key(&first))
    };
    let Some(prompt) = prompts.take(MOST_PROMPTS).find(is_new) else {
        skip!(NoProbe, "the worker has the blocks of all prompts already");
    };
    let (sequence, _) = send(&live, &prompt).await?;
    index
        .until(&live, "the publication of a prompt's blocks", |index| {
            made(index) >= blocks
        })
        .await?;
    let most = sequence.len() / size;
    let made = made(&index);
    ensure!(
        made <= most,
        "{} tokens made {made} blocks, although a block is declared to have {size}",
        sequence.len(),
    );
    Ok(())
}

async fn events_tell_reuse(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let whole = block_count(&live, 3, 1 + GENERATED_TOKENS)? * size;
    let first = live.prompt(whole + 1, 1);
    let branch = [&first[..whole - size], &live.prompt(size + 1, 2)].concat();
    let other = live.prompt(whole + 1, 3);
    for prompt in [&first, &branch, &other, &first, &branch] {
        index.read()?;
        let blocks = chain(&live, prompt);
        let published = index.known(&blocks);
        let (_, cached) = send(&live, prompt).await?;
        let Some(cached) = cached else {
            skip!(NoProbe, "the engine does not count cached tokens");
        };
        ensure!(
            usize::try_from(cached) == Ok(published * size),
            "{published} blocks of {size} tokens were published, {cached} tokens were reused"
        );
        index.until_live(&live, &blocks).await?;
    }
    Ok(())
}

async fn within_total(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut index = Index::of(&live);
    fill(&live, &mut index).await?;
    ensure_within_total(&live, &index)
}

fn ensure_within_total(live: &Live, index: &Index) -> CheckResult {
    let total = live.config.kv_total_blocks.unwrap_or(u64::MAX);
    ensure!(
        u64::try_from(index.peak).is_ok_and(|peak| peak <= total),
        "{} blocks were live by the events, of {total} that there are",
        index.peak
    );
    Ok(())
}

/// The number of tokens in the answer to a cached prompt.
const REUSING: u32 = 8;

async fn visible_in_time(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let shared = live.prompt(block_count(&live, 3, 1 + GENERATED_TOKENS)? * size, 1);
    let first = [shared.clone(), live.prompt(1, 2)].concat();
    let second = [shared.clone(), live.prompt(1, 3)].concat();
    answered(&live, greedy(&live, first, 1)).await?;
    let mut running = live.generate(greedy(&live, second, REUSING)).await?;
    running.read_tokens(1).await?;
    let mut index = Index::of(&live);
    if !live.trial.keeps_virtual_time() {
        // The events of a server next to the worker use their own connection; on a busy machine they may arrive after the
        // token.
        let late = index.until_live(&live, &chain(&live, &shared)).await;
        drop(late);
    }
    let published = index.live;
    let usage = running.finish().await?.usage();
    let Some(cached) = usage
        .and_then(|usage| usage.cached_tokens)
        .filter(|cached| *cached > 0)
    else {
        skip!(NoProbe, "the engine reused nothing, or does not count it");
    };
    let reused = usize::try_from(cached).unwrap_or(usize::MAX) / size;
    let missing = chain(&live, &shared)
        .iter()
        .take(reused)
        .filter(|b| !published.contains_key(b))
        .count();
    ensure!(
        missing == 0,
        "at the first token {missing} of {reused} reused blocks were not published"
    );
    Ok(())
}

async fn salts_keep_apart(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let size = block_size(&live)?;
    let mut index = Index::of(&live);
    let prompt = live.prompt(block_count(&live, 3, 1 + GENERATED_TOKENS)? * size + 1, 1);
    let [one, other] = [unique_salt(), unique_salt()];
    for salt in [Some(one.as_str()), None, Some(other.as_str())] {
        let expected = salted_chain(&live, salt, &prompt);
        // A worker that serves already may have received it without a salt.
        let may_reuse = expected
            .first()
            .is_some_and(|block| index.live.contains_key(block));
        let mut request = greedy(&live, prompt.clone(), GENERATED);
        request.cache_salt = salt.map(Into::into);
        let (_, cached) = answered(&live, request).await?;
        let cached = cached.unwrap_or(0);
        ensure!(
            cached == 0 || may_reuse,
            "a prompt of the salt {salt:?} reused {cached} tokens of one with another or none"
        );
        index.until_live(&live, &expected).await?;
    }
    Ok(())
}
