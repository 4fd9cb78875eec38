//! Answers of stand-in servers, good and bad, as streams.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    dead_code,
    reason = "a test fails by panicking, and no test file needs all of the support"
)]

mod support;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use genset_backend_common::output::{Finished, TokenLogprob};
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, FinishReason, GenerateRequest, GuidedDecoding, LLMEngine,
    Output, RequestContext, StartContext,
    context::TraceContext,
    request::{ChatInput, MediaKind},
};
use genset_engine_launcher::LauncherEngine;
use serde_json::{Value, json};
use tokio::time::timeout;

use support::{LONG, Reports, config};

const OF_TOKENS: [&str; 4] = ["vllm", "sglang", "trtllm", "llama"];

async fn started(api: &str, flags: &[&str]) -> LauncherEngine {
    let engine = LauncherEngine::new(config(api, flags));
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", prompt.to_vec());
    request.stop.max_tokens = Some(max_tokens);
    request.sampling.temperature = Some(0.0);
    request
}

#[derive(Debug, Default)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprob>,
    text: String,
    end: Option<Result<Finished, EngineError>>,
}

impl Answer {
    fn finished(&self) -> &Finished {
        match &self.end {
            Some(Ok(finished)) => finished,
            other => panic!("{other:?}"),
        }
    }

    fn error(&self) -> &EngineError {
        match &self.end {
            Some(Err(error)) => error,
            other => panic!("{other:?}"),
        }
    }
}

async fn answer(engine: &LauncherEngine, request: GenerateRequest) -> Answer {
    let mut outputs = engine
        .generate(request, RequestContext::new("r"))
        .await
        .unwrap();
    let mut answer = Answer::default();
    while let Some(item) = timeout(LONG, outputs.next()).await.unwrap() {
        match item {
            Ok(Output::Tokens(chunk)) => {
                answer.tokens.extend(chunk.token_ids);
                answer.logprobs.extend(chunk.logprobs);
            }
            Ok(Output::Text(chunk)) => answer.text += &chunk.text,
            Ok(Output::Finished(finished)) => answer.end = Some(Ok(*finished)),
            Ok(Output::Embeddings(_) | Output::Scores(_)) => panic!("no embeddings were asked for"),
            Err(error) => answer.end = Some(Err(error)),
        }
    }
    answer
}

#[tokio::test]
async fn every_api_gives_the_models_tokens() {
    let mut answers = Vec::new();
    for api in OF_TOKENS {
        let engine = started(api, &["--block-size=2", "--page-size=2"]).await;
        let first = answer(&engine, request(&[5, 6, 7, 8], 6)).await;
        let cached_at_first = first.finished().usage.cached_tokens;
        assert_eq!(cached_at_first, Some(0), "{api}");
        let answer = answer(&engine, request(&[5, 6, 7, 8], 6)).await;
        let finished = answer.finished();
        assert_eq!(finished.reason, FinishReason::Length, "{api}");
        assert_eq!(
            (
                finished.usage.prompt_tokens,
                finished.usage.completion_tokens
            ),
            (4, 6),
            "{api}"
        );
        assert_eq!(finished.usage.cached_tokens, Some(2), "{api}");
        answers.push(answer.tokens);
        engine.cleanup().await.unwrap();
    }
    assert_eq!(answers[0].len(), 6);
    assert!(
        answers.iter().all(|tokens| *tokens == answers[0]),
        "{answers:?}"
    );
}

