//! FN: limits and finish reasons.
//!
//! A Worker refuses requests that no engine can serve (FN03, FN04, FN08) before the engine receives them. So these checks test
//! the way to the engine: `EngineConfig::check` for an engine in this process, the far side's own checks for an engine that
//! checks itself.

use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, FinishReason, GenerateRequest, Input, RequestContext,
    config::InputKind, request::ChatInput,
};

use super::foretold::Foretold;
use super::words::words_of;
use crate::answer::Answer;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

mod exact;
mod room;

pub(super) const CHECKS: &[Check] = &[
    check!("FN01", Core, Tokens, "max_tokens = N gives N tokens and the reason Length",
        clause: "StopConditions::max_tokens; FinishReason::Length",
        breaks: "clients billed for more than they allowed", max_tokens_is_a_limit),
    check!("FN02", Core, Tokens, "max_tokens = 1 gives one token and a terminal",
        clause: "StopConditions::max_tokens; Role::Prefill: one token",
        breaks: "off-by-one limits; prefill instances, which generate one token", one_token),
    check!("FN03", Core, Tokens, "max_tokens = 0 is refused as InvalidArgument",
        clause: "GenerateRequest::validate",
        breaks: "an accidental zero taken for no limit at all", zero_tokens_are_refused),
    // The contract is more specific than InvalidArgument here: clients shorten their prompts on ContextLengthExceeded.
    check!("FN04", Core, Tokens, "a prompt that leaves no room in the context is refused as ContextLengthExceeded",
        clause: "EngineConfig::check",
        breaks: "prompts cut without a word, answers to half a question", long_prompts_are_refused),
    check!("FN05", Core, Tokens, "prompt and output together never exceed the context",
        clause: "EngineConfig::context_length_tokens; FinishReason::Length",
        breaks: "KV blocks of other requests overwritten, or none left in mid-answer", the_context_is_a_limit),
    check!(tokens "FN06", Core, Tokens, "an end-of-sequence token gives Stop, and with ignore_eos it is a token like any other",
        clause: "StopConditions::eos_token_ids, ignore_eos",
        breaks: "finished answers shown as cut, benchmarks that end early", eos_ends_unless_ignored),
    check!(tokens "FN07", Core, Tokens, "a stop token ends the stream and is not part of the output",
        clause: "StopConditions::stop_token_ids; Finished::stop_token",
        breaks: "answers that run on past their end, stop text shown to users", stop_tokens_end),
    check!("FN08", Core, Tokens, "an empty prompt is refused as InvalidArgument",
        clause: "GenerateRequest::validate",
        breaks: "a division by zero on the first empty message", an_empty_prompt_is_refused),
    check!("FN09", Core, Tokens, "only a cancelled request ends as Cancelled",
        clause: "FinishReason::Cancelled",
        breaks: "answers lost to cancellations that nobody asked for", no_false_cancels),
    check!("FN10", Strict, Tokens, "no stop token ends a sequence before min_tokens",
        clause: "StopConditions::min_tokens",
        breaks: "answers shorter than asked for", min_tokens_hold),
    check!(tokens "FN11", Core, Tokens, "every token of a list of 64 stop tokens ends the stream",
        clause: "StopConditions::stop_token_ids",
        breaks: "answers that run on, for clients with more stop words than the engine has room for", exact::long_stop_lists),
    check!(tokens "FN12", Core, Tokens, "every end-of-sequence token ends the stream, beside stop tokens too, and none of the prompt's does",
        clause: "StopConditions::eos_token_ids",
        breaks: "models with several end tokens that talk on after their turn", exact::both_lists),
    check!(tokens "FN13", Core, Tokens, "a stop token ends the stream at its place: the first, behind 64, behind 256",
        clause: "StopConditions::is_stop",
        breaks: "long answers that run on to their limit", exact::stops_at_every_place),
    check!(tokens "FN14", Strict, Tokens, "min_tokens holds to the token: a stop counts from there on, and not one earlier",
        clause: "StopConditions::min_tokens",
        breaks: "answers a token shorter or longer than asked for", exact::min_tokens_to_the_token),
    check!(tokens "FN15", Core, Tokens, "the context can be used to its last token, and without max_tokens it is",
        clause: "StopConditions::max_tokens",
        breaks: "answers cut by a default that nobody asked for", room::used_to_the_last_token),
    check!(tokens "FN16", Strict, Tokens, "min_tokens keeps no token away but those that would stop the stream",
        clause: "StopConditions::min_tokens",
        breaks: "answers that lack a word for as long as they are too short: a list of tokens to ban that is padded with 0, or another request's", exact::min_tokens_ban_no_other),
];

