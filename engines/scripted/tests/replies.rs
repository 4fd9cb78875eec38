//! Which reply a request receives, and its content, in text mode.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::time::Duration;

use common::{answer, say, script, text_engine};
use futures_util::StreamExt;
use genset_backend_common::{
    CancelReason, ErrorKind, FinishReason, GenerateRequest, GuidedDecoding, LLMEngine, Output,
    RequestContext, StartContext, config::GuidedKind, request::ChatInput,
};
use genset_engine_scripted::{ScriptedArgs, ScriptedEngine};
use serde_json::json;

fn chat(messages: serde_json::Value) -> GenerateRequest {
    let chat = ChatInput {
        messages: messages.as_array().unwrap().clone(),
        tools: vec![],
    };
    GenerateRequest::from_chat("m", chat)
}

#[tokio::test]
async fn the_first_reply_that_matches_is_played() {
    let engine = text_engine(
        r#"
        [[reply]]
        match.exact = "hello"
        text = "exact"

        [[reply]]
        match.contains = "hello"
        text = "contains"

        [[reply]]
        match.regex = '^\d+ (apples|pears)$'
        text = "regex"

        [[reply]]
        text = "default"
        "#,
    )
    .await;
    for (asked, expected) in [
        (" hello\n", "exact"),
        ("hello you", "contains"),
        ("12 pears", "regex"),
        ("12 plums", "default"),
        ("", "default"),
    ] {
        assert_eq!(say(&engine, asked).await.text(), expected, "{asked}");
    }
}

#[tokio::test]
async fn all_conditions_of_a_match_must_hold() {
    let engine = text_engine(
        r#"
        [[reply]]
        match = { contains = "weather", last_role = "tool" }
        text = "It rains."

        [[reply]]
        match.contains = "weather"
        text = "<tool_call>"
        "#,
    )
    .await;
    let ask = json!({"role": "user", "content": "the weather?"});
    let call = json!({"role": "assistant", "content": null, "tool_calls": []});
    let result = json!({"role": "tool", "content": "rain"});
    let first = answer(&engine, chat(json!([ask]))).await;
    assert_eq!(first.text(), "<tool_call>");
    let second = answer(&engine, chat(json!([ask, call, result]))).await;
    assert_eq!(second.text(), "It rains.");
}

#[tokio::test]
async fn a_request_that_nothing_matches_is_refused_without_its_text() {
    let engine = text_engine("[[reply]]\nmatch.exact = 'a'\ntext = 'b'").await;
    let request = GenerateRequest::from_text("m", "a secret");
    let refused = engine.generate(request, RequestContext::new("r")).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.at().map(|at| at.name()), Some("prompt"));
    assert!(!error.message().contains("secret"), "{error}");
}

#[tokio::test]
async fn a_used_up_reply_gives_way_to_the_next() {
    let replies = "[[reply]]\ntimes = 2\ntext = 'twice'\n[[reply]]\ntext = 'then'";
    let engine = text_engine(replies).await;
    for expected in ["twice", "twice", "then", "then"] {
        assert_eq!(say(&engine, "go").await.text(), expected);
    }
}

#[tokio::test]
async fn values_of_the_request_stand_in_the_text() {
    let engine = text_engine(
        "[[reply]]\nmatch.contains = 'raw'\nsubstitute = false\ntext = '{{last_user}} {{x}}'\n\
         [[reply]]\ntext = '{{n_messages}}/{{ last_user }}/{{request_id}}'",
    )
    .await;
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]);
    let filled = answer(&engine, chat(messages)).await;
    assert_eq!(filled.text(), "2/u/request-1");
    assert_eq!(say(&engine, "raw").await.text(), "{{last_user}} {{x}}");
}

#[tokio::test]
async fn chunks_come_as_the_script_cuts_them() {
    let engine = text_engine(
        r#"
        [defaults]
        chunk_chars = 4

        [[reply]]
        match.exact = "own"
        chunks = ["<tool", "_call>{{last_user}}</", "tool_call>"]

        [[reply]]
        match.exact = "two"
        text = "aé🦀b"
        chunk_chars = 2

        [[reply]]
        text = "<think>x"
        "#,
    )
    .await;
    let own = say(&engine, "own").await;
    assert_eq!(own.chunks, ["<tool", "_call>own</", "tool_call>"]);
    assert_eq!(own.finished().usage.completion_tokens, 3);
    assert_eq!(say(&engine, "two").await.chunks, ["aé", "🦀b"]);
    assert_eq!(say(&engine, "").await.chunks, ["<thi", "nk>x"]);
}

#[tokio::test]
async fn words_are_the_default_chunks_and_count_as_tokens() {
    let engine = text_engine("[[reply]]\ntext = 'one  two three'").await;
    let messages = json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "count to three"}]);
    let counted = answer(&engine, chat(messages)).await;
    assert_eq!(counted.chunks, ["one", "  two", " three"]);
    let usage = counted.finished().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 3));
    assert_eq!(counted.finished().reason, FinishReason::Stop);
}

#[tokio::test]
async fn an_empty_text_is_an_empty_answer() {
    let engine = text_engine("[[reply]]\ntext = ''").await;
    let mut request = GenerateRequest::from_text("m", "x");
    request.stop.ignore_eos = true;
    let empty = answer(&engine, request).await;
    assert_eq!(
        (empty.text().as_str(), empty.finished().reason),
        ("", FinishReason::Stop)
    );
}

