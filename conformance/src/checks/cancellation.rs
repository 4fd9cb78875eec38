//! CN: cancellation.
//!
//! These checks cancel a request through its context and then call `abort` as a hint, as a Worker does. The catalogue's "stop,
//! then kill" does not apply: the contract has one way to cancel, with a reason, and the first reason stays. CN07 cancels twice
//! with two reasons instead.

mod leaving;
mod neighbours;
mod race;
mod release;
mod soak;

use genset_backend_common::{CancelReason, ErrorKind};
use tokio::time::timeout;

use super::pressure::{
    Begun, end_of_cancelled, ensure_cancelled, ensure_complete, ensure_room_for, long_request,
    request,
};
use super::words::words_of;
use crate::check::{Check, CheckResult, check, ensure, fail};
use crate::trial::Trial;

pub(super) const CHECKS: &[Check] = &[
    check!("CN01", Core, Tokens, "a request cancelled before its first poll ends as cancelled, without a token",
        clause: "LLMEngine::generate, Contract",
        breaks: "a flag read too late: work is begun for clients that have left", before_the_first_poll),
    check!("CN02", Core, Tokens, "a request cancelled mid-stream ends as cancelled, soon",
        clause: "LLMEngine::generate, Contract",
        breaks: "ignored cancels: the slot stays taken and the client is billed on", mid_stream),
    check!("CN03", Core, Tokens, "dropping the stream frees the request's slot and KV blocks, soon",
        clause: "LLMEngine::generate, Contract",
        breaks: "zombies of clients that hung up fill the engine until it serves nobody", release::on_drop),
    check!("CN04", Core, Tokens, "a request cancelled during a long prefill ends soon",
        clause: "LLMEngine::generate, Contract",
        breaks: "an abandoned long prompt blocks the engine until it is read through", during_prefill),
    check!("CN05", Core, Tokens, "a request cancelled while it is queued ends soon and never runs",
        clause: "LLMEngine::generate, Contract",
        breaks: "abandoned requests still wait their turn, and are then computed for nobody", release::while_queued),
    check!("CN06", Core, Tokens, "cancelling a request that has ended does nothing",
        clause: "LLMEngine::abort",
        breaks: "a late cancel hits whichever request has the slot by then", after_the_end),
    check!("CN07", Core, Tokens, "cancelling and aborting twice is the same as once",
        clause: "RequestContext::cancel; LLMEngine::abort",
        breaks: "a hole in the state machine: a second signal crashes the engine or undoes the first", twice),
    check!("CN08", Core, Tokens, "cancelling or aborting one request, or an unknown one, leaves others alone",
        clause: "LLMEngine::abort",
        breaks: "the wrong victim: one client's hang-up ends another's answer", neighbours::untouched),
    check!("CN09", Core, Tokens, "others' tokens are the same with and without a neighbour's cancel",
        clause: "LLMEngine::generate, Contract",
        breaks: "a batch that is repacked wrongly corrupts the answers that go on", neighbours::unchanged),
    check!("CN10", Core, Tokens, "computing stops soon after a cancel or a drop",
        clause: "LLMEngine::generate, Contract",
        breaks: "compute goes on unseen, and the engine is slow for no visible reason", release::computing_stops),
    check!(alone "CN11", Soak, Tokens, "a thousand abandoned requests leave nothing behind and slow nothing down",
        clause: "LLMEngine::generate, Contract",
        breaks: "the engine stalls or leaks after some hundred aborts", soak::thousand_cycles),
    check!("CN12", Strict, Tokens, "a cancel that races the end gives exactly one terminal item",
        clause: "LLMEngine::generate, Contract",
        breaks: "clients hang or see two endings when they hang up at the last token", race::with_the_terminal),
    check!("CN13", Strict, Tokens, "dropping the future of generate frees what it reserved",
        clause: "LLMEngine::generate, Cancel safety",
        breaks: "reservations of clients that left during admission are lost for good", release::on_dropped_future),
    check!("CN14", Core, Tokens, "a request ends as cancelled, soon, whatever it was cancelled for",
        clause: "LLMEngine::generate, Contract",
        breaks: "deadlines and shutdowns that an engine does not hear, because no client pressed stop", leaving::for_every_reason),
    check!("CN15", Core, Tokens, "a stream that is dropped during prefill gives its slot back",
        clause: "LLMEngine::generate, Contract",
        breaks: "clients that give up on long prompts take the engine's slots with them", leaving::during_prefill),
    check!("CN16", Core, Tokens, "an abort before start, of an unknown request, or after cleanup is harmless",
        clause: "LLMEngine::abort",
        breaks: "a client that hangs up while a worker starts or stops crashes it", leaving::aborts_at_any_time),
];

