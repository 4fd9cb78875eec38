//! Tokens to events without a server: detokenize, match stop strings, split reasoning and calls, encode.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::BytesMut;
use futures_util::stream;
use genset_backend_common::OutputStream;
use genset_frontend::answer::{Answer, CandidateToken, TokenLogprobs, TotalUsage};
use genset_frontend::markup::{Delta, IdStyle, Splitter};
use genset_frontend::openai::{Api, ChunkEncoder, CompletionHead};
use genset_frontend::reasoning::ReasoningDialect;
use genset_frontend::tools::{ToolDialect, ToolSchemas};
use genset_frontend::{anthropic, responses};
use serde_json::json;

use crate::counting::allocations;
use crate::{STOPS, answer, tokenizer};

/// Tokens of the shortest answer; the others are multiples of it.
const TOKENS: u32 = 500;

/// Writes one piece.
type Write = Box<dyn FnMut(Delta<'_>, &mut BytesMut)>;

fn openai(api: Api, has_usage: bool) -> Write {
    let head = CompletionHead {
        api,
        id: format!("{}{:032x}", api.id_prefix(), u128::MAX),
        created: 1_700_000_000,
        model: "tiny".into(),
    };
    let encoder = ChunkEncoder::new(&head, has_usage);
    Box::new(move |delta, out| encoder.delta(0, delta, &[], out))
}

fn messages() -> Write {
    let mut encoder = anthropic::MessageEncoder::new(anthropic::MessageHead {
        id: format!("msg_{:032x}", u128::MAX),
        model: "tiny".into(),
        shows_thinking: true,
        stop_sequences: [].into(),
    });
    Box::new(move |delta, out| encoder.delta(delta, out))
}

fn response_encoder() -> responses::ResponseEncoder {
    let body = json!({"model": "tiny", "input": "Hi"}).to_string();
    let request = responses::ResponsesRequest::parse(body.as_bytes(), &|_| None).unwrap();
    responses::ResponseEncoder::new(responses::ResponseHead {
        id: format!("resp_{:032x}", u128::MAX),
        created: 1_700_000_000,
        model: "tiny".into(),
        store_bytes: Some(usize::MAX),
        explanation: None,
        repeated: Arc::new(request.repeated),
    })
}

fn response() -> Write {
    let mut encoder = response_encoder();
    Box::new(move |delta, out| encoder.delta(delta, &[], out))
}

/// The parsers of a model with reasoning and tool calls.
fn splitter() -> Splitter {
    let reasoning = ReasoningDialect::find("qwen3").unwrap();
    let tools = ToolDialect::find("hermes").unwrap();
    let schemas = Arc::new(ToolSchemas::new(&[]));
    Splitter::new(
        reasoning.parser(None, true),
        Some(tools.parser(schemas)),
        IdStyle::Call,
    )
}

/// Counts the allocations of an answer of `tokens`, from its first item to its last, into a buffer with enough room.
fn count(tokens: u32, stops: &[&str], splitter: Option<Splitter>, write: &mut Write) -> u64 {
    let outputs = OutputStream::from_raw(Box::pin(stream::iter(answer(1, tokens))));
    let stops = stops.iter().map(|&stop| stop.to_owned()).collect();
    let mut answer = Answer::new(outputs, Some(Arc::clone(tokenizer())), stops, 1);
    if let Some(splitter) = splitter {
        answer = answer.with_splitter(splitter, Arc::default());
    }
    let mut out = BytesMut::with_capacity(usize::try_from(tokens).unwrap() * 512);
    let capacity = out.capacity();
    let mut cx = Context::from_waker(Waker::noop());
    let before = allocations();
    loop {
        let polled = answer.poll_deltas(&mut cx, |delta, _| write(delta, &mut out));
        let Poll::Ready(end) = polled else {
            panic!("every item is ready");
        };
        if end.unwrap().is_some() {
            break;
        }
    }
    let allocations = allocations() - before;
    assert_eq!(out.capacity(), capacity, "the buffer had no room");
    assert!(out.len() > usize::try_from(tokens).unwrap() * 20, "{out:?}");
    allocations
}

/// Returns how many more allocations an answer makes than one of `TOKENS`, if it is 2, 4 and 16 times as long.
fn further(stops: &[&str], splits: bool, write: impl Fn() -> Write) -> [u64; 3] {
    let count = |times: u32| {
        let splitter = splits.then(splitter);
        count(TOKENS * times, stops, splitter, &mut write())
    };
    // The first run makes what is made once per process.
    count(1);
    let base = count(1);
    [2, 4, 16].map(|times| count(times).saturating_sub(base))
}

#[test]
fn a_further_token_of_chat_and_completions_allocates_nothing() {
    for api in [Api::Chat, Api::Completions] {
        for has_usage in [false, true] {
            for stops in [&[][..], &STOPS] {
                let further = further(stops, false, || openai(api, has_usage));
                assert_eq!(further, [0; 3], "{api:?}, usage {has_usage}, {stops:?}");
            }
        }
    }
}

#[test]
fn a_further_token_of_a_message_allocates_nothing() {
    for stops in [&[][..], &STOPS] {
        assert_eq!(further(stops, false, messages), [0; 3], "{stops:?}");
    }
}

/// A response is kept whole: its text buffer doubles, which is once for twice the tokens.
#[test]
fn a_further_token_of_a_response_allocates_nothing_but_the_text_that_is_kept() {
    for stops in [&[][..], &STOPS] {
        assert_eq!(further(stops, false, response), [1, 2, 4], "{stops:?}");
    }
}

/// The logprobs are already text by then. The response's own text buffer doubles.
#[test]
fn the_end_of_a_response_makes_nothing_of_its_log_probabilities() {
    let candidate = || CandidateToken {
        bytes: b"a".to_vec(),
        logprob: -0.5,
    };
    let rated = [TokenLogprobs {
        chosen: candidate(),
        top: vec![candidate(); 20],
        text_offset: 0,
    }];
    let at_the_end = |tokens: u32| {
        let mut encoder = response_encoder();
        let mut out = BytesMut::with_capacity(usize::try_from(tokens).unwrap() * 10_000);
        encoder.start(&mut out);
        for _ in 0..tokens {
            encoder.delta(Delta::Content("a"), &rated, &mut out);
        }
        let end = responses::ResponseEnd::Completed(TotalUsage::default(), 0);
        let before = allocations();
        let ended = encoder.finish(&end, &mut out);
        let allocations = allocations() - before;
        drop(ended);
        allocations
    };
    at_the_end(1);
    let (few, many) = (at_the_end(TOKENS), at_the_end(4 * TOKENS));
    assert!(many <= few + 10, "{few} and {many}");
}

#[test]
fn parsers_of_thoughts_and_calls_allocate_nothing_for_a_further_token() {
    for stops in [&[][..], &STOPS] {
        let chat = further(stops, true, || openai(Api::Chat, false));
        assert_eq!(chat, [0; 3], "{stops:?}");
    }
}
