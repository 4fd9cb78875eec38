//! ST: the shape of a stream.
//!
//! The kit reads streams as all callers do, through `OutputStream`, which keeps the terminal in order and reports violations.
//! So ST02, ST03 and ST04 look at the report, each for another way in which a sequence ends.

use genset_backend_common::output::{Output, Violation};
use genset_backend_common::{CancelReason, EngineError, GenerateRequest};

use super::foretold::Foretold;
use crate::answer::{Answer, Generated};
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::running::Running;
use crate::trial::{Live, Trial};

mod timing;

pub(super) const CHECKS: &[Check] = &[
    check!("ST01", Core, Tokens, "every accepted request gets an item that is not an error",
        clause: "LLMEngine::generate, Contract",
        breaks: "silent empty answers", at_least_one_item),
    check!("ST02", Core, Tokens, "a sequence that could end in two ways has one terminal item",
        clause: "LLMEngine::generate, Contract: exactly one terminal item",
        breaks: "duplicate finish chunks, which break client SDKs", exactly_one_terminal),
    check!("ST03", Core, Tokens, "nothing follows the terminal item, and an ended stream stays ended",
        clause: "LLMEngine::generate, Contract",
        breaks: "tokens after [DONE], which break client SDKs", nothing_after_terminal),
    check!("ST04", Core, Tokens, "no stream ends without a terminal item, however it ends",
        clause: "LLMEngine::generate, Contract: exactly one terminal item",
        breaks: "clients that wait for ever, and cut answers taken for whole ones", never_without_terminal),
    // A good engine cannot be made to fail on demand, so the check cleans it up during its requests. If that causes no error,
    // the terminal item must still be the last.
    check!("ST05", Core, Tokens, "an error is the last item of its stream",
        clause: "LLMEngine::generate, Contract: nothing after the terminal item",
        breaks: "tokens after an error, billed and shown", an_error_is_terminal),
    check!(tokens "ST06", Core, Tokens, "token ids are below the vocabulary size",
        clause: "EngineConfig::vocab_size",
        breaks: "panics in the detokenizer", token_ids_in_range),
    // One request is one sequence: the frontend splits a client's n into n requests, so there is no choice index to check. What
    // remains of the promise is that those requests, which differ only in their ids, stay separate.
    check!("ST07", Core, Tokens, "the sequences of one client's request are streams of their own, each with its terminal",
        clause: "GenerateRequest: one request is one sequence; RequestContext::sibling",
        breaks: "mixed choices when a client asks for n > 1", siblings_stay_apart),
    check!("ST08", Core, Tokens, "a slow reader loses nothing, in order and once",
        clause: "output::stream, output::channel: a writer waits for its reader",
        breaks: "holes in the answers of slow clients", a_slow_reader_loses_nothing),
    check!("ST09", Strict, Tokens, "a reader that has stalled stops the engine from running ahead for ever",
        clause: "output::channel: room for 64 items",
        breaks: "memory that grows with every stalled client", timing::a_stalled_reader_bounds_memory),
    check!("ST10", Strict, Tokens, "an item that is not terminal carries at least one token",
        clause: "Output::Tokens: at least one",
        breaks: "floods of empty events to the client", no_empty_items),
    check!("ST11", Strict, Tokens, "a stream may be read on one thread and read and dropped on another",
        clause: "RawOutputStream: Send",
        breaks: "crashes as soon as the async runtime moves a task: thread-local state, interpreter locks",
        streams_move_between_threads),
    check!("ST12", Strict, Tokens, "the first item comes as soon as there is a token",
        clause: "Output::Tokens: tokens that became ready together",
        breaks: "every answer starts late by the time of an output batch", timing::the_first_item_is_not_held_back),
];

/// Long enough to fill a buffer of the usual size.
const LONG_ANSWER_TOKENS: u32 = 100;

async fn at_least_one_item(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for prompt_len in [1, 4, 40] {
        let answer = live.answer(live.request(prompt_len, 4)).await?;
        // An empty stream receives an error as its end, so an error alone counts as nothing.
        ensure!(
            answer.items.iter().any(Result::is_ok),
            "a prompt of {prompt_len} tokens was answered by nothing but {:?}",
            answer.error()
        );
    }
    Ok(())
}

