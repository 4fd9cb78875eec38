//! Answers of stand-in servers, good and bad, as streams.

mod characters;
mod media;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use genset_backend_common::{
    CancelReason, ErrorKind, FinishReason, GenerateRequest, GuidedDecoding, LLMEngine, Output,
    RequestContext, StartContext, context::TraceContext, request::ChatInput,
};
use genset_engine_launcher::LauncherEngine;
use serde_json::json;
use tokio::time::timeout;

use crate::support::{self, LONG, OF_TOKENS, Reports, answer, config, request};

async fn started(api: &str, flags: &[&str]) -> LauncherEngine {
    support::started(config(api, flags)).await
}

#[tokio::test]
async fn every_api_gives_the_models_tokens() {
    let mut answers = Vec::new();
    let blocks = ["--block-size=2", "--page-size=2"];
    let incremental = [&blocks[..], &["--incremental"]].concat();
    let apis = OF_TOKENS.map(|api| (api, &blocks[..]));
    for (api, flags) in apis.into_iter().chain([("sglang", &incremental[..])]) {
        let engine = started(api, flags).await;
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
async fn a_cancelled_request_and_a_dropped_one_close_their_connections() {
    let mut reports = Reports::listen().await;
    let engine = started("vllm", &[&reports.flag(), "--delay", "0.1"]).await;
    let ctx = RequestContext::new("r");
    let outputs = engine.generate(request(&[1], 200), ctx.clone());
    let mut outputs = outputs.await.unwrap();
    assert!(matches!(outputs.next().await, Some(Ok(Output::Tokens(_)))));
    ctx.cancel(CancelReason::Client);
    let mut last = None;
    while let Some(item) = timeout(LONG, outputs.next()).await.unwrap() {
        last = Some(item.unwrap());
    }
    let Some(Output::Finished(finished)) = last else {
        panic!("{last:?}")
    };
    assert_eq!(finished.reason, FinishReason::Cancelled);
    assert!(reports.next("cancelled").await.as_u64() < Some(200));

    let outputs = engine.generate(request(&[1], 200), RequestContext::new("s"));
    let mut outputs = outputs.await.unwrap();
    assert!(matches!(outputs.next().await, Some(Ok(Output::Tokens(_)))));
    drop(outputs);
    assert!(reports.next("cancelled").await.as_u64() < Some(200));
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_refusal_says_when_to_come_again() {
    let engine = started("sglang", &["--fault", "status-429"]).await;
    let answer = answer(&engine, request(&[1, 2], 50)).await;
    let error = answer.error();
    assert_eq!(error.kind(), ErrorKind::Overloaded, "{error}");
    let after = error.details().retry_after;
    assert_eq!(after.map(|after| after.as_secs()), Some(7));
    engine.cleanup().await.unwrap();
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
        // The server accepts the longest prompt that fits.
        let longest: Vec<u32> = (1..context).collect();
        let answer = answer(&engine, request(&longest, 50)).await;
        assert_eq!(answer.tokens.len(), 1, "{api}: {answer:?}");
        engine.cleanup().await.unwrap();
    }
}

/// llama-server fails every running request when all of them have more tokens than its slots share.
#[tokio::test]
async fn requests_wait_until_there_is_room_for_their_tokens() {
    let engine = started("llama", &[]).await;
    let long = |id| request(&[id; 150], 50);
    let together = join_all((5..9).map(|id| answer(&engine, long(id)))).await;
    for answer in together {
        assert_eq!(answer.tokens.len(), 50, "{answer:?}");
    }
    // Answers without a limit may outgrow their room, and then end as at a full server.
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
        let engine = support::started(config).await;
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

/// The token list of the prompt is longer than we read.
#[tokio::test]
async fn a_prompt_of_too_many_tokens_to_count_is_the_servers_to_judge() {
    let mut config = config("llama", &[]);
    config.input = genset_engine_launcher::ServerInput::Text;
    let engine = support::started(config).await;
    let mut long = GenerateRequest::from_text("m", "a ".repeat(900_000));
    long.stop.max_tokens = Some(2);
    assert_eq!(answer(&engine, long).await.text, "a a");
    engine.cleanup().await.unwrap();
}
