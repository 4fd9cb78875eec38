//! DG: what a prefill instance holds for decode instances, and when it is freed. The legs are those of
//! [`disaggregated`](super::disaggregated).

use std::time::Duration;

use genset_backend_common::{
    CancelReason, Role, TokenId, config::SamplingOption, transfer::TransferParams,
};
use serde_json::json;

use super::disaggregated::{Watched, decode, ensure_as_one, prefill, request};
use super::near::Choice;
use crate::answer::Answer;
use crate::check::{Check, CheckResult, check, ensure, skip};
use crate::trial::Trial;

pub(super) const CHECKS: &[Check] = &[
    check!("DG08", Core, Disaggregated, "blocks that were fetched are free, and those of a finished decode too",
        clause: "KvSource::fetch",
        breaks: "prefill instances that are full of blocks that others have", fetched_are_free),
    check!("DG09", Core, Disaggregated, "blocks that were fetched are not given again",
        clause: "KvSource::fetch",
        breaks: "one client's answer from another client's prompt, after a retry", fetched_once),
    check!("DG10", Core, Disaggregated, "a decode request that is refused holds nothing",
        clause: "Role::Decode",
        breaks: "decode instances that lose blocks to every request they refuse", refused_holds_nothing),
    check!("DG11", Core, Disaggregated, "blocks that are released are free",
        clause: "KvSource::release",
        breaks: "prefill instances full of the blocks of clients that left", released_are_free),
    check!("DG12", Core, Disaggregated, "a prefill that is cancelled or dropped holds nothing",
        clause: "LLMEngine::generate, Contract",
        breaks: "blocks of cancelled prompts held until a limit of minutes passes", cancelled_prefill),
    // Only on a paused clock, like DG04.
    check!("DG13", Core, Disaggregated, "blocks whose time is over are not given any more",
        clause: "KvSource::fetch",
        breaks: "one client's answer from another client's prompt, after a slow handover", nothing_after_the_lease),
    check!("DG14", Core, Disaggregated, "a decode answer that is dropped before its first token frees both sides",
        clause: "LLMEngine::generate, Contract",
        breaks: "blocks of clients that left while theirs were on the way", dropped_decode),
    check!("DG15", Strict, Disaggregated, "prefill and decode draw as one instance would",
        clause: "SamplingOptions::seed",
        breaks: "sampled answers whose second token does not go with their first", same_draws),
    check!("DG16", Core, Disaggregated, "what ends with its first token is an ordinary answer, and holds nothing",
        clause: "Role::Prefill",
        breaks: "blocks held for decode instances that nobody will ask", ended_holds_nothing),
];

async fn fetched_are_free(trial: Trial) -> CheckResult {
    let first = Watched::start(&trial, Role::Prefill).await?;
    let second = Watched::start(&trial, Role::Decode).await?;
    for seed in 0..3 {
        let request = request(&first.live, seed);
        let ctx = first.live.context(&request);
        let (_, transfer) = prefill(&first.live, &request, &ctx).await?;
        let answer = decode(&second.live, &request, transfer, &ctx).await?;
        ensure!(
            answer.finished().is_some(),
            "decode failed: {:?}",
            answer.error()
        );
        first.is_free("after the fetch").await?;
        second.is_free("after the answer").await?;
    }
    Ok(())
}

/// Whether `answer` is the right one, or an error that allows starting anew.
fn is_right_or_lost(answer: &Answer, expected: &[TokenId]) -> CheckResult {
    match answer.error() {
        Some(error) => ensure!(
            error.policy().is_retryable,
            "blocks that are no longer held are reported as {}, which says that it is no use to try again",
            error.kind()
        ),
        None => ensure!(
            answer.tokens() == expected,
            "with blocks that are no longer held came {:?}, with the right ones {expected:?}",
            answer.tokens()
        ),
    }
    Ok(())
}