async fn before_the_first_poll(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let accepted = live.generate(long_request(&live, 1)).await?;
    accepted.ctx.cancel(CancelReason::Client);
    let mut answers = vec![end_of_cancelled(&live, accepted).await?];

    let late = long_request(&live, 2);
    let ctx = live.context(&late);
    ctx.cancel(CancelReason::Client);
    match live.try_generate(late, ctx).await? {
        Ok(running) => answers.push(end_of_cancelled(&live, running).await?),
        // A request that is refused for being cancelled has ended as cancelled, too.
        Err(error) if error.kind() == ErrorKind::Cancelled => {}
        Err(error) => fail!(
            "a cancelled request was refused as {}: {error}",
            error.kind()
        ),
    }
    for answer in answers {
        ensure_cancelled(&answer)?;
        let count = answer.generated().len();
        ensure!(
            count == 0,
            "{count} tokens came after the cancel, which came first"
        );
    }
    Ok(())
}

async fn mid_stream(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for reason in [CancelReason::Client, CancelReason::Shutdown] {
        let mut running = live.generate(long_request(&live, 1)).await?;
        running.read_tokens(2).await?;
        running.ctx.cancel(reason);
        live.abort(&running.ctx).await?;
        ensure_cancelled(&end_of_cancelled(&live, running).await?)?;
    }
    Ok(())
}

/// Long enough to keep an engine busy for a while, short enough to build.
const LONG_PROMPT: u32 = 8192;

async fn during_prefill(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let prompt_len = (live.config.context_length_tokens / 2).clamp(1, LONG_PROMPT);
    let prompt_len = words_of(&live, prompt_len).await?;
    let mut running = live.generate(request(&live, prompt_len, 1, 64)).await?;
    // The prefill has begun. An engine that has finished it already needs no interruption.
    let moment = trial.limits().cancel / 20;
    if let Ok(first) = timeout(moment, running.next()).await {
        ensure!(
            matches!(first?, Some(Ok(_))),
            "a long prompt was not answered"
        );
    }
    running.ctx.cancel(CancelReason::Client);
    live.abort(&running.ctx).await?;
    end_of_cancelled(&live, running).await?;
    Ok(())
}

async fn after_the_end(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    ensure_room_for(&live, 2)?;
    let beside = Begun::new(&live, request(&live, 4, 1, 12)).await?;

    let mut ended = live.generate(request(&live, 4, 2, 2)).await?;
    while ended.next().await?.is_some() {}
    let after = live.generate(request(&live, 4, 3, 6)).await?;
    ended.ctx.cancel(CancelReason::Client);
    live.abort(&ended.ctx).await?;
    let more = ended.next().await?;
    ensure!(more.is_none(), "the ended stream went on with {more:?}");

    ensure_complete(&after.finish().await?, 6, "the answer to the next request")?;
    ensure_complete(&beside.finish().await?, 12, "the answer beside")?;
    Ok(())
}

async fn twice(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut running = live.generate(long_request(&live, 1)).await?;
    running.read_tokens(1).await?;
    let ctx = running.ctx.clone();
    for reason in [CancelReason::Client, CancelReason::Shutdown] {
        ctx.cancel(reason);
        live.abort(&ctx).await?;
    }
    let answer = end_of_cancelled(&live, running).await?;
    ensure_cancelled(&answer)?;
    ensure!(
        answer.violation.is_none(),
        "the stream broke a rule: {:?}",
        answer.violation
    );
    ctx.cancel(CancelReason::Client);
    live.abort(&ctx).await?;
    let next = live.answer(request(&live, 4, 2, 4)).await?;
    ensure_complete(&next, 4, "the answer to the next request")
}