async fn exactly_one_terminal(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    if live.medium().is_tokens() {
        let foretold = Foretold::ask(&live, 2).await?;
        // The stop token comes where max_tokens would end the sequence, too.
        let mut both = foretold.stopping();
        both.stop.max_tokens = Some(foretold.place + 1);
        one_terminal(
            "a stop token as the last token allowed",
            &live.answer(both).await?,
        )?;
    }
    one_terminal("a cancelled request", &cancelled_answer(&live).await?)
}

fn one_terminal(what: &str, answer: &Answer) -> CheckResult {
    ensure!(
        answer.violation != Some(Violation::ItemAfterTerminal),
        "{what} ended twice: an item followed the terminal one"
    );
    let terminals = answer.items.iter().filter(|item| is_terminal(item)).count();
    ensure!(terminals == 1, "{what} had {terminals} terminal items");
    Ok(())
}

fn is_terminal(item: &Result<Output, EngineError>) -> bool {
    match item {
        Ok(output) => output.is_terminal(),
        Err(_) => true,
    }
}

/// The rest of an answer after its request was cancelled.
async fn cancelled_answer(live: &Live) -> Result<Answer, Stop> {
    let mut running = live.generate(live.request(4, LONG_ANSWER_TOKENS)).await?;
    running.read_tokens(1).await?;
    running.ctx.cancel(CancelReason::Client);
    running.finish().await
}

async fn nothing_after_terminal(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let answer = live.answer(live.request(4, 4)).await?;
    ensure!(
        answer.violation != Some(Violation::ItemAfterTerminal),
        "an item followed the terminal one"
    );
    ensure!(answer.is_fused, "the stream went on after its end");
    Ok(())
}

async fn never_without_terminal(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut stopping = live.request(4, LONG_ANSWER_TOKENS);
    stopping.stop.ignore_eos = false;
    if live.medium().is_tokens() {
        stopping = Foretold::ask(&live, 2).await?.stopping();
    }
    let answers = [
        ("a short answer", live.answer(live.request(4, 1)).await?),
        (
            "a long answer",
            live.answer(live.request(4, LONG_ANSWER_TOKENS)).await?,
        ),
        ("an answer that may stop", live.answer(stopping).await?),
        ("a cancelled request", cancelled_answer(&live).await?),
    ];
    for (what, answer) in answers {
        ensure!(
            answer.violation != Some(Violation::EndedWithoutTerminal),
            "{what} ended without a terminal item"
        );
    }
    Ok(())
}

async fn an_error_is_terminal(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut running = live.generate(live.request(4, LONG_ANSWER_TOKENS)).await?;
    running.read_tokens(1).await?;
    // SH judges the cleanup itself; here it only provokes an error.
    let _ = trial
        .cleaning("cleanup", live.subject.engine.cleanup())
        .await?;
    let answer = running.finish().await?;
    ensure!(
        answer.violation != Some(Violation::ItemAfterTerminal),
        "an item followed the end: {:?}",
        answer.items.last()
    );
    Ok(())
}

async fn token_ids_in_range(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let Some(vocab_size) = live.config.vocab_size.map(std::num::NonZeroU32::get) else {
        skip!(
            NotDeclared,
            "the engine does not know its vocabulary's size"
        );
    };
    // Off-by-one errors show at the ends of the vocabulary.
    for last in [0, vocab_size - 1] {
        let mut prompt = live.prompt(3, 1);
        prompt.push(last);
        let tokens = live.answer(live.greedy(prompt, 32)).await?.tokens();
        ensure!(!tokens.is_empty(), "no token was generated");
        if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
            fail!("token id {token} was generated, but the vocabulary has {vocab_size}");
        }
    }
    Ok(())
}

