//! Tests the sample engine alone.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use futures_util::StreamExt;
use genset_backend_common::{
    CancelReason, ErrorKind, FinishReason, GenerateRequest, LLMEngine, Output, RequestContext,
    RequestField, Role, StartContext,
};
use genset_conformance::Answer;
use genset_engine_sample::{SampleArgs, SampleEngine};

async fn started(token_delay_ms: u64) -> SampleEngine {
    let engine = SampleEngine::from_args(&SampleArgs {
        vocab_size: 10,
        token_delay_ms,
    });
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

/// The tokens of an answer and its finish reason.
async fn answer(engine: &SampleEngine, request: GenerateRequest) -> (Vec<u32>, FinishReason) {
    let outputs = engine.generate(request, RequestContext::new("r")).await;
    let answer = Answer::of(outputs.unwrap().collect().await);
    (answer.tokens(), answer.reason().unwrap())
}

fn request(max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("sample", vec![3, 8]);
    request.stop.max_tokens = Some(max_tokens);
    request
}

#[tokio::test]
async fn tokens_rotate_from_the_prompts_last() {
    let engine = started(0).await;
    assert_eq!(
        answer(&engine, request(4)).await,
        (vec![9, 0, 1, 2], FinishReason::Length)
    );
}

#[tokio::test]
async fn stop_tokens_end_the_answer_and_are_not_part_of_it() {
    let engine = started(0).await;
    let mut stopping = request(8);
    stopping.stop.eos_token_ids = [1].into();
    assert_eq!(
        answer(&engine, stopping.clone()).await,
        (vec![9, 0], FinishReason::Stop)
    );
    stopping.stop.ignore_eos = true;
    assert_eq!(answer(&engine, stopping).await.0.len(), 8);
}

#[tokio::test(start_paused = true)]
async fn cancelling_ends_an_answer_that_waits() {
    let engine = started(1_000_000).await;
    let ctx = RequestContext::new("r");
    let mut outputs = engine.generate(request(4), ctx.clone()).await.unwrap();
    ctx.cancel(CancelReason::Client);
    let Some(Ok(Output::Finished(finished))) = outputs.next().await else {
        panic!("a terminal")
    };
    assert_eq!(finished.reason, FinishReason::Cancelled);
}

#[tokio::test]
async fn an_engine_that_does_not_run_refuses() {
    let engine = SampleEngine::from_args(&SampleArgs {
        vocab_size: 10,
        token_delay_ms: 0,
    });
    let refused = |engine: SampleEngine| async move {
        let error = engine
            .generate(request(1), RequestContext::new("r"))
            .await
            .unwrap_err();
        (error.kind(), engine)
    };
    let (kind, engine) = refused(engine).await;
    assert_eq!(kind, ErrorKind::EngineShutdown);
    engine.start(StartContext::detached(1)).await.unwrap();
    engine.cleanup().await.unwrap();
    engine.cleanup().await.unwrap();
    assert_eq!(refused(engine).await.0, ErrorKind::EngineShutdown);
}

#[tokio::test]
async fn an_empty_vocabulary_is_refused_at_start() {
    let engine = SampleEngine::from_args(&SampleArgs {
        vocab_size: 0,
        token_delay_ms: 0,
    });
    let error = engine.start(StartContext::detached(1)).await.unwrap_err();
    assert_eq!(error.at().map(|at| at.name()), Some("vocab_size"));
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_decode_instance_names_the_field_that_a_request_lacks() {
    let engine = SampleEngine::from_args(&SampleArgs {
        vocab_size: 10,
        token_delay_ms: 0,
    });
    let ctx = StartContext {
        role: Role::Decode,
        ..StartContext::detached(1)
    };
    engine.start(ctx).await.unwrap();
    let refused = engine.generate(request(1), RequestContext::new("r")).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.at(), Some(&RequestField::Transfer.into()));
}
