//! DG: prefill on one instance, decode on another.
//!
//! The legs: the prefill instance receives the client's request and yields the first token and, in the terminal, transfer
//! parameters. The decode instance receives the same request with those parameters and yields the whole answer, including the
//! first token. Both legs use the request's id.

use std::time::Duration;

use genset_backend_common::{
    CancelReason, DrainContext, GenerateRequest, RequestContext, Role, transfer::TransferParams,
};

use super::near::{self, Choice, Pair};
use crate::answer::Answer;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::subject::Probe;
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("DG01", Core, Disaggregated, "a prefill answers with one token and transfer parameters of its own",
        clause: "Role::Prefill",
        breaks: "decode instances that do not know where the blocks are", prefill_gives_transfer),
    check!("DG02", Core, Disaggregated, "a decode instance refuses a request without transfer parameters",
        clause: "Role::Decode",
        breaks: "decode instances that compute prompts after all, and stall everybody's tokens", decode_needs_transfer),
    check!("DG03", Core, Disaggregated, "prefill and decode answer as one instance would",
        clause: "Role",
        breaks: "answers that change with the deployment: the blocks arrived broken", same_as_aggregated),
    // Only on a paused clock: limits of minutes are common, and their length is not declared.
    check!("DG04", Core, Disaggregated, "blocks that no decode instance fetches are freed in the end",
        clause: "LLMEngine::generate, Contract",
        breaks: "prefill instances that fill up with the blocks of clients that left", unclaimed_is_freed),
    check!("DG05", Core, Disaggregated, "drain waits for transfers that are under way",
        clause: "LLMEngine::drain",
        breaks: "requests lost in every rollout of prefill instances", drain_waits),
    check!("DG06", Core, Disaggregated, "a cancel between the legs frees both sides",
        clause: "LLMEngine::abort",
        breaks: "blocks of cancelled requests held until a limit of minutes passes", cancel_between_legs),
    check!("DG07", Strict, Disaggregated, "a lost prefill instance is a retryable error, and decode goes on",
        clause: "ErrorKind::policy",
        breaks: "client errors, or a dead decode pool, whenever a prefill instance is lost", lost_prefill),
];

pub(super) fn request(live: &Live, seed: u64) -> GenerateRequest {
    live.greedy(live.prompt(10, seed), 12)
}

/// The prefill leg: its answer and its transfer parameters.
pub(super) async fn prefill(
    live: &Live,
    request: &GenerateRequest,
    ctx: &RequestContext,
) -> Result<(Answer, TransferParams), Stop> {
    let running = live.begin(request.clone(), ctx.child()).await?;
    let answer = running.finish().await?;
    let transfer = answer
        .finished()
        .and_then(|finished| finished.transfer.clone());
    match transfer {
        Some(transfer) => Ok((answer, transfer)),
        None => fail!(
            "the prefill ended without transfer parameters: {:?}",
            answer.items.last()
        ),
    }
}

/// The decode leg: its answer, which may be an error.
pub(super) async fn decode(
    live: &Live,
    request: &GenerateRequest,
    transfer: TransferParams,
    ctx: &RequestContext,
) -> Result<Answer, Stop> {
    let mut request = request.clone();
    request.transfer = Some(transfer);
    live.outcome(request, ctx.child()).await
}

/// An instance, and the number of blocks that it used before the check.
pub(super) struct Watched {
    pub(super) live: Live,
    pub(super) before: u64,
}

impl Watched {
    /// A started instance that reports its blocks.
    pub(super) async fn start(trial: &Trial, role: Role) -> Result<Self, Stop> {
        let live = trial.start_as(role).await?;
        let Some(before) = live.kv_used() else {
            skip!(NoProbe, "the engine does not show its KV blocks");
        };
        Ok(Self { live, before })
    }

    /// Waits until it uses no more blocks than before.
    pub(super) async fn is_free(&self, after: &str) -> CheckResult {
        let before = self.before;
        let is_free = move |probe: &dyn Probe| probe.kv_used_blocks().map(|now| now <= before);
        let what = format!("freeing the blocks of {:?} {after}", self.live.start.role);
        self.live.await_probe(&what, is_free).await?;
        Ok(())
    }
}

async fn prefill_gives_transfer(trial: Trial) -> CheckResult {
    let live = trial.start_as(Role::Prefill).await?;
    for seed in 0..3 {
        let request = request(&live, seed);
        let (answer, transfer) = prefill(&live, &request, &live.context(&request)).await?;
        ensure!(
            answer.tokens().len() == 1,
            "the prefill gave {} tokens instead of one",
            answer.tokens().len()
        );
        ensure!(
            transfer.source_worker_id == live.start.worker_id,
            "the transfer parameters name worker {}, but this is worker {}",
            transfer.source_worker_id,
            live.start.worker_id
        );
    }
    Ok(())
}

async fn decode_needs_transfer(trial: Trial) -> CheckResult {
    let live = trial.start_as(Role::Decode).await?;
    let error = live.refusal(request(&live, 0)).await?;
    ensure!(
        error.policy().http_status == 400,
        "the refusal is of kind {}, which does not say that the request is at fault",
        error.kind()
    );
    Ok(())
}