async fn siblings_stay_apart(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    // They differ only in their lengths, so that a swapped ending shows.
    let lengths = [5, 9, 13];
    let parent = live.context(&live.request(4, 1));
    let mut siblings = Vec::new();
    let lengths = lengths.into_iter().take(live.at_once(3));
    for (index, max_tokens) in lengths.clone().enumerate() {
        let request = live.request(4, max_tokens);
        siblings.push(live.begin(request, parent.sibling(index)).await?);
    }
    let answers = futures_util::future::join_all(siblings.into_iter().map(Running::finish)).await;
    for (index, (answer, max_tokens)) in answers.into_iter().zip(lengths).enumerate() {
        let answer = answer?;
        ensure!(
            answer.finished().is_some(),
            "sequence {index} has no terminal of its own: {:?}",
            answer.error()
        );
        let tokens = answer.generated().len();
        ensure!(
            u32::try_from(tokens) == Ok(max_tokens),
            "sequence {index} should have {max_tokens} tokens, but has {tokens}"
        );
    }
    Ok(())
}

async fn a_slow_reader_loses_nothing(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let request = live.greedy(live.prompt(4, 0), LONG_ANSWER_TOKENS);
    let swift = live.answer(request.clone()).await?.generated();
    let slow = read_slowly(&live, request.clone()).await?;
    ensure!(
        slow.len() == swift.len(),
        "a swift reader got {} tokens, a slow one {}",
        swift.len(),
        slow.len()
    );
    // An engine whose answers vary proves nothing here; DT01 judges it.
    if slow != swift && live.answer(request).await?.generated() == swift {
        let place = slow
            .units()
            .iter()
            .zip(swift.units())
            .position(|(slow, swift)| slow != swift);
        fail!("a slow reader got other tokens than a swift one, from place {place:?} on");
    }
    Ok(())
}

/// Reads an answer with a pause after its first tokens, long enough for the engine to catch up with its reader.
async fn read_slowly(live: &Live, request: GenerateRequest) -> Result<Generated, Stop> {
    let mut running = live.generate(request).await?;
    let mut tokens = running.read_tokens(2).await?;
    tokio::time::sleep(live.trial.limits().cancel).await;
    tokens.extend(&running.finish().await?.generated());
    Ok(tokens)
}

async fn no_empty_items(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let answer = live.answer(live.request(4, 16)).await?;
    ensure!(!answer.generated().is_empty(), "no token was generated");
    for (place, output) in answer.items.iter().flatten().enumerate() {
        ensure!(
            output.is_terminal() || output.token_count() > 0,
            "item {place} is not terminal and carries no token"
        );
    }
    Ok(())
}

async fn streams_move_between_threads(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let answer_tokens = live.affordable_answer(4, LONG_ANSWER_TOKENS);
    let mut read_there = live.generate(live.request(4, answer_tokens)).await?;
    let mut read = read_there.read_tokens(1).await?.len();
    let elsewhere = tokio::task::spawn_blocking(move || {
        // One poll: another thread must not wait while the clock is paused.
        let item = futures_util::FutureExt::now_or_never(read_there.next());
        (read_there, item)
    });
    let Ok((read_there, item)) = trial.call("a poll on another thread", elsewhere).await? else {
        fail!("the engine panicked when its stream was read on another thread");
    };
    if let Some(Some(Ok(output))) = item.transpose()? {
        read += usize::try_from(output.token_count()).unwrap_or(usize::MAX);
    }
    read += read_there.finish().await?.generated().len();
    ensure!(
        u32::try_from(read) == Ok(answer_tokens),
        "of {answer_tokens} tokens, {read} came when the stream was read on two threads"
    );

    let mut dropped_there = live.generate(live.request(4, answer_tokens)).await?;
    dropped_there.read_tokens(1).await?;
    let elsewhere = tokio::task::spawn_blocking(move || drop(dropped_there));
    let dropped = trial.call("a drop on another thread", elsewhere).await?;
    ensure!(
        dropped.is_ok(),
        "the engine panicked when its stream was dropped on another thread"
    );
    let after = live.answer(live.request(4, 4)).await?;
    ensure!(
        after.generated().len() == 4,
        "the engine no longer answers after that"
    );
    Ok(())
}