async fn max_tokens_is_a_limit(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for max_tokens in [2, 7, 16, 33] {
        ends_at_limit(&live.answer(live.request(4, max_tokens)).await?, max_tokens)?;
    }
    Ok(())
}

async fn one_token(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for prompt_len in [1, 9] {
        ends_at_limit(&live.answer(live.request(prompt_len, 1)).await?, 1)?;
    }
    Ok(())
}

fn ends_at_limit(answer: &Answer, max_tokens: u32) -> CheckResult {
    let tokens = answer.generated().len();
    ensure!(
        u32::try_from(tokens) == Ok(max_tokens),
        "max_tokens = {max_tokens} gave {tokens} tokens ({:?})",
        answer.error()
    );
    ends_with(answer, FinishReason::Length)
}

fn ends_with(answer: &Answer, reason: FinishReason) -> CheckResult {
    ensure!(
        answer.reason() == Some(reason),
        "the reason should be {reason:?}, but is {:?} ({:?})",
        answer.reason(),
        answer.error()
    );
    Ok(())
}

async fn zero_tokens_are_refused(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    is_refused(&live, live.request(4, 0), ErrorKind::InvalidArgument).await
}

/// The longest prompt that the kit makes: 16 MiB of token ids.
const LONGEST_PROMPT_TOKENS: u32 = 1 << 22;

async fn long_prompts_are_refused(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let context = live.config.context_length_tokens;
    if context >= LONGEST_PROMPT_TOKENS {
        skip!(
            Level,
            "no prompt is longer than a context of {context} tokens"
        );
    }
    let context = usize::try_from(context).unwrap_or(usize::MAX);
    for prompt_len in [context, context.saturating_add(1)] {
        let request = live.request(prompt_len, 4);
        is_refused(&live, request, ErrorKind::ContextLengthExceeded).await?;
    }
    Ok(())
}

async fn an_empty_prompt_is_refused(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    if live.medium().is_tokens() {
        return is_refused(&live, live.request(0, 4), ErrorKind::InvalidArgument).await;
    }
    let takes_chat = live.config.capabilities.inputs.contains(&InputKind::Chat);
    if takes_chat {
        let mut request = live.request(1, 4);
        request.input = Input::Chat(ChatInput::default().into());
        is_refused(&live, request, ErrorKind::InvalidArgument).await?;
    }
    an_empty_text_is_no_trouble(&live).await
}

/// A chat template may add tokens to an empty text, so the engine may answer it; otherwise it is the sender's mistake.
async fn an_empty_text_is_no_trouble(live: &Live) -> CheckResult {
    let request = live.request(0, 4);
    let ctx = live.context(&request);
    match live.outcome(request, ctx).await?.error() {
        None => Ok(()),
        Some(error) if error.kind() == ErrorKind::InvalidArgument => Ok(()),
        Some(error) => fail!("an empty text fails with {}: {error}", error.kind()),
    }
}

async fn is_refused(live: &Live, request: GenerateRequest, kind: ErrorKind) -> CheckResult {
    let refusal = live.refusal(request).await?;
    ensure!(
        refusal.kind() == kind,
        "the refusal should be {kind}, but is {} ({refusal})",
        refusal.kind()
    );
    Ok(())
}

/// The longest context to fill in real time: a few seconds of prefill on a slow CPU.
const REAL_TIME_CONTEXT_TOKENS: u32 = 2048;