#[tokio::test]
async fn the_scripts_finish_reason_is_given_unless_a_limit_comes_first() {
    let engine = text_engine("[[reply]]\nfinish_reason = 'content_filter'\ntext = 'a b c'").await;
    let finished = say(&engine, "x").await;
    assert_eq!(finished.finished().reason, FinishReason::ContentFilter);
    let mut request = GenerateRequest::from_text("m", "x");
    request.stop.max_tokens = Some(2);
    let cut = answer(&engine, request).await;
    assert_eq!(
        (cut.text().as_str(), cut.finished().reason),
        ("a b", FinishReason::Length)
    );
}

#[tokio::test]
async fn an_answer_that_may_not_end_begins_again() {
    let engine = text_engine("[[reply]]\nchunks = ['a', 'b']").await;
    let mut request = GenerateRequest::from_text("m", "x");
    request.stop.min_tokens = 3;
    assert_eq!(answer(&engine, request.clone()).await.text(), "abab");
    request.stop.ignore_eos = true;
    request.stop.max_tokens = Some(5);
    let on = answer(&engine, request).await;
    assert_eq!(
        (on.text().as_str(), on.finished().reason),
        ("ababa", FinishReason::Length)
    );
}

#[tokio::test(start_paused = true)]
async fn the_pauses_are_the_scripts() {
    let replies = "[defaults]\ntoken_ms = 7\n[[reply]]\nfirst_token_ms = 300\ntoken_ms = 20\ntext = 'a b c'\ntimes = 1\n\
        [[reply]]\ntext = 'a b c'";
    let engine = text_engine(replies).await;
    for expected in [340, 14] {
        let begun = tokio::time::Instant::now();
        say(&engine, "x").await;
        assert_eq!(begun.elapsed(), Duration::from_millis(expected));
    }
}

#[tokio::test(start_paused = true)]
async fn cancelling_ends_a_pause_and_bills_the_prompt() {
    let engine = text_engine("[[reply]]\ntoken_ms = 1000000000\ntext = 'a b c'").await;
    let ctx = RequestContext::new("r");
    let request = GenerateRequest::from_text("m", "three words here");
    let mut outputs = engine.generate(request, ctx.clone()).await.unwrap();
    assert!(matches!(outputs.next().await, Some(Ok(Output::Text(_)))));
    ctx.cancel(CancelReason::Client);
    let Some(Ok(Output::Finished(finished))) = outputs.next().await else {
        panic!("a terminal")
    };
    assert_eq!(finished.reason, FinishReason::Cancelled);
    assert_eq!(
        (
            finished.usage.prompt_tokens,
            finished.usage.completion_tokens
        ),
        (3, 1)
    );
}

#[tokio::test]
async fn what_text_cannot_do_is_refused_by_name() {
    let engine = ScriptedEngine::from_script(script("[[reply]]\ntext = 'a'"));
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    let mut stopping = GenerateRequest::from_text("m", "x");
    stopping.stop.stop_token_ids = [3].into();
    let refused = engine.generate(stopping, RequestContext::new("r")).await;
    let error = refused.unwrap_err();
    assert_eq!(
        (error.kind(), error.at().map(|at| at.name())),
        (ErrorKind::Unsupported, Some("stop_token_ids"))
    );
    let mut rated = GenerateRequest::from_text("m", "x");
    rated.output.logprobs = Some(2);
    let error = config.check(&rated).unwrap_err();
    assert_eq!(
        (error.kind(), error.at().map(|at| at.name())),
        (ErrorKind::Unsupported, Some("logprobs"))
    );

    let rated = ScriptedEngine::from_script(script(
        "[[reply]]\ntext = 'a'\nlogprobs = [{ logprob = -1 }]",
    ));
    let error = rated.start(StartContext::detached(1)).await.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("script: line 1: reply 1: logprobs: "),
        "{error}"
    );
}

#[tokio::test]
async fn grammars_are_let_through_where_the_script_says_so() {
    let replies = "guided = ['json_object']\n[[reply]]\ntext = '{\"a\": 1}'";
    let engine = ScriptedEngine::from_script(script(replies));
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(config.capabilities.guided, [GuidedKind::JsonObject].into());
    let mut request = GenerateRequest::from_text("m", "x");
    request.guided = Some(GuidedDecoding::JsonObject.into());
    config.check(&request).unwrap();
    assert_eq!(answer(&engine, request.clone()).await.text(), "{\"a\": 1}");
    request.guided = Some(GuidedDecoding::Regex("a".into()).into());
    assert_eq!(
        config.check(&request).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}

#[tokio::test]
async fn a_file_is_read_at_start_and_a_bad_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("replies.toml");
    let args = ScriptedArgs {
        script: path.clone(),
    };
    let missing = ScriptedEngine::from_args(&args);
    let error = missing.start(StartContext::detached(1)).await.unwrap_err();
    assert!(error.message().contains("replies.toml"), "{error}");
    missing.cleanup().await.unwrap();
    let endless = ScriptedArgs {
        script: "/dev/zero".into(),
    };
    let endless = ScriptedEngine::from_args(&endless);
    let error = endless.start(StartContext::detached(1)).await.unwrap_err();
    assert!(error.message().contains("larger than"), "{error}");

    std::fs::write(&path, "[[reply]]\ntext = 'from a file'").unwrap();
    let engine = ScriptedEngine::from_args(&args);
    engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(say(&engine, "x").await.text(), "from a file");
}

#[tokio::test]
async fn the_workers_probe_passes_whatever_the_script_says() {
    let replies = "[[reply]]\nmatch.contains = 'pi'\ntimes = 1\ntext = 'once'";
    let engine = ScriptedEngine::from_script(script(replies));
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    let probe = *config.canary.unwrap();
    for _ in 0..3 {
        let probed = answer(&engine, probe.clone()).await;
        assert_eq!(probed.finished().usage.completion_tokens, 1);
    }
    assert_eq!(say(&engine, "pi").await.text(), "once");
}