#[tokio::test]
async fn every_api_stops_at_a_token_that_is_no_part_of_the_answer() {
    for api in OF_TOKENS {
        let engine = started(api, &[]).await;
        let whole = answer(&engine, request(&[5, 6, 7, 8], 6)).await.tokens;
        for by_eos in [true, false] {
            let mut stopping = request(&[5, 6, 7, 8], 6);
            match by_eos {
                true => stopping.stop.eos_token_ids = [whole[3]].into(),
                false => stopping.stop.stop_token_ids = [whole[3]].into(),
            }
            let answer = answer(&engine, stopping).await;
            assert_eq!(answer.tokens, whole[..3], "{api}");
            assert_eq!(answer.finished().reason, FinishReason::Stop, "{api}");
            assert_eq!(answer.finished().stop_token, Some(whole[3]), "{api}");
        }
        let mut ignoring = request(&[5, 6, 7, 8], 6);
        ignoring.stop.eos_token_ids = [whole[3]].into();
        ignoring.stop.ignore_eos = true;
        assert_eq!(answer(&engine, ignoring).await.tokens, whole, "{api}");
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn events_in_any_pieces_give_the_same_answer() {
    for api in OF_TOKENS {
        let (whole, split) = (
            started(api, &[]).await,
            started(api, &["--fault", "split"]).await,
        );
        let expected = answer(&whole, request(&[1, 2], 5)).await.tokens;
        assert_eq!(
            answer(&split, request(&[1, 2], 5)).await.tokens,
            expected,
            "{api}"
        );
        whole.cleanup().await.unwrap();
        split.cleanup().await.unwrap();
    }
    let incremental = started("sglang", &["--incremental"]).await;
    assert_eq!(
        answer(&incremental, request(&[1, 2], 5)).await.tokens.len(),
        5
    );
    incremental.cleanup().await.unwrap();
}

#[tokio::test]
async fn many_streams_do_not_see_each_other() {
    let engine = started("vllm", &[]).await;
    let prompts: Vec<Vec<u32>> = (0..32).map(|n| vec![n, 3]).collect();
    let mut alone = Vec::new();
    for prompt in &prompts {
        alone.push(answer(&engine, request(prompt, 12)).await.tokens);
    }
    let together = join_all(
        prompts
            .iter()
            .map(|prompt| answer(&engine, request(prompt, 12))),
    )
    .await;
    let together: Vec<_> = together.into_iter().map(|answer| answer.tokens).collect();
    assert_eq!(together, alone);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_cancelled_request_and_a_dropped_one_close_their_connections() {
    for api in OF_TOKENS {
        let mut reports = Reports::listen().await;
        let engine = started(api, &[&reports.flag(), "--delay", "0.1"]).await;
        let ctx = RequestContext::new("r");
        let mut outputs = engine
            .generate(request(&[1], 200), ctx.clone())
            .await
            .unwrap();
        assert!(matches!(outputs.next().await, Some(Ok(Output::Tokens(_)))));
        ctx.cancel(CancelReason::Client);
        let mut last = None;
        while let Some(item) = timeout(LONG, outputs.next()).await.unwrap() {
            last = Some(item.unwrap());
        }
        let Some(Output::Finished(finished)) = last else {
            panic!("{last:?}")
        };
        assert_eq!(finished.reason, FinishReason::Cancelled, "{api}");
        assert!(
            reports.next("cancelled").await.as_u64() < Some(200),
            "{api}"
        );

        let mut outputs = engine
            .generate(request(&[1], 200), RequestContext::new("s"))
            .await
            .unwrap();
        assert!(matches!(outputs.next().await, Some(Ok(Output::Tokens(_)))));
        drop(outputs);
        assert!(
            reports.next("cancelled").await.as_u64() < Some(200),
            "{api}"
        );
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn bad_answers_have_their_kinds() {
    let cases = [
        ("garbage", ErrorKind::Disconnected),
        ("half", ErrorKind::Disconnected),
        ("early-end", ErrorKind::StreamIncomplete),
        ("error-event", ErrorKind::Unavailable),
        ("odd-token", ErrorKind::Disconnected),
    ];
    for (fault, kind) in cases {
        let engine = started("vllm", &["--fault", fault]).await;
        let answer = answer(&engine, request(&[1, 2], 50)).await;
        assert_eq!(answer.error().kind(), kind, "{fault}: {}", answer.error());
        assert_eq!(answer.tokens.len(), 2, "{fault}");
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn refusals_have_their_kinds() {
    let cases = [
        ("status-400", ErrorKind::InvalidArgument),
        ("status-404", ErrorKind::NotFound),
        ("status-429", ErrorKind::Overloaded),
        ("status-500", ErrorKind::Internal),
        ("status-503", ErrorKind::Unavailable),
    ];
    for (fault, kind) in cases {
        let engine = started("sglang", &["--fault", fault]).await;
        let answer = answer(&engine, request(&[1, 2], 50)).await;
        let error = answer.error();
        assert_eq!(error.kind(), kind, "{fault}: {error}");
        assert_eq!(
            error.details().retry_after.map(|after| after.as_secs()),
            Some(7),
            "{fault}"
        );
        engine.cleanup().await.unwrap();
    }
}

/// "こんにちは。" in the tokens of `models/tiny-chat`, as llama-server generated them.
const KONNICHIWA: [u32; 14] = [
    1085, 244, 162, 227, 244, 1085, 107, 1085, 97, 1085, 110, 162, 225, 227,
];

async fn saying(tokens: &[u32]) -> LauncherEngine {
    let tokens: Vec<String> = tokens.iter().map(u32::to_string).collect();
    let mut config = config("llama", &["--say", &tokens.join(",")]);
    config.input = genset_engine_launcher::ServerInput::Tokens { vocab_size: None };
    let engine = LauncherEngine::new(config);
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
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

/// The real one names none of them then, and would hold its slot if it were let end the character.
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

/// The real one ends at its model's end whatever it is told, or bans that end.
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
    // An end that is the last token of all is one like any other.
    let mut last = until_eos(3);
    last.stop.ignore_eos = true;
    let last = answer(&engine, last).await;
    assert_eq!(last.tokens, again[..3]);
    assert_eq!(last.finished().reason, FinishReason::Length);
    engine.cleanup().await.unwrap();
}

/// Bytes one by one, which its own tokenizer joins; and a character that never ends.
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
        // A grammar cannot be left and taken up again.
        let mut guided = until_eos(50);
        guided.guided = Some(GuidedDecoding::Grammar("root ::= [^x]*".into()).into());
        let error = answer(&engine, guided).await;
        assert_eq!(error.error().kind(), ErrorKind::Disconnected);
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn tokens_inside_a_character_are_rated_too() {
    // The second is in bytes that the text does not tell, so it is drawn again.
    for tokens in [&KONNICHIWA[..], &[162, 226, 244]] {
        let engine = saying(tokens).await;
        // With one candidate the token is not among those that are shown.
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

/// A grammar cannot be left and taken up again, and need not be: what is rated is rated beside the answer.
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
    config.input = genset_engine_launcher::ServerInput::Text;
    let engine = LauncherEngine::new(config);
    engine.start(StartContext::detached(1)).await.unwrap();
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

#[tokio::test]
async fn numbers_that_no_server_can_hold_end_none() {
    for api in OF_TOKENS {
        let engine = started(api, &[]).await;
        let plain = answer(&engine, request(&[5, 6], 4)).await.tokens;
        let mut odd = request(&[5, 6], 4);
        odd.sampling.top_k = Some(u32::MAX);
        assert_eq!(answer(&engine, odd).await.tokens, plain, "{api}");
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn a_finished_grammar_ends_the_answer_whatever_is_ignored() {
    let text: Vec<u32> = "red".bytes().map(|byte| 100 + u32::from(byte)).collect();
    for api in ["vllm", "sglang"] {
        let engine = started(api, &[]).await;
        for eos in [vec![], vec![2]] {
            let mut guided = request(&[5, 6], 20);
            let choices = vec!["red".to_owned(), "green".to_owned()];
            guided.guided = Some(GuidedDecoding::Choice(choices).into());
            guided.stop.ignore_eos = true;
            guided.stop.eos_token_ids = eos.into();
            let answer = answer(&engine, guided).await;
            assert_eq!(answer.tokens, text, "{api}");
            assert_eq!(answer.finished().stop_token, Some(2), "{api}");
        }
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn a_server_that_died_inside_ends_its_requests_as_one_that_died() {
    let engine = started("vllm", &["--fault", "dies-inside"]).await;
    for expected in [2, 0] {
        let answer = answer(&engine, request(&[1, 2], 50)).await;
        let error = answer.error();
        assert_eq!(error.kind(), ErrorKind::Disconnected, "{error}");
        assert!(error.policy().is_migratable);
        assert!(error.message().contains("EngineCore"), "{error}");
        assert_eq!(answer.tokens.len(), expected);
    }
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn what_a_server_tells_about_itself_is_declared() {
    for (api, context, block_size, blocks) in [
        ("vllm", 256, Some(128), Some(2048)),
        ("sglang", 250, Some(1), Some(131_072)),
        ("llama", 248, None, None),
    ] {
        let engine = LauncherEngine::new(config(api, &[]));
        let declared = engine.start(StartContext::detached(1)).await.unwrap();
        assert_eq!(declared.context_length_tokens, context, "{api}");
        assert_eq!(declared.kv_block_size.map(u32::from), block_size, "{api}");
        assert_eq!(declared.kv_total_blocks, blocks, "{api}");
        // The longest prompt that fits is one that the server takes.
        let longest: Vec<u32> = (1..context).collect();
        let answer = answer(&engine, request(&longest, 50)).await;
        assert_eq!(answer.tokens.len(), 1, "{api}: {answer:?}");
        engine.cleanup().await.unwrap();
    }
}

/// llama-server fails every request that runs when all of them have more tokens than its slots share.
#[tokio::test]
async fn requests_wait_until_there_is_room_for_their_tokens() {
    let engine = started("llama", &[]).await;
    let long = |id| request(&[id; 150], 50);
    let together = join_all((5..9).map(|id| answer(&engine, long(id)))).await;
    for answer in together {
        assert_eq!(answer.tokens.len(), 50, "{answer:?}");
    }
    // Answers without a limit may outgrow what they have, and end as at a server that is full.
    let unlimited = |id| {
        let mut request = request(&[id; 20], 1000);
        request.stop.max_tokens = None;
        request
    };
    let together = join_all((5..7).map(|id| answer(&engine, unlimited(id)))).await;
    for answer in together {
        assert_eq!(answer.error().kind(), ErrorKind::Overloaded, "{answer:?}");
        assert!(answer.tokens.len() > 50, "{answer:?}");
    }
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn what_is_sent_is_the_documented_request() {
    let mut reports = Reports::listen().await;
    let engine = started("vllm", &[&reports.flag()]).await;
    let trace = TraceContext::parse(
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "a=b",
    )
    .unwrap();
    let ctx = RequestContext::new("r").with_trace(trace);
    let mut outputs = engine.generate(request(&[1, 2], 3), ctx).await.unwrap();
    while let Some(item) = outputs.next().await {
        item.unwrap();
    }
    let sent = reports.next("request").await;
    assert_eq!(sent["path"], "/v1/completions");
    assert_eq!(sent["body"]["prompt"], json!([1, 2]));
    assert_eq!(sent["body"]["max_tokens"], json!(3));
    assert_eq!(sent["headers"]["tracestate"], "a=b");
    assert!(
        sent["headers"]["traceparent"]
            .as_str()
            .unwrap()
            .starts_with("00-0af7")
    );
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_gguf_file_is_served_as_text_by_either_program() {
    for (api, prompt_tokens) in [("llama", 3), ("llama_cpp.server", 3)] {
        let mut config = config(api, &[]);
        config.input = genset_engine_launcher::ServerInput::Text;
        let engine = LauncherEngine::new(config);
        engine.start(StartContext::detached(1)).await.unwrap();
        let text = answer(&engine, GenerateRequest::from_text("m", "one two three")).await;
        assert_eq!(text.text, "one two three", "{api}");
        assert_eq!(text.finished().reason, FinishReason::Stop);
        assert_eq!(text.finished().usage.prompt_tokens, prompt_tokens, "{api}");
        let messages = vec![json!({"role": "user", "content": "four five six"})];
        let mut chat = GenerateRequest::from_chat(
            "m",
            ChatInput {
                messages,
                tools: vec![],
            },
        );
        chat.stop.max_tokens = Some(2);
        let together = join_all([answer(&engine, chat.clone()), answer(&engine, chat)]).await;
        for chat in together {
            assert_eq!(chat.text, "four five", "{api}");
            assert_eq!(chat.finished().reason, FinishReason::Length);
            assert_eq!(chat.finished().usage.completion_tokens, 2);
        }
        engine.cleanup().await.unwrap();
    }
}

/// The list of its tokens is longer than what is read.
#[tokio::test]
async fn a_prompt_of_too_many_tokens_to_count_is_the_servers_to_judge() {
    let mut config = config("llama", &[]);
    config.input = genset_engine_launcher::ServerInput::Text;
    let engine = LauncherEngine::new(config);
    engine.start(StartContext::detached(1)).await.unwrap();
    let mut long = GenerateRequest::from_text("m", "a ".repeat(900_000));
    long.stop.max_tokens = Some(2);
    assert_eq!(answer(&engine, long).await.text, "a a");
    engine.cleanup().await.unwrap();
}

/// A GIF of one pixel, and another.
const PIXELS: [&str; 2] = [
    "data:image/gif;base64,R0lGODlhAQABAAAAACw=",
    "data:image/gif;base64,R0lGODlhAQABAAAAACw7",
];

fn seen(url: &str) -> GenerateRequest {
    seen_with(url, Vec::new())
}

fn seen_with(url: &str, tools: Vec<Value>) -> GenerateRequest {
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let sound = json!({"type": "input_audio", "input_audio": {"data": "UklGRgAAAABXQVZFZm10IA==", "format": "wav"}});
    let text = json!({"type": "text", "text": "what is it"});
    let mut request = GenerateRequest::from_chat(
        "m",
        ChatInput {
            messages: vec![json!({"role": "user", "content": [text, image, sound]})],
            tools,
        },
    );
    request.stop.max_tokens = Some(6);
    request.sampling.temperature = Some(0.0);
    request
}

/// The server makes the prompt: three words, an image and a sound.
#[tokio::test]
async fn images_and_audio_reach_the_server_as_they_came() {
    for (api, flag) in [("vllm", "-"), ("sglang", "-"), ("sglang", "--incremental")] {
        let mut reports = Reports::listen().await;
        let mut config = config(api, &[&reports.flag(), flag]);
        config.media = MediaKind::ALL.into();
        let engine = LauncherEngine::new(config);
        let declared = engine.start(StartContext::detached(1)).await.unwrap();
        assert_eq!(declared.capabilities.media, MediaKind::ALL.into());
        declared.validate().unwrap();
        let mut answers = Vec::new();
        for url in PIXELS {
            let request = seen(url);
            declared.check(&request).unwrap();
            let sent = serde_json::to_value(&request).unwrap();
            let answer = answer(&engine, request).await;
            let report = reports.next("request").await;
            assert_eq!(report["path"], "/v1/chat/completions");
            assert_eq!(
                report["body"]["messages"],
                sent["input"]["chat"]["messages"]
            );
            let finished = answer.finished();
            assert_eq!(finished.reason, FinishReason::Length, "{api}");
            let usage = &finished.usage;
            assert_eq!(
                (usage.prompt_tokens, usage.completion_tokens),
                (3 + 4 + 2, 6),
                "{api}"
            );
            assert_eq!(answer.tokens.len(), if api == "vllm" { 6 } else { 0 });
            answers.push((answer.tokens, answer.text));
        }
        assert_ne!(answers[0], answers[1], "{api}: other bytes, another answer");
        engine.cleanup().await.unwrap();
    }
}

/// Each tool is one more token of the prompt.
#[tokio::test]
async fn the_model_sees_the_tools_of_a_chat_with_images() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    for api in ["vllm", "sglang"] {
        let mut config = config(api, &[]);
        config.media = MediaKind::ALL.into();
        let engine = LauncherEngine::new(config);
        engine.start(StartContext::detached(1)).await.unwrap();
        let request = seen_with(PIXELS[0], vec![tool("look"), tool("measure")]);
        let answer = answer(&engine, request).await;
        let prompt_tokens = answer.finished().usage.prompt_tokens;
        assert_eq!(prompt_tokens, 2 + 3 + 4 + 2, "{api}");
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn what_a_server_does_not_give_beside_media_is_refused_by_name() {
    let with_logprobs = || {
        let mut request = seen(PIXELS[0]);
        request.output.logprobs = Some(2);
        request
    };
    let of = |api: &str| {
        let mut config = config(api, &[]);
        config.media = MediaKind::ALL.into();
        LauncherEngine::new(config)
    };
    let engine = of("vllm");
    engine.start(StartContext::detached(1)).await.unwrap();
    let rated = answer(&engine, with_logprobs()).await;
    assert_eq!(rated.tokens.len(), 6);
    engine.cleanup().await.unwrap();
    let engine = of("sglang");
    engine.start(StartContext::detached(1)).await.unwrap();
    let refused = engine.generate(with_logprobs(), RequestContext::new("r"));
    let error = refused.await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.at().map(|at| at.name()), Some("logprobs"));
    engine.cleanup().await.unwrap();
    let mut deaf = config("trtllm", &[]);
    deaf.media = [MediaKind::Image].into();
    let error = deaf.validate().unwrap_err();
    assert_eq!(error.at().map(|at| at.name()), Some("--media"));
}
