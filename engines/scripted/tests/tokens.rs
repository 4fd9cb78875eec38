//! Token mode: prompts and replies as token ids, and their log probabilities.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::sync::Arc;

use common::{Bytes, answer, script};
use futures_util::StreamExt;
use genset_backend_common::output::{TokenLogprob, TopLogprob};
use genset_backend_common::{
    EngineError, FinishReason, GenerateRequest, LLMEngine, RequestContext, StartContext,
};
use genset_conformance::Answer;
use genset_engine_scripted::{ScriptedEngine, Vocabulary};

fn engine(replies: &str) -> ScriptedEngine {
    ScriptedEngine::from_script(script(replies)).with_vocabulary(Arc::new(Bytes), 256)
}

async fn started(replies: &str) -> ScriptedEngine {
    let engine = engine(replies);
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

fn prompt(text: &str) -> GenerateRequest {
    GenerateRequest::from_tokens("m", Bytes.encode(text).unwrap())
}

#[tokio::test]
async fn the_last_user_message_is_found_by_its_marks() {
    let engine = started("[[reply]]\ntext = '[{{last_user}}]'").await;
    let chatml = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nhm<|im_end|>\n\
        <|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(answer(&engine, prompt(chatml)).await.text(), "[two]");
    assert_eq!(
        answer(&engine, prompt("no marks")).await.text(),
        "[no marks]"
    );

    let inst = "[prompt]\nuser_start = '[INST] '\nuser_end = ' [/INST]'\n[[reply]]\ntext = '({{last_user}})'";
    let engine = started(inst).await;
    let asked = answer(
        &engine,
        prompt("<s>[INST] a [/INST] b</s>[INST] c d [/INST]"),
    )
    .await;
    assert_eq!(asked.text(), "(c d)");
}

#[tokio::test]
async fn a_text_comes_token_by_token_and_a_chunk_at_once() {
    let engine =
        started("[[reply]]\nmatch.exact = 'chunks'\nchunks = ['ab', 'c']\n[[reply]]\ntext = 'xyz'")
            .await;
    assert_eq!(
        answer(&engine, prompt("tokens")).await.chunks,
        ["x", "y", "z"]
    );
    let chunks = answer(&engine, prompt("chunks")).await;
    assert_eq!(chunks.chunks, ["ab", "c"]);
    assert_eq!(chunks.finished().usage.completion_tokens, 3);
}

#[tokio::test]
async fn limits_and_stop_tokens_cut_inside_a_chunk() {
    let engine = started("[[reply]]\nchunks = ['abc', 'def']").await;
    let mut short = prompt("x");
    short.stop.max_tokens = Some(5);
    let short = answer(&engine, short).await;
    assert_eq!(short.chunks, ["abc", "de"]);
    assert_eq!(short.finished().reason, FinishReason::Length);

    let mut stopped = prompt("x");
    stopped.stop.eos_token_ids = [u32::from(b'e')].into();
    let stopped = answer(&engine, stopped).await;
    assert_eq!(stopped.chunks, ["abc", "d"]);
    assert_eq!(stopped.finished().stop_token, Some(u32::from(b'e')));
}

#[tokio::test]
async fn prompt_and_answer_stay_inside_the_context() {
    let engine = started("[[reply]]\ntext = 'abcdefgh'").await;
    let full = answer(&engine, prompt(&"p".repeat(253))).await;
    assert_eq!(
        (full.text().as_str(), full.finished().reason),
        ("abc", FinishReason::Length)
    );
}

async fn logprobs(engine: &ScriptedEngine, top: u32) -> Vec<TokenLogprob> {
    let mut request = prompt("x");
    request.output.logprobs = Some(top);
    let ctx = RequestContext::new("r");
    let outputs = engine.generate(request, ctx).await.unwrap();
    Answer::of(outputs.collect().await).logprobs()
}

fn candidate(text: u8, logprob: f32) -> TopLogprob {
    TopLogprob {
        token_id: u32::from(text),
        logprob,
    }
}

#[tokio::test]
async fn log_probabilities_are_the_scripts_and_else_certain() {
    let replies = r#"
        [[reply]]
        text = "YN"
        logprobs = [{ logprob = -1.5, alternatives = { N = -0.5, M = -3.0 } }]
    "#;
    let engine = started(replies).await;
    let rated = logprobs(&engine, 2).await;
    assert_eq!(rated[0].logprob, -1.5);
    assert_eq!(rated[0].top, [candidate(b'N', -0.5), candidate(b'Y', -1.5)]);
    assert_eq!(rated[1].logprob, 0.0);
    assert_eq!(rated[1].top, [candidate(b'N', 0.0), candidate(0, -9999.0)]);
    assert_eq!(logprobs(&engine, 0).await[0].top, []);
    assert_eq!(logprobs(&engine, 20).await[0].top.len(), 20);
}

async fn start_problem(replies: &str) -> String {
    let started = engine(replies).start(StartContext::detached(1)).await;
    started.unwrap_err().to_string()
}

#[tokio::test]
async fn what_tokens_cannot_do_is_refused_at_start() {
    let cases = [
        (
            "text = 'a'\nlogprobs = [{ logprob = 0, alternatives = { no = -1 } }]",
            "script: line 1: reply 1: logprobs, token 1, alternative \"no\": must be one token of the model's, not 2",
        ),
        (
            "text = 'a'\nmatch.last_role = 'tool'",
            "script: line 1: reply 1: match.last_role: ",
        ),
        (
            "chunks = ['a {{n_messages}}']",
            "script: line 1: reply 1: {{n_messages}}: ",
        ),
    ];
    for (reply, expected) in cases {
        let problem = start_problem(&format!("[[reply]]\n{reply}")).await;
        assert!(problem.starts_with(expected), "{problem}");
    }
}

/// A vocabulary without the letter z.
struct Partial;

impl Vocabulary for Partial {
    fn size(&self) -> u32 {
        256
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        match text.contains('z') {
            true => Err(EngineError::internal("no token for z")),
            false => Bytes.encode(text),
        }
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, EngineError> {
        Bytes.decode(tokens)
    }
}

#[tokio::test]
async fn a_text_without_tokens_is_the_requests_error() {
    let engine = ScriptedEngine::from_script(script("[[reply]]\ntext = '{{last_user}}'"));
    let engine = engine.with_vocabulary(Arc::new(Partial), 64);
    engine.start(StartContext::detached(1)).await.unwrap();
    let refused = engine.generate(prompt("z"), RequestContext::new("r")).await;
    assert_eq!(refused.unwrap_err().message(), "no token for z");
    assert_eq!(answer(&engine, prompt("a")).await.text(), "a");
}