/// The length of the context, in tokens. Skips a check that fills it if that takes too long.
fn context_to_fill(live: &Live) -> Result<u32, Stop> {
    let context = live.config.context_length_tokens;
    let longest = match live.trial.keeps_virtual_time() {
        true => LONGEST_PROMPT_TOKENS,
        false => REAL_TIME_CONTEXT_TOKENS,
    };
    if context > longest {
        skip!(
            Level,
            "it takes too long to fill a context of {context} tokens"
        );
    }
    Ok(context)
}

/// The number of tokens that the prompt leaves free in the context.
const ROOM_TOKENS: u32 = 5;

async fn the_context_is_a_limit(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let context = context_to_fill(&live)?;
    let mut is_tried = false;
    let mut room = ROOM_TOKENS.min(context.saturating_sub(1));
    let prompt_len = words_of(&live, context - room).await?;
    for is_limited in [false, true] {
        let mut request = live.request(prompt_len, 1);
        request.stop.max_tokens = is_limited.then_some(room.saturating_add(11));
        let max_tokens = request.stop.max_tokens;
        let ctx = live.context(&request);
        let answer = match live.try_generate(request, ctx).await? {
            Ok(running) => running.finish_within(trial.limits().start).await?,
            Err(error) if is_too_long(&live, &error) => break,
            Err(error) => fail!("a prompt that fits was refused: {error} ({})", error.kind()),
        };
        if answer
            .error()
            .is_some_and(|error| is_too_long(&live, error))
        {
            break;
        }
        // Only the engine knows the number of tokens of a text.
        let counted = answer.usage().map(|usage| usage.prompt_tokens);
        if let Some(counted) = counted.filter(|_| !live.medium().is_tokens()) {
            room = room.max(context.saturating_sub(counted));
        }
        let tokens = answer.generated().len();
        ensure!(
            tokens > 0 && u32::try_from(tokens).is_ok_and(|tokens| tokens <= room),
            "a prompt that leaves room for {room} tokens got {tokens} with max_tokens = {max_tokens:?}"
        );
        ends_with(&answer, FinishReason::Length)?;
        is_tried = true;
    }
    if !is_tried {
        skip!(
            NeedsTokens,
            "a text of {prompt_len} words is more tokens than the context holds"
        );
    }
    Ok(())
}

/// The kit knows only the words of a text, each of which may be several tokens.
fn is_too_long(live: &Live, error: &EngineError) -> bool {
    !live.medium().is_tokens() && error.kind() == ErrorKind::ContextLengthExceeded
}

async fn eos_ends_unless_ignored(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let foretold = Foretold::ask(&live, 2).await?;
    let mut ignoring = foretold.ending();
    let ended = live.answer(foretold.ending()).await?;
    foretold.expect_met(&ended)?;
    ends_before(&foretold, &ended)?;

    ignoring.stop.ignore_eos = true;
    let max_tokens = ignoring.stop.max_tokens.unwrap_or(0);
    ends_at_limit(&live.answer(ignoring).await?, max_tokens)
}

async fn stop_tokens_end(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let foretold = Foretold::ask(&live, 2).await?;
    let stopped = live.answer(foretold.stopping()).await?;
    foretold.expect_met(&stopped)?;
    ends_before(&foretold, &stopped)
}

/// The answer must stop at the foretold token, which only the terminal names.
fn ends_before(foretold: &Foretold, answer: &Answer) -> CheckResult {
    let (tokens, token) = (answer.tokens(), foretold.token);
    ends_with(answer, FinishReason::Stop)?;
    ensure!(
        !tokens.contains(&token),
        "the token that stops, {token}, is part of the output"
    );
    let named = answer.finished().and_then(|finished| finished.stop_token);
    // If the answer took another path, another stop token may have come first.
    let is_known = tokens == foretold.before() || named.is_none();
    ensure!(
        named == Some(token) || !is_known,
        "the terminal should name {token} as the token that stopped it, but names {named:?}"
    );
    ensure!(
        tokens.len() <= foretold.before().len() || !tokens.starts_with(foretold.before()),
        "the stream went on to {} tokens, past the token that stops after {}",
        tokens.len(),
        foretold.place
    );
    Ok(())
}

