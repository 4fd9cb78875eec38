use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, stream as raw};
use tokio::task::JoinSet;

use super::*;
use crate::context::{CancelReason, RequestContext};
use crate::request::TokenId;

async fn collect(outputs: OutputStream) -> Vec<Result<Output, EngineError>> {
    outputs.collect().await
}

fn tokens_of(items: &[Result<Output, EngineError>]) -> u32 {
    items.iter().flatten().map(Output::token_count).sum()
}

fn finished(item: Option<&Result<Output, EngineError>>) -> &Finished {
    match item {
        Some(Ok(Output::Finished(finished))) => finished,
        other => panic!("expected a terminal, got {other:?}"),
    }
}

#[tokio::test]
async fn a_writer_that_waits_is_told_that_its_request_was_cancelled() {
    let ctx = RequestContext::new("r");
    let (sink, _outputs) = channel_with_capacity(ctx.clone(), 1);
    sink.send(1.into()).await.unwrap();
    let mut waits = std::pin::pin!(sink.send(2.into()));
    assert_eq!(waits.as_mut().now_or_never(), None);
    ctx.cancel(CancelReason::Client);
    assert_eq!(waits.await, Err(SendError));
}

#[test]
fn a_thread_that_waits_is_told_that_its_request_was_cancelled() {
    let ctx = RequestContext::new("r");
    let (sink, mut outputs) = channel_with_capacity(ctx.clone(), 1);
    sink.blocking_send(1.into()).unwrap();
    let (begins, has_begun) = std::sync::mpsc::sync_channel(0);
    let thread = std::thread::spawn(move || {
        begins.send(()).unwrap();
        (sink.blocking_send(2.into()), sink.blocking_send(3.into()))
    });
    has_begun.recv().unwrap();
    let first = outputs.next().now_or_never().flatten();
    assert!(matches!(first, Some(Ok(Output::Tokens(_)))), "{first:?}");
    ctx.cancel(CancelReason::Client);
    let (_, last) = thread.join().unwrap();
    assert_eq!(last, Err(SendError));
}

#[tokio::test]
async fn items_after_the_terminal_are_dropped_and_named() {
    let terminal = Output::Finished(Box::new(Finish::stop().into_finished(1, 0)));
    let items = vec![Ok(Output::from(1)), Ok(terminal), Ok(Output::from(2))];
    let mut outputs = OutputStream::from_raw(Box::pin(raw::iter(items)));
    let mut seen = 0;
    while outputs.next().await.is_some() {
        seen += 1;
    }
    assert_eq!(seen, 2);
    assert_eq!(outputs.violation(), Some(Violation::ItemAfterTerminal));
    assert!(outputs.next().await.is_none());
}

#[tokio::test]
async fn an_error_is_terminal() {
    let items = vec![Err(EngineError::internal("x")), Ok(Output::from(2))];
    let outputs = OutputStream::from_raw(Box::pin(raw::iter(items)));
    assert_eq!(collect(outputs).await.len(), 1);
}

#[tokio::test]
async fn a_body_may_write_right_before_it_returns() {
    let ctx = RequestContext::new("r").with_prompt_tokens(2);
    let outputs = stream(ctx, |out| async move {
        out.token(1).await?;
        out.tokens([2, 3].into_iter().collect()).await?;
        out.tokens(TokenChunk::default()).await?;
        Ok(Finish::stop().with_last(4))
    });
    let items = collect(outputs).await;
    assert_eq!((items.len(), tokens_of(&items)), (3, 4));
    assert_eq!(finished(items.last()).usage.completion_tokens, 4);
}

/// Returns a stream's items within a minute, and its tokens in order of their ids.
async fn in_a_minute(outputs: OutputStream) -> (Vec<Result<Output, EngineError>>, Vec<TokenId>) {
    let limit = Duration::from_secs(60);
    let items = tokio::time::timeout(limit, collect(outputs)).await.unwrap();
    let mut tokens = Vec::new();
    for item in &items {
        if let Ok(Output::Tokens(chunk)) = item {
            tokens.extend_from_slice(&chunk.token_ids);
        }
    }
    tokens.sort_unstable();
    (items, tokens)
}

#[tokio::test(start_paused = true)]
async fn a_task_of_the_bodys_may_write() {
    let outputs = stream(RequestContext::new("r"), |out| async move {
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            for token in 0..4 {
                tokio::time::sleep(Duration::from_millis(1)).await;
                out.token(token).await?;
                out.token(token + 4).await?;
            }
            Ok::<_, EngineError>(())
        });
        while let Some(written) = tasks.join_next().await {
            written.unwrap()?;
        }
        Ok(Finish::length())
    });
    let (items, tokens) = in_a_minute(outputs).await;
    assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(finished(items.last()).usage.completion_tokens, 8);
}