async fn same_as_aggregated(trial: Trial) -> CheckResult {
    let whole = trial.start().await?;
    let first = trial.start_as(Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    let requests = (0..3).map(|seed| request(&whole, seed));
    ensure_as_one(&whole, [&first, &second], Choice::Greedy, requests, "").await
}

/// The legs of each request must answer as `whole` does, as exactly as the engine declares: a decode instance computes its
/// tokens after a prompt that was computed elsewhere, which is another batch. `how` begins the failure.
pub(super) async fn ensure_as_one(
    whole: &Live,
    [first, second]: [&Live; 2],
    choice: Choice,
    requests: impl Iterator<Item = GenerateRequest>,
    how: &str,
) -> CheckResult {
    let mut pairs: Vec<Pair> = Vec::new();
    for request in requests {
        let request = near::rated(whole, request);
        let ctx = whole.context(&request);
        let expected = whole.answer(request.clone()).await?;
        let (begun, transfer) = prefill(first, &request, &ctx).await?;
        let ended = decode(second, &request, transfer, &ctx).await?;
        let is_same = begun.tokens().first() == expected.tokens().first()
            && ended.tokens() == expected.tokens();
        ensure!(
            is_same || (whole.varies_with_batch() && ended.finished().is_some()),
            "{how}prefill gave {:?} and decode {:?} ({:?}), one instance {:?}",
            begun.tokens(),
            ended.tokens(),
            ended.error(),
            expected.tokens()
        );
        pairs.extend([(expected.clone(), begun), (expected, ended)]);
    }
    match whole.varies_with_batch() {
        true => near::ensure_all_near(choice, &pairs, "from prefill and decode"),
        false => Ok(()),
    }
}

async fn unclaimed_is_freed(trial: Trial) -> CheckResult {
    let live = trial.start_as(Role::Prefill).await?;
    if !live.trial.keeps_virtual_time() {
        skip!(
            NoProbe,
            "the limit may be minutes, which a test in real time cannot wait for"
        );
    }
    let probe = live.subject.probe.clone();
    let Some(probe) = probe.filter(|probe| probe.kv_used_blocks().is_some()) else {
        skip!(NoProbe, "the engine does not show its KV blocks");
    };
    let before = probe.kv_used_blocks();
    let request = request(&live, 0);
    prefill(&live, &request, &live.context(&request)).await?;
    let freed = async {
        while probe.kv_used_blocks() > before {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    trial
        .call("freeing the blocks that nobody fetched", freed)
        .await
}

async fn drain_waits(trial: Trial) -> CheckResult {
    let first = trial.start_as(Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    let request = request(&first, 0);
    let ctx = first.context(&request);
    let (_, transfer) = prefill(&first, &request, &ctx).await?;
    let limits = trial.limits();
    let deadline = limits.cancel;
    let shutdown = async {
        let _ = first.subject.engine.drain(DrainContext { deadline }).await;
        first.subject.engine.cleanup().await
    };
    let fetch = async {
        // The time in which the request moves from one instance to the other.
        tokio::time::sleep(deadline / 10).await;
        decode(&second, &request, transfer, &ctx).await
    };
    let both = async { tokio::join!(shutdown, fetch) };
    let limit = limits.call.max(limits.cleanup);
    let (_, answer) = trial
        .within("drain, cleanup and the second leg", limit, Box::pin(both))
        .await?;
    let answer = answer?;
    ensure!(
        answer.finished().is_some(),
        "the prefill instance shut down before its blocks were fetched: {:?}",
        answer.error()
    );
    Ok(())
}

async fn cancel_between_legs(trial: Trial) -> CheckResult {
    let first = Watched::start(&trial, Role::Prefill).await?;
    let second = Watched::start(&trial, Role::Decode).await?;
    let mut request = request(&first.live, 0);
    let ctx = first.live.context(&request);
    prefill(&first.live, &request, &ctx).await?;
    ctx.cancel(CancelReason::Client);
    first.live.abort(&ctx).await?;
    first.is_free("after a cancel").await?;

    let ctx = first.live.context(&request);
    let (_, transfer) = prefill(&first.live, &request, &ctx).await?;
    request.transfer = Some(transfer);
    request.stop.max_tokens = Some(64);
    let mut running = second.live.begin(request, ctx.child()).await?;
    running.read_tokens(1).await?;
    ctx.cancel(CancelReason::Client);
    running.finish().await?;
    for side in [&first, &second] {
        side.live.abort(&ctx).await?;
    }
    for side in [&first, &second] {
        side.is_free("after a cancel").await?;
    }
    Ok(())
}

async fn lost_prefill(trial: Trial) -> CheckResult {
    let lost = trial.start_as(Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    let request = request(&lost, 0);
    let ctx = lost.context(&request);
    let (_, transfer) = prefill(&lost, &request, &ctx).await?;
    // The result of the lost instance's cleanup is not judged here.
    let _ = trial
        .cleaning("cleanup", lost.subject.engine.cleanup())
        .await?;
    let answer = decode(&second, &request, transfer, &ctx).await?;
    // An answer from blocks that were moved before the loss is correct too.
    if let Some(error) = answer.error() {
        ensure!(
            error.policy().is_retryable,
            "a lost prefill instance is reported as {}, which says that it is no use to try again",
            error.kind()
        );
    }
    let first = trial.start_as(Role::Prefill).await?;
    let ctx = first.context(&request);
    let (_, transfer) = prefill(&first, &request, &ctx).await?;
    let answer = decode(&second, &request, transfer, &ctx).await?;
    ensure!(
        answer.finished().is_some(),
        "after a prefill instance was lost, decode fails with the next one: {:?}",
        answer.error()
    );
    Ok(())
}
