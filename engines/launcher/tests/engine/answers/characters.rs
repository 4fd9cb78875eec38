//! llama-server's tokens when a character is several of them, and its text when it counts them.

use genset_backend_common::{
    ErrorKind, FinishReason, GenerateRequest, GuidedDecoding, LLMEngine, request::ChatInput,
};
use genset_engine_launcher::{LauncherEngine, ServerInput};
use serde_json::json;

use crate::support::{answer, config, request, started};

/// "こんにちは。" in the tokens of `models/tiny-chat`, as llama-server generated them.
const KONNICHIWA: [u32; 14] = [
    1085, 244, 162, 227, 244, 1085, 107, 1085, 97, 1085, 110, 162, 225, 227,
];

async fn saying(tokens: &[u32]) -> LauncherEngine {
    let tokens: Vec<String> = tokens.iter().map(u32::to_string).collect();
    let mut config = config("llama", &["--say", &tokens.join(",")]);
    config.input = ServerInput::Tokens { vocab_size: None };
    started(config).await
}

fn until_eos(max_tokens: u32) -> GenerateRequest {
    let mut request = request(&[5, 6, 7, 8], max_tokens);
    request.stop.eos_token_ids = [2].into();
    request
}

#[tokio::test]
async fn characters_of_several_tokens_come_with_all_of_them() {
    let engine = saying(&KONNICHIWA).await;
    let whole = answer(&engine, until_eos(50)).await;
    assert_eq!(whole.tokens, KONNICHIWA);
    assert_eq!(whole.finished().stop_token, Some(2));
    assert_eq!(whole.finished().usage.completion_tokens, 14);
    // A limit inside a character too.
    for limit in 1..=14_u32 {
        let cut = answer(&engine, until_eos(limit)).await;
        assert_eq!(cut.tokens, KONNICHIWA[..limit as usize]);
        assert_eq!(cut.finished().reason, FinishReason::Length);
    }
    engine.cleanup().await.unwrap();
}

/// The real server names none of them then, and would keep its slot until the character is complete.
#[tokio::test]
async fn a_limit_inside_a_character_is_kept_to_with_the_tokens_so_far() {
    let tokens = [162, 227, 244, 162, 227, 244];
    let engine = saying(&tokens).await;
    for limit in 1..=5 {
        let found = answer(&engine, until_eos(limit)).await;
        let limit = usize::try_from(limit).unwrap();
        assert_eq!(found.tokens, tokens[..limit]);
        assert_eq!(found.finished().reason, FinishReason::Length);
    }
    engine.cleanup().await.unwrap();
}

/// The real server always ends at its model's end, or bans that end.
#[tokio::test]
async fn llama_server_goes_on_behind_an_end_that_is_none() {
    let engine = saying(&KONNICHIWA[..2]).await;
    let again = [1085, 244, 2, 1085, 244, 2, 1085];
    let mut ignoring = until_eos(7);
    ignoring.stop.ignore_eos = true;
    let ignored = answer(&engine, ignoring).await;
    assert_eq!(ignored.tokens, again);
    assert_eq!(ignored.finished().reason, FinishReason::Length);
    assert_eq!(ignored.finished().usage.prompt_tokens, 4);
    let mut early = until_eos(50);
    early.stop.min_tokens = 4;
    let early = answer(&engine, early).await;
    assert_eq!(early.tokens, again[..5]);
    assert_eq!(early.finished().stop_token, Some(2));
    // If the end is the last token allowed, it is a token like any other.
    let mut last = until_eos(3);
    last.stop.ignore_eos = true;
    let last = answer(&engine, last).await;
    assert_eq!(last.tokens, again[..3]);
    assert_eq!(last.finished().reason, FinishReason::Length);
    engine.cleanup().await.unwrap();
}

/// Single bytes that its own tokenizer joins, and a character that never ends.
#[tokio::test]
async fn tokens_that_their_text_does_not_tell_are_drawn_again_and_never_silence() {
    for tokens in [&[162, 226, 244][..], &[1085]] {
        let engine = saying(tokens).await;
        let found = answer(&engine, until_eos(50)).await;
        assert_eq!(found.tokens, tokens);
        assert_eq!(found.finished().stop_token, Some(2));
        let mut ignoring = until_eos(11);
        ignoring.stop.ignore_eos = true;
        let ignored = answer(&engine, ignoring).await;
        let again = tokens.iter().copied().chain([2]).cycle();
        assert_eq!(ignored.tokens, again.take(11).collect::<Vec<_>>());
        // An answer with a grammar cannot be continued by another call.
        let mut guided = until_eos(50);
        guided.guided = Some(GuidedDecoding::Grammar("root ::= [^x]*".into()).into());
        let error = answer(&engine, guided).await;
        assert_eq!(error.error().kind(), ErrorKind::Disconnected);
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn tokens_inside_a_character_are_rated_too() {
    // The second contains bytes that the text does not determine, so it is drawn again.
    for tokens in [&KONNICHIWA[..], &[162, 226, 244]] {
        let engine = saying(tokens).await;
        // With one candidate, the chosen token is not among those reported.
        for asked in [0, 1, 2] {
            let mut rated = until_eos(50);
            rated.output.logprobs = Some(asked);
            let found = answer(&engine, rated).await;
            assert_eq!(found.tokens, tokens);
            let own: Vec<f32> = found.logprobs.iter().map(|at| at.logprob).collect();
            let expected = (0_u8..).take(tokens.len());
            let expected: Vec<f32> = expected
                .map(|place| -1.0 - f32::from(place) / 16.0)
                .collect();
            assert_eq!(own, expected);
            let shown = usize::try_from(asked).unwrap();
            assert!(found.logprobs.iter().all(|at| at.top.len() == shown));
        }
        engine.cleanup().await.unwrap();
    }
}

/// An answer with a grammar cannot be continued, and need not be: log probabilities come from separate calls.
#[tokio::test]
async fn tokens_inside_a_character_are_rated_beside_a_grammar() {
    let engine = saying(&KONNICHIWA).await;
    let mut guided = until_eos(5);
    guided.guided = Some(GuidedDecoding::Grammar("root ::= [^x]*".into()).into());
    guided.output.logprobs = Some(2);
    let found = answer(&engine, guided).await;
    assert_eq!(found.tokens, KONNICHIWA[..5]);
    assert_eq!(found.logprobs[4].logprob, -1.25);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn pieces_of_text_are_as_many_tokens_as_the_server_counts() {
    let tokens: Vec<String> = KONNICHIWA.iter().map(u32::to_string).collect();
    let mut config = config("llama", &["--say", &tokens.join(",")]);
    config.input = ServerInput::Text;
    let engine = started(config).await;
    let messages = vec![json!({"role": "user", "content": "Say hello."})];
    let tools = vec![];
    for request in [
        GenerateRequest::from_text("m", "Say hello."),
        GenerateRequest::from_chat("m", ChatInput { messages, tools }),
    ] {
        let answer = answer(&engine, request).await;
        assert_eq!(answer.text, "こんにちは。");
        let usage = &answer.finished().usage;
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 15));
    }
    engine.cleanup().await.unwrap();
}