#[tokio::test(start_paused = true)]
async fn writes_of_a_set_of_futures_wait_for_each_other() {
    let outputs = stream(RequestContext::new("r"), |out| async move {
        let out = Arc::new(out);
        let mut writes = FuturesUnordered::new();
        for token in 0..4 {
            let out = Arc::clone(&out);
            writes.push(async move {
                out.token(token).await?;
                out.token(token + 4).await
            });
        }
        while let Some(written) = writes.next().await {
            written?;
        }
        Ok(Finish::length())
    });
    let (items, tokens) = in_a_minute(outputs).await;
    assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(finished(items.last()).usage.completion_tokens, 8);
}

#[tokio::test(start_paused = true)]
async fn a_task_that_writes_is_told_that_the_stream_was_dropped() {
    let tasks = Arc::new(parking_lot::Mutex::new(JoinSet::new()));
    let spawning = Arc::clone(&tasks);
    let mut outputs = stream(RequestContext::new("r"), move |out| async move {
        spawning.lock().spawn(async move {
            out.token(1).await?;
            out.token(2).await
        });
        std::future::pending().await
    });
    outputs.next().await.unwrap().unwrap();
    assert!(outputs.next().now_or_never().flatten().is_none());
    tokio::task::yield_now().await;
    drop(outputs);
    let mut tasks = std::mem::take(&mut *tasks.lock());
    let ended = tokio::time::timeout(Duration::from_secs(60), tasks.join_next());
    let written = ended.await.unwrap().unwrap().unwrap();
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn cancelling_interrupts_a_waiting_body() {
    let ctx = RequestContext::new("r");
    let mut outputs = stream(ctx.clone(), |out| async move {
        out.token(1).await?;
        tokio::time::sleep(Duration::from_secs(1_000_000)).await;
        Ok(Finish::stop())
    });
    outputs.next().await.unwrap().unwrap();
    assert!(outputs.next().now_or_never().is_none());
    ctx.cancel(CancelReason::Client);
    let item = outputs.next().await;
    assert_eq!(finished(item.as_ref()).reason, FinishReason::Cancelled);
    assert_eq!(finished(item.as_ref()).usage.completion_tokens, 1);
    assert!(outputs.next().await.is_none());
    assert_eq!(outputs.violation(), None);
}

#[tokio::test]
async fn a_cancelled_request_yields_no_token() {
    let ctx = RequestContext::new("r");
    ctx.cancel(CancelReason::Client);
    let items = collect(stream(ctx, |out| async move {
        out.token(1).await?;
        Ok(Finish::stop())
    }))
    .await;
    assert_eq!(
        (items.len(), finished(items.first()).reason),
        (1, FinishReason::Cancelled)
    );
}

#[tokio::test]
async fn a_sink_dropped_unfinished_is_stream_incomplete() {
    let (sink, outputs) = channel(RequestContext::new("r"));
    sink.send(1.into()).await.unwrap();
    drop(sink);
    let items = collect(outputs).await;
    assert_eq!(
        items[1].as_ref().unwrap_err().kind(),
        ErrorKind::StreamIncomplete
    );
}

#[tokio::test]
async fn a_full_channel_gives_the_tokens_back() {
    let (sink, mut outputs) = channel_with_capacity(RequestContext::new("r"), 1);
    sink.try_send(1.into()).unwrap();
    let Err(TrySendError::Full(chunk)) = sink.try_send(2.into()) else {
        panic!("must be full")
    };
    outputs.next().await.unwrap().unwrap();
    sink.try_send(chunk).unwrap();
    sink.finish(Finish::length());
    let items = collect(outputs).await;
    assert_eq!(finished(items.last()).usage.completion_tokens, 2);
}

#[tokio::test]
async fn room_is_waited_for_until_the_reader_takes_an_item_or_leaves() {
    let (sink, mut outputs) = channel_with_capacity(RequestContext::new("r"), 1);
    assert!(!sink.is_full());
    sink.has_room().await;
    sink.try_send(1.into()).unwrap();
    assert!(sink.is_full());
    assert!(sink.has_room().now_or_never().is_none());
    outputs.next().await.unwrap().unwrap();
    sink.has_room().await;
    assert!(!sink.is_full(), "waiting for room takes none");
    sink.try_send(2.into()).unwrap();
    drop(outputs);
    sink.has_room().await;
    assert!(sink.is_closed());
}

#[tokio::test]
async fn dropping_the_stream_closes_the_sink() {
    let (sink, outputs) = channel(RequestContext::new("r"));
    drop(outputs);
    assert_eq!(sink.try_send(1.into()), Err(TrySendError::Closed));
    sink.closed().await;
}

#[tokio::test]
async fn cancelling_closes_the_sink_and_ends_the_stream_with_what_was_read() {
    let ctx = RequestContext::new("r");
    let (sink, mut outputs) = channel(ctx.clone());
    sink.send(1.into()).await.unwrap();
    outputs.next().await.unwrap().unwrap();
    sink.send(2.into()).await.unwrap();
    ctx.cancel(CancelReason::Shutdown);
    assert_eq!(sink.send(3.into()).await, Err(SendError));
    let items = collect(outputs).await;
    assert_eq!(
        (items.len(), finished(items.first()).usage.completion_tokens),
        (1, 1)
    );
}

#[test]
fn an_item_stays_small() {
    assert!(size_of::<Output>() <= 56, "{}", size_of::<Output>());
}
