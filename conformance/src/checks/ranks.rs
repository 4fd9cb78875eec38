//! RK: data-parallel ranks, for engines that declare several.

use genset_backend_common::{ErrorKind, GenerateRequest};

use super::kv_events::{answered, block_count, block_size, chain};
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::kv_index::Index;
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("RK01", Core, Ranks, "every data-parallel rank answers the requests that name it, and one that is not there is refused",
        clause: "EngineConfig::data_parallel_size",
        breaks: "a rank that fails, or answers from other weights, for the requests that a router sends there", each_answers),
    check!("RK02", Core, KvEvents, "each data-parallel rank publishes its own blocks, where kv_ranks is declared",
        clause: "KvEventPublisher::of_rank",
        breaks: "prompts routed to a rank whose cache does not have them", each_publishes),
];

/// The maximum number of ranks that are tested.
const MOST_RANKS: u32 = 8;

async fn started(trial: &Trial) -> Result<(Live, u32), Stop> {
    let live = trial.start().await?;
    let ranks = live.config.data_parallel_size;
    if ranks <= 1 {
        skip!(NotDeclared, "the engine does not declare several ranks");
    }
    Ok((live, ranks.min(MOST_RANKS)))
}

fn at_rank(live: &Live, rank: u32, prompt_len: usize, seed: u64) -> GenerateRequest {
    let mut request = live.greedy(live.prompt(prompt_len, seed), 8);
    request.data_parallel_rank = Some(rank);
    request
}

async fn each_answers(trial: Trial) -> CheckResult {
    let (live, ranks) = started(&trial).await?;
    let mut first = None;
    for rank in 0..ranks {
        live.warm(&at_rank(&live, rank, 8, 1)).await?;
        for _ in 0..2 {
            let answer = live.answer(at_rank(&live, rank, 8, 1)).await?;
            if let Some(error) = answer.error() {
                fail!(
                    "a request for rank {rank} of {ranks} ended with {error} ({})",
                    error.kind()
                );
            }
            let generated = answer.generated();
            let expected = first.get_or_insert_with(|| generated.clone());
            ensure!(
                generated == *expected,
                "rank 0 answers {expected:?}, rank {rank} {generated:?}"
            );
        }
    }
    let beyond = live.config.data_parallel_size;
    let error = live.refusal(at_rank(&live, beyond, 8, 1)).await?;
    ensure!(
        error.kind() == ErrorKind::InvalidArgument,
        "a request for rank {beyond}, which is not there, is refused with {}: {error}",
        error.kind()
    );
    Ok(())
}

async fn each_publishes(trial: Trial) -> CheckResult {
    let (live, ranks) = started(&trial).await?;
    if !live.config.capabilities.kv_ranks {
        skip!(NotDeclared, "the engine does not declare kv_ranks");
    }
    let mut indexes = Vec::new();
    for rank in 0..ranks {
        match live.start.kv_events.known_rank(rank) {
            Some(publisher) => indexes.push(Index::following(&publisher)),
            None => fail!("kv_ranks is declared, and rank {rank} of {ranks} publishes nowhere"),
        }
    }
    let len = block_count(&live, 3, 8)? * block_size(&live)?;
    for rank in 0..ranks {
        let request = at_rank(&live, rank, len, u64::from(rank));
        let blocks = chain(&live, &live.prompt(len, u64::from(rank)));
        answered(&live, request).await?;
        for (index, place) in indexes.iter_mut().zip(0..) {
            if place == rank {
                index.until_live(&live, &blocks).await?;
                continue;
            }
            index.read()?;
            let strangers = blocks
                .iter()
                .filter(|block| index.live.contains_key(*block));
            let strangers = strangers.count();
            ensure!(
                strangers == 0,
                "rank {place} publishes {strangers} blocks of a prompt that rank {rank} had"
            );
        }
    }
    Ok(())
}
