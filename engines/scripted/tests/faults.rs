//! Faults that the script asks for.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use common::{answer, read, say, text_engine};
use futures_util::{FutureExt, StreamExt};
use genset_backend_common::output::Violation;
use genset_backend_common::{
    CancelReason, ErrorKind, FinishReason, GenerateRequest, LLMEngine, Output, RequestContext,
};

fn request() -> GenerateRequest {
    GenerateRequest::from_text("m", "go")
}

#[tokio::test]
async fn a_refused_request_has_the_scripts_error_and_the_next_may_succeed() {
    let engine = text_engine(
        r#"
        [[reply]]
        times = 1
        [reply.fault]
        action = "refuse"
        kind = "overloaded"
        message = "come back later"
        retry_after_ms = 1500

        [[reply]]
        text = "fine"
        "#,
    )
    .await;
    let refused = engine.generate(request(), RequestContext::new("r")).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert_eq!(error.message(), "come back later");
    assert_eq!(
        error.details().retry_after,
        Some(Duration::from_millis(1500))
    );
    assert_eq!(say(&engine, "again").await.text(), "fine");
}

#[tokio::test]
async fn every_kind_of_error_can_be_scripted() {
    for kind in ErrorKind::ALL {
        let replies = format!(
            "[[reply]]\ntext = 'a b c'\nfault = {{ action = 'error', kind = '{kind}', after_chunks = 2 }}"
        );
        let failed = say(&text_engine(&replies).await, "go").await;
        assert_eq!(failed.chunks, ["a", " b"]);
        let error = failed.end.unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.message().contains(kind.name()), "{error}");
    }
}

#[tokio::test]
async fn an_error_may_come_before_any_text() {
    let replies = "[[reply]]\nfault = { action = 'error', kind = 'unavailable' }";
    let failed = say(&text_engine(replies).await, "go").await;
    assert_eq!(failed.text(), "");
    assert_eq!(failed.end.unwrap_err().kind(), ErrorKind::Unavailable);
}

/// A fault that waits for more chunks than the reply has must not become a success.
#[tokio::test]
async fn a_fault_past_the_last_chunk_takes_the_place_of_the_end() {
    let replies = "[[reply]]\ntext = 'a b'\nfault = { action = 'error', kind = 'internal', after_chunks = 9 }";
    let engine = text_engine(replies).await;
    let failed = say(&engine, "go").await;
    assert_eq!(failed.text(), "a b");
    assert_eq!(failed.end.unwrap_err().kind(), ErrorKind::Internal);
    let mut short = request();
    short.stop.max_tokens = Some(1);
    assert_eq!(
        answer(&engine, short).await.finished().reason,
        FinishReason::Length
    );
}

#[tokio::test(start_paused = true)]
async fn a_hang_lasts_until_the_request_is_cancelled() {
    let replies = "[[reply]]\ntext = 'a b c'\nfault = { action = 'hang', after_chunks = 1 }";
    let engine = text_engine(replies).await;
    let ctx = RequestContext::new("r");
    let mut outputs = engine.generate(request(), ctx.clone()).await.unwrap();
    assert!(matches!(outputs.next().await, Some(Ok(Output::Text(_)))));
    let day = Duration::from_secs(24 * 3600);
    assert!(tokio::time::timeout(day, outputs.next()).await.is_err());
    ctx.cancel(CancelReason::Deadline);
    let ended = read(outputs).await;
    assert_eq!(ended.finished().reason, FinishReason::Cancelled);
    assert_eq!(ended.finished().usage.completion_tokens, 1);
}

#[tokio::test]
async fn a_panic_is_one_requests_alone() {
    let replies = "[[reply]]\ntimes = 1\ntext = 'a b'\nfault = { action = 'panic', after_chunks = 1 }\n\
        [[reply]]\ntext = 'alive'";
    let engine = text_engine(replies).await;
    let mut outputs = engine
        .generate(request(), RequestContext::new("r"))
        .await
        .unwrap();
    assert!(matches!(outputs.next().await, Some(Ok(Output::Text(_)))));
    let panicked = AssertUnwindSafe(outputs.next()).catch_unwind().await;
    assert!(panicked.is_err());
    assert_eq!(say(&engine, "go").await.text(), "alive");
}

#[tokio::test]
async fn a_stream_may_vanish_without_its_terminal() {
    for after_chunks in [0, 2, 9] {
        let replies = format!(
            "[[reply]]\ntext = 'a b c'\nfault = {{ action = 'vanish', after_chunks = {after_chunks} }}"
        );
        let engine = text_engine(&replies).await;
        let mut outputs = engine
            .generate(request(), RequestContext::new("r"))
            .await
            .unwrap();
        let mut texts = 0;
        let error = loop {
            match outputs.next().await.unwrap() {
                Ok(Output::Text(_)) => texts += 1,
                Ok(other) => panic!("{other:?}"),
                Err(error) => break error,
            }
        };
        assert_eq!(texts, after_chunks.min(3));
        assert_eq!(error.kind(), ErrorKind::StreamIncomplete);
        assert_eq!(outputs.violation(), Some(Violation::EndedWithoutTerminal));
        assert!(outputs.next().await.is_none());
    }
}
