//! Explains routing decisions to clients that ask.

use genset_runtime::InstanceId;
use genset_runtime::selection::Candidate;
use serde_json::{Value, json};

use super::cost::Weighed;
use super::fleet::{Place, Request};
use super::metrics::Reason;

/// The maximum number of candidates in an explanation: the chosen one and those of the lowest costs.
const MOST_CANDIDATES: usize = 16;

/// Explains a choice by cost. Costs and amounts are in KV blocks.
pub(super) fn by_cost(
    pool: &str,
    request: &Request,
    places: &[Place],
    weighed: &Weighed,
    chosen: usize,
) -> Value {
    // The rank is omitted if every instance has a single one.
    let has_ranks = places.iter().any(|place| place.rank > 0);
    let rank = |place: &Place| has_ranks.then_some(place.rank);
    let named = weighed.in_order(chosen, MOST_CANDIDATES).into_iter();
    let named = named.filter_map(|index| {
        let (work, cost) = weighed.of(index)?;
        let place = places.get(index)?;
        let mut candidate = json!({
            "instance": place.instance.to_string(),
            "cost": thousandths(cost),
            "overlap_blocks": work.overlap_blocks,
            "prefill_blocks": thousandths(work.prefill_blocks),
            "active_blocks": thousandths(work.active_blocks),
        });
        if let Some(rank) = rank(place) {
            candidate["rank"] = rank.into();
        }
        Some(candidate)
    });
    let place = places.get(chosen);
    let instance = place.map(|place| place.instance);
    let mut decision = decision(pool, weighed.reason(chosen), instance, places.len());
    if let Some(rank) = place.and_then(rank) {
        decision["rank"] = rank.into();
    }
    decision["candidates"] = named.collect();
    decision["block_size"] = request.block_size.into();
    decision["prompt_blocks"] = request.prompt_blocks().into();
    decision
}

/// Explains a choice by request count.
pub(super) fn by_requests(
    pool: &str,
    reason: Reason,
    candidates: &[Candidate],
    chosen: usize,
) -> Value {
    let place = candidates.get(chosen);
    let instance = place.map(|chosen| chosen.instance);
    let mut decision = decision(pool, reason, instance, candidates.len());
    decision["requests"] = place.map(|chosen| chosen.load).into();
    decision
}

fn decision(pool: &str, reason: Reason, instance: Option<InstanceId>, candidates: usize) -> Value {
    json!({
        "mode": "kv",
        "model": pool,
        "reason": reason.name(),
        "instance": instance.map(|instance| instance.to_string()),
        "candidate_count": candidates,
    })
}

/// Rounds to thousandths: costs are estimates.
fn thousandths(blocks: f64) -> f64 {
    (blocks * 1e3).round() / 1e3
}