async fn fetched_once(trial: Trial) -> CheckResult {
    let first = trial.start_as(Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    let third = trial.start_as(Role::Decode).await?;
    let request = request(&first, 0);
    let ctx = first.context(&request);
    let (_, transfer) = prefill(&first, &request, &ctx).await?;
    let answer = decode(&second, &request, transfer.clone(), &ctx).await?;
    let expected = answer.tokens();
    ensure!(
        answer.finished().is_some(),
        "decode failed: {:?}",
        answer.error()
    );
    // Another prompt may have taken the blocks.
    let other = self::request(&first, 1);
    prefill(&first, &other, &first.context(&other)).await?;
    for live in [&second, &third] {
        let again = decode(live, &request, transfer.clone(), &live.context(&request)).await?;
        is_right_or_lost(&again, &expected)?;
    }
    Ok(())
}

async fn refused_holds_nothing(trial: Trial) -> CheckResult {
    let live = Watched::start(&trial, Role::Decode).await?;
    let foreign = TransferParams {
        source_worker_id: live.live.start.worker_id + 1,
        source: None,
        data: json!({ "of": "another engine" }),
    };
    for (seed, transfer) in [(0, None), (1, Some(foreign))] {
        let mut request = request(&live.live, seed);
        request.transfer = transfer;
        let ctx = live.live.context(&request);
        // An engine that needs nothing from the parameters may answer. DG02 judges what is refused, and how.
        live.live.outcome(request, ctx.clone()).await?;
        live.live.abort(&ctx).await?;
        live.is_free("after a refusal").await?;
    }
    Ok(())
}

async fn released_are_free(trial: Trial) -> CheckResult {
    let first = Watched::start(&trial, Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    let Some(source) = first.live.start.kv_transfers.source() else {
        skip!(
            NotDeclared,
            "the engine moves its blocks by means of its own"
        );
    };
    let request = request(&first.live, 0);
    let ctx = first.live.context(&request);
    let (_, transfer) = prefill(&first.live, &request, &ctx).await?;
    // Releasing what is not held is no error, nor is releasing another engine's parameters.
    source.release(&json!("of another engine"));
    source.release(&transfer.data);
    source.release(&transfer.data);
    first.is_free("after the release").await?;
    let answer = decode(&second, &request, transfer, &ctx).await?;
    ensure!(
        answer
            .error()
            .is_none_or(|error| error.policy().is_retryable),
        "released blocks are reported as {:?}",
        answer.error()
    );
    Ok(())
}

async fn cancelled_prefill(trial: Trial) -> CheckResult {
    let live = Watched::start(&trial, Role::Prefill).await?;
    let request = request(&live.live, 0);
    // At once, and in the middle of a step.
    for (after_ms, is_dropped) in [(0, false), (0, true), (5, false), (5, true)] {
        let ctx = live.live.context(&request);
        let running = live.live.begin(request.clone(), ctx.child()).await?;
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        ctx.cancel(CancelReason::Client);
        if is_dropped {
            drop(running);
        } else {
            running.finish().await?;
        }
        live.live.abort(&ctx).await?;
        live.is_free("after a cancel").await?;
    }
    Ok(())
}

async fn nothing_after_the_lease(trial: Trial) -> CheckResult {
    let first = trial.start_as(Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    if !first.trial.keeps_virtual_time() {
        skip!(
            NoProbe,
            "the limit may be minutes, which a test in real time cannot wait for"
        );
    }
    let request = request(&first, 0);
    let ctx = first.context(&request);
    let (_, transfer) = prefill(&first, &request, &ctx).await?;
    let answer = decode(&second, &request, transfer, &ctx).await?;
    let (_, transfer) = prefill(&first, &request, &ctx).await?;
    tokio::time::sleep(trial.limits().call).await;
    let late = decode(&second, &request, transfer, &ctx).await?;
    is_right_or_lost(&late, &answer.tokens())
}

async fn dropped_decode(trial: Trial) -> CheckResult {
    let first = Watched::start(&trial, Role::Prefill).await?;
    let second = Watched::start(&trial, Role::Decode).await?;
    for seed in 0..3 {
        let mut request = request(&first.live, seed);
        let ctx = first.live.context(&request);
        let (_, transfer) = prefill(&first.live, &request, &ctx).await?;
        request.transfer = Some(transfer);
        let running = second.live.begin(request, ctx.child()).await?;
        ctx.cancel(CancelReason::Client);
        drop(running);
        first.live.abort(&ctx).await?;
        second.live.abort(&ctx).await?;
        first.is_free("after the client left").await?;
        second.is_free("after the client left").await?;
    }
    Ok(())
}

async fn same_draws(trial: Trial) -> CheckResult {
    let whole = trial.start().await?;
    whole.needs(SamplingOption::Seed)?;
    whole.needs(SamplingOption::Temperature)?;
    let first = trial.start_as(Role::Prefill).await?;
    let second = trial.start_as(Role::Decode).await?;
    let requests = (0..3).map(|seed| {
        let mut request = request(&whole, seed);
        request.sampling.temperature = Some(1.0);
        request.sampling.seed = Some(seed);
        request
    });
    let legs = [&first, &second];
    ensure_as_one(&whole, legs, Choice::Seeded, requests, "with a seed ").await
}

async fn ended_holds_nothing(trial: Trial) -> CheckResult {
    let live = trial.start_as(Role::Prefill).await?;
    let before = live.kv_used();
    let mut limited = request(&live, 0);
    limited.stop.max_tokens = Some(1);
    let begun = live.answer(limited).await?;
    let mut stopped = request(&live, 0);
    stopped.stop.stop_token_ids = begun.tokens().into();
    let ended = live.answer(stopped).await?;
    ensure!(
        begun.tokens().len() == 1 && ended.tokens().is_empty(),
        "an answer of one token gave {:?}, and with that token as its stop {:?}",
        begun.tokens(),
        ended.tokens()
    );
    for answer in [begun, ended] {
        let transfer = answer.finished().map(|finished| &finished.transfer);
        ensure!(
            matches!(transfer, Some(None)),
            "an answer that ends with its first token ended as {:?}",
            answer.items.last()
        );
    }
    if let Some(before) = before {
        let watched = Watched { live, before };
        watched.is_free("after the answer").await?;
    }
    Ok(())
}