async fn no_false_cancels(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    // Cancelled, with a Worker's abort hint.
    let first = live.context(&live.request(4, 64));
    let mut cancelled = live.begin(live.request(4, 64), first.clone()).await?;
    let mut beside = None;
    if live.at_once(2) == 2 {
        beside = Some(live.generate(live.request(4, 64)).await?);
    }
    cancelled.read_tokens(1).await?;
    if let Some(beside) = &mut beside {
        beside.read_tokens(1).await?;
    }
    first.cancel(CancelReason::Client);
    cancelled.finish().await?;
    live.abort(&first).await?;
    if let Some(beside) = beside {
        not_cancelled("a request beside a cancelled one", &beside.finish().await?)?;
    }

    // Ids are unique only in flight: a client may send the request again.
    let again = RequestContext::new(first.id()).with_prompt_tokens(first.prompt_tokens());
    let again = live.begin(live.request(4, 8), again).await?;
    let again = again.finish().await?;
    not_cancelled("a request with the id of one cancelled before", &again)?;

    let mut stalled = live.generate(live.request(4, 64)).await?;
    stalled.read_tokens(1).await?;
    tokio::time::sleep(trial.limits().cancel).await;
    not_cancelled("a request whose reader stalled", &stalled.finish().await?)
}

fn not_cancelled(what: &str, answer: &Answer) -> CheckResult {
    let is_cancelled = answer.reason() == Some(FinishReason::Cancelled)
        || answer
            .error()
            .is_some_and(|error| error.kind() == ErrorKind::Cancelled);
    ensure!(!is_cancelled, "{what} ended as cancelled");
    Ok(())
}

async fn min_tokens_hold(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_min_tokens()?;
    min_tokens_outlast_the_end(&live).await?;
    if !live.medium().is_tokens() {
        return Ok(());
    }
    let foretold = Foretold::ask(&live, 1).await?;
    for mut request in [foretold.stopping(), foretold.ending()] {
        let min_tokens = foretold.place + 2;
        request.stop.min_tokens = min_tokens;
        request.stop.max_tokens = Some(min_tokens + 4);
        let tokens = live.answer(request).await?.tokens().len();
        ensure!(
            u32::try_from(tokens).is_ok_and(|tokens| tokens >= min_tokens),
            "min_tokens = {min_tokens} gave {tokens} tokens"
        );
    }
    Ok(())
}

/// The maximum length of an answer whose own end is awaited.
const OWN_END_TOKENS: u32 = 256;

/// A minimum length beyond the end of many short answers.
const SHORT_ANSWER_TOKENS: u32 = 64;

/// An engine may have its own end besides the stop tokens: at a length, or where a shorter answer ended.
async fn min_tokens_outlast_the_end(live: &Live) -> CheckResult {
    at_least(live, SHORT_ANSWER_TOKENS).await?;
    let most = live.affordable_answer(4, OWN_END_TOKENS);
    let mut request = live.greedy(live.prompt(4, 0), most);
    request.stop.ignore_eos = false;
    let answer = live.answer(request).await?;
    if answer.reason() != Some(FinishReason::Stop) {
        return Ok(());
    }
    let own_end = u32::try_from(answer.generated().len()).unwrap_or(0);
    at_least(live, own_end + 2).await
}

/// Requests an answer of at least `min_tokens`, or of as many as there is room for.
async fn at_least(live: &Live, min_tokens: u32) -> CheckResult {
    let max_tokens = live.affordable_answer(4, min_tokens + 4);
    let min_tokens = min_tokens.min(max_tokens);
    let mut request = live.greedy(live.prompt(4, 0), max_tokens);
    request.stop.ignore_eos = false;
    request.stop.min_tokens = min_tokens;
    let answer = live.answer(request).await?;
    // A server behind a URL reports only now that it does not know the option.
    if answer
        .error()
        .is_some_and(|error| error.kind() == ErrorKind::Unsupported)
    {
        skip!(NotDeclared, "the server does not take min_tokens");
    }
    let tokens = answer.generated().len();
    ensure!(
        u32::try_from(tokens).is_ok_and(|tokens| tokens >= min_tokens),
        "min_tokens = {min_tokens} gave {tokens} tokens where nothing but the engine's own end could stop it"
    );
    Ok(())
}
