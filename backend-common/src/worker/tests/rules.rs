//! The rules of a stream: a raw stream breaks each one; the metrics name it, and the client sees a repaired stream.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};

use super::fakes::Act::Hang;
use super::fakes::Call::Generate;
use super::fakes::{PROMPT_TOKENS, VOCAB_SIZE, World};
use super::fakes::{
    config, one_token_then_silence, raw, raw_items, served, serving, stalling, stop_cleanly,
};
use super::transcript::{End, Transcript, read};
use crate::config::{Capabilities, EngineConfig, InputKind};
use crate::context::RequestContext;
use crate::error::{EngineError, ErrorKind};
use crate::output::{
    Finish, FinishReason, Output, OutputStream, TextChunk, TokenChunk, TokenLogprob, Violation,
};
use crate::request::{GenerateRequest, Input, ScorePair, TokenId};

type Item = Result<Output, EngineError>;

fn token(token: TokenId) -> Item {
    Ok(Output::from(token))
}

fn tokens(tokens: &[TokenId]) -> Item {
    Ok(Output::Tokens(tokens.iter().copied().collect()))
}

fn finished(finish: Finish, prompt_tokens: u32, streamed_tokens: u32) -> Item {
    let finished = finish.into_finished(prompt_tokens, streamed_tokens);
    Ok(Output::Finished(Box::new(finished)))
}

/// Returns the end of a request that streamed `streamed` tokens.
fn stop(streamed: u32) -> Item {
    finished(Finish::stop(), PROMPT_TOKENS, streamed)
}

fn stopped(tokens: &[TokenId]) -> Transcript {
    Transcript::finished(FinishReason::Stop, PROMPT_TOKENS, tokens)
}

fn violations(world: &World) -> Vec<(Violation, u64)> {
    let count = |rule: &Violation| {
        let name = format!("genset_worker_contract_violations_total{{rule=\"{rule}\"}}");
        world.metric(&name)
    };
    let counts = Violation::ALL.iter().map(|rule| (*rule, count(rule)));
    counts.filter(|(_, count)| *count > 0).collect()
}

/// A rule, the items that break it, and what the client sees.
struct Broken {
    rule: Violation,
    items: fn() -> Vec<Item>,
    seen: Transcript,
}

fn broken_streams() -> Vec<Broken> {
    use ErrorKind::{Internal, StreamIncomplete};
    let broken = |rule, seen, items| Broken { rule, items, seen };
    let failed = |kind| Transcript::failed(kind, &[1]);
    vec![
        broken(
            Violation::EndedWithoutTerminal,
            failed(StreamIncomplete),
            || vec![token(1)],
        ),
        broken(Violation::ItemAfterTerminal, stopped(&[1]), || {
            vec![token(1), stop(1), token(2)]
        }),
        broken(Violation::ItemAfterTerminal, stopped(&[1]), || {
            vec![token(1), stop(1), stop(1)]
        }),
        broken(
            Violation::CompletionTokensMismatch,
            stopped(&[1, 2]),
            || vec![token(1), token(2), stop(7)],
        ),
        broken(Violation::PromptTokensMismatch, stopped(&[1]), || {
            vec![token(1), finished(Finish::stop(), PROMPT_TOKENS + 1, 1)]
        }),
        broken(Violation::TokenOutOfRange, failed(Internal), || {
            vec![token(1), tokens(&[2, VOCAB_SIZE]), stop(3)]
        }),
        broken(Violation::TokenOutOfRange, failed(Internal), || {
            let finish = Finish::stop().with_last(u32::MAX);
            vec![token(1), finished(finish, PROMPT_TOKENS, 1)]
        }),
        broken(Violation::TooManyTokens, stopped(&[1, 2, 3, 4]), || {
            vec![tokens(&[1, 2, 3]), tokens(&[4, 5]), stop(5)]
        }),
        broken(Violation::TooManyTokens, stopped(&[1, 2, 3, 4]), || {
            let finish = Finish::stop().with_last(5);
            vec![tokens(&[1, 2, 3, 4]), finished(finish, PROMPT_TOKENS, 4)]
        }),
        broken(Violation::EmptyChunk, stopped(&[1, 2]), || {
            vec![token(1), tokens(&[]), token(2), stop(2)]
        }),
        broken(Violation::FalseCancel, failed(Internal), || {
            vec![token(1), finished(Finish::cancelled(), PROMPT_TOKENS, 1)]
        }),
        broken(Violation::WrongOutputKind, stopped(&[1]), || {
            let embeddings = Ok(Output::Embeddings(vec![vec![1.0]]));
            vec![token(1), embeddings, stop(1)]
        }),
        broken(Violation::WrongOutputKind, stopped(&[1]), || {
            let text = TextChunk {
                text: "two".into(),
                token_count: 1,
            };
            vec![token(1), Ok(Output::Text(text)), stop(1)]
        }),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_broken_stream_is_mended_and_its_rule_counted() {
    for Broken { rule, items, seen } in broken_streams() {
        let (world, handle) = served(config()).await;
        world.answer_with(move |_, _| Ok(raw_items(items())));
        let outputs = world.send("r").await.unwrap();
        assert_eq!(read(outputs).await, seen, "{rule}");
        assert_eq!(violations(&world), [(rule, 1)]);
        stop_cleanly(&handle).await;
    }
}

/// The table above and the panics below cover every rule; a new rule needs a row.
#[test]
fn every_rule_is_broken_somewhere() {
    let mut broken: Vec<_> = broken_streams().iter().map(|row| row.rule).collect();
    broken.push(Violation::Panic);
    for rule in Violation::ALL {
        assert!(broken.contains(&rule), "{rule}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_legal_stream_breaks_no_rule() {
    let (world, handle) = served(config()).await;
    world.answer_with(|_, _| {
        let finish = Finish::stop().with_last(4).with_cached_tokens(1);
        Ok(raw_items([
            tokens(&[1, 2]),
            token(3),
            finished(finish, PROMPT_TOKENS, 3),
        ]))
    });
    let outputs = world.send("r").await.unwrap();
    assert_eq!(read(outputs).await, stopped(&[1, 2, 3, 4]));
    assert_eq!(violations(&world), []);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn log_probabilities_are_cut_with_their_tokens() {
    let (world, handle) = served(config()).await;
    world.answer_with(|_, _| {
        let logprob = TokenLogprob {
            logprob: -1.0,
            top: Vec::new(),
        };
        let chunk = TokenChunk {
            token_ids: [1, 2, 3, 4, 5, 6].into_iter().collect(),
            logprobs: vec![logprob; 6],
        };
        Ok(raw_items([Ok(Output::Tokens(chunk)), stop(6)]))
    });
    let mut outputs = world.send("r").await.unwrap();
    let Some(Ok(Output::Tokens(chunk))) = outputs.next().await else {
        panic!("the tokens come first")
    };
    assert_eq!((chunk.len(), chunk.logprobs.len()), (4, 4));
    drop(outputs);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_an_error_of_its_request_only() {
    let (world, handle) = stalling(config()).await;
    let mut other = world.send("other").await.unwrap();

    world.answer_with(|_, _| panic!("in generate"));
    let refused = world.send("r1").await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert_eq!(error.details().request_id.as_deref(), Some("r1"));
    assert!(!error.message().contains("in generate"), "not the client's");
    assert_eq!(violations(&world), [(Violation::Panic, 1)]);

    world.answer_with(|_, _| {
        let panics = stream::once(async { panic!("in poll") });
        Ok(raw(stream::iter([token(1)]).chain(panics)))
    });
    let outputs = world.send("r2").await.unwrap();
    assert_eq!(
        read(outputs).await,
        Transcript::failed(ErrorKind::Internal, &[1])
    );
    assert_eq!(violations(&world), [(Violation::Panic, 2)]);

    assert_eq!(other.next().await.unwrap().unwrap(), Output::from(0));
    drop(other);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_after_the_terminal_is_counted_and_not_seen() {
    let (world, handle) = served(config()).await;
    world.answer_with(|_, _| {
        let panics = stream::once(async { panic!("after the terminal") });
        Ok(raw(stream::iter([token(1), stop(1)]).chain(panics)))
    });
    let outputs = world.send("r").await.unwrap();
    assert_eq!(read(outputs).await, stopped(&[1]));
    assert_eq!(violations(&world), [(Violation::Panic, 1)]);
    stop_cleanly(&handle).await;
}

/// Held by an engine's stream; its drop panics.
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic!("in drop");
    }
}

/// Streams a token and `rest`, then stalls.
fn panics_on_drop(rest: Vec<Item>) -> OutputStream {
    let held = PanicsOnDrop;
    let items = stream::iter([token(1)].into_iter().chain(rest)).chain(stream::pending());
    raw(items.inspect(move |_| {
        let _held = &held;
    }))
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_stream_that_is_dropped_is_counted_and_not_seen() {
    let (world, handle) = served(config()).await;
    world.answer_with(|_, _| Ok(panics_on_drop(vec![stop(1)])));
    let outputs = world.send("read").await.unwrap();
    assert_eq!(read(outputs).await, stopped(&[1]));
    assert_eq!(violations(&world), [(Violation::Panic, 1)]);

    let mut outputs = world.send("at its terminal").await.unwrap();
    outputs.next().await.unwrap().unwrap();
    outputs.next().await.unwrap().unwrap();
    drop(outputs);
    assert_eq!(violations(&world), [(Violation::Panic, 2)]);

    world.answer_with(|_, _| Ok(panics_on_drop(Vec::new())));
    let mut outputs = world.send("left").await.unwrap();
    outputs.next().await.unwrap().unwrap();
    drop(outputs);
    assert_eq!(violations(&world), [(Violation::Panic, 3)]);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_tokenizes_counts_the_prompt_itself() {
    let world = World::new();
    world.declare(EngineConfig::new("m", 16).with_capabilities(Capabilities::text()));
    let text = || {
        Ok(Output::Text(TextChunk {
            text: "pong".into(),
            token_count: 1,
        }))
    };
    world.answer_with(move |_, _| Ok(raw_items([text(), finished(Finish::length(), 9, 1)])));
    let handle = serving(&world, config()).await;
    let request = GenerateRequest::from_text("m", "ping");
    let outputs = world.generate(request, RequestContext::new("r"));
    let items: Vec<_> = outputs.await.unwrap().collect().await;
    assert_eq!(items.len(), 2);
    let Some(Ok(Output::Finished(finished))) = items.last() else {
        panic!("a terminal comes last")
    };
    assert_eq!(finished.usage.total_tokens(), 10);
    let prompt_tokens = world.metric("genset_worker_prompt_tokens_total");
    assert_eq!(prompt_tokens, 9 + 9, "the canary's and the request's");
    assert_eq!(violations(&world), []);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn only_embeddings_answer_a_request_to_embed_and_only_scores_one_to_score() {
    let embeddings = Output::Embeddings(vec![vec![1.0, 2.0]]);
    let scores = Output::Scores(vec![1.0]);
    let pair = ScorePair {
        token_ids: vec![1, 2, 3],
        first_tokens: 2,
    };
    let embed = Input::Embed(vec![vec![1], vec![2, 3]].into());
    let score = Input::Score([pair].into());
    one_kind_answers(InputKind::Embed, embed, embeddings.clone(), scores.clone()).await;
    one_kind_answers(InputKind::Score, score, scores, embeddings).await;
}

/// Requests with this kind of input, including the canary, are answered with `right`; other items are dropped and reported.
async fn one_kind_answers(kind: InputKind, input: Input, right: Output, wrong: Output) {
    let world = World::new();
    let capabilities = Capabilities {
        inputs: [kind].into(),
        ..Capabilities::default()
    };
    world.declare(EngineConfig::new("m", 16).with_capabilities(capabilities));
    let good = right.clone();
    world.answer_with(move |_, ctx| {
        let end = finished(Finish::stop(), ctx.prompt_tokens(), 0);
        Ok(raw_items([Ok(good.clone()), end]))
    });
    let handle = serving(&world, config()).await;
    assert_eq!(violations(&world), [], "the canary is of that kind too");

    let good = right.clone();
    world.answer_with(move |_, _| {
        let end = finished(Finish::stop(), 3, 0);
        Ok(raw_items([
            token(1),
            Ok(wrong.clone()),
            Ok(good.clone()),
            end,
        ]))
    });
    let request = GenerateRequest {
        input,
        ..GenerateRequest::from_tokens("m", vec![])
    };
    let outputs = world.generate(request, RequestContext::new("r"));
    let items: Vec<_> = outputs.await.unwrap().collect().await;
    assert_eq!(items[0].as_ref().ok(), Some(&right), "{items:?}");
    assert_eq!(items.len(), 2);
    assert_eq!(violations(&world), [(Violation::WrongOutputKind, 2)]);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_only_sends_nothing_meets_the_requests_limits() {
    let mut config = config();
    config.limits.request_timeout = Some(Duration::from_secs(9));
    let (world, handle) = served(config).await;
    // It is never pending, so only a guard that keeps its clock ends it.
    world.answer_with(|_, _| Ok(raw(stream::repeat_with(|| tokens(&[])).take(10_000))));
    let outputs = world.send("r").await.unwrap();
    let time_passes = tokio::time::advance(Duration::from_secs(10));
    let (seen, ()) = tokio::join!(read(outputs), time_passes);
    assert_eq!(seen.end, End::Failed(ErrorKind::DeadlineExceeded));
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn every_request_is_counted_once_by_how_it_ended() {
    let (world, handle) = served(config()).await;
    let counted = |world: &Arc<World>, outcome: &str| {
        world.metric(&format!(
            "genset_worker_requests_total{{outcome=\"{outcome}\"}}"
        ))
    };
    assert_eq!(counted(&world, "length"), 1, "the canary");

    let send = || world.send("r");
    world.answer_with(|_, _| Err(EngineError::new(ErrorKind::Overloaded, "full")));
    let refused = send().await.unwrap_err();
    assert_eq!(refused.details().request_id.as_deref(), Some("r"));
    world.answer_with(|_, _| Ok(raw_items([])));
    read(send().await.unwrap()).await;
    world.answer_with(|_, ctx| Ok(one_token_then_silence(ctx)));
    drop(send().await.unwrap());
    world.answer_with(|_, _| Ok(raw_items([token(1), stop(1)])));
    read(send().await.unwrap()).await;

    let outcomes = ["overloaded", "stream_incomplete", "dropped", "stop"];
    assert_eq!(outcomes.map(|outcome| counted(&world, outcome)), [1; 4]);
    // A client that leaves before the engine has accepted its request.
    world.plan(Generate, [Hang]);
    assert!(send().now_or_never().is_none());
    assert_eq!(counted(&world, "dropped"), 2);
    let tokens = world.metric("genset_worker_completion_tokens_total");
    assert_eq!(tokens, 1 + 1, "the canary's and the last request's");
    stop_cleanly(&handle).await;
}
