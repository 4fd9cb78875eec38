//! The body of an answer that is streamed alone, whatever its API's events are. Chat and completions stream several side by
//! side; theirs is in `body`.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body, Frame};

use super::body::{FRAME_BYTES, next_frame};
use super::held::holding;
use super::metrics::RequestGuard;
use super::replies::event_response;
use crate::answer::{Answer, AnswerEnd, Ending, TokenLogprobs};
use crate::budget::MemoryShare;
use crate::error::ApiError;
use crate::markup::Delta;

/// How an API writes the events of one answer.
pub(super) trait AnswerEvents: Send + Unpin + 'static {
    /// What comes before the answer.
    fn start(&mut self, out: &mut BytesMut);

    /// A piece of the answer, and the log probabilities that come with it.
    fn delta(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs], out: &mut BytesMut);

    /// Whether all of the answer is kept until it ends, to be repeated then.
    fn keeps_text(&self) -> bool {
        false
    }

    /// The answer has ended.
    fn finish(self, end: &AnswerEnd, ending: Ending, out: &mut BytesMut);

    /// The answer broke off.
    fn fail(self, error: ApiError, out: &mut BytesMut);
}

/// The response that streams `answer`. It counts the request to its end, and holds `held` until its last event is sent.
pub(super) fn stream<E: AnswerEvents>(
    mut events: E,
    answer: Answer,
    guard: RequestGuard,
    held: Option<MemoryShare>,
) -> Response {
    let mut guard = guard;
    let kept = guard.memory().another();
    let mut buffer = BytesMut::new();
    events.start(&mut buffer);
    event_response(AnswerBody {
        running: Some(Running { events, answer }),
        guard,
        kept,
        held,
        buffer,
        has_sent_text: false,
    })
}

/// The events of one answer, written as the tokens come. Dropping it cancels what still runs.
struct AnswerBody<E> {
    /// Gone when it has ended.
    running: Option<Running<E>>,
    guard: RequestGuard,
    /// Holds the answer where all of it is kept.
    kept: MemoryShare,
    /// Holds what its events say beside the answer.
    held: Option<MemoryShare>,
    buffer: BytesMut,
    has_sent_text: bool,
}

struct Running<E> {
    events: E,
    answer: Answer,
}

impl<E: AnswerEvents> AnswerBody<E> {
    /// Writes what is ready, until nothing is or the frame is full. The first text leaves at once.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while self.buffer.len() < FRAME_BYTES {
            let Some(Running { events, answer }) = &mut self.running else {
                return;
            };
            let mut has_text = false;
            let polled = answer.poll_deltas(cx, |delta, rated| {
                has_text = true;
                events.delta(delta, rated, &mut self.buffer);
            });
            let Poll::Ready(result) = polled else {
                return;
            };
            if has_text {
                self.guard.text();
            }
            if events.keeps_text()
                && let Err(error) = answer.hold(answer.given_bytes(), &mut self.kept)
            {
                self.fail(error);
                return;
            }
            match result {
                Ok(None) => {}
                Ok(Some(end)) => self.end(&end),
                Err(error) => self.fail(error.into()),
            }
            // Thoughts that are not shown come to nothing: nothing would wake a body that stops at them.
            if has_text
                && !self.buffer.is_empty()
                && !std::mem::replace(&mut self.has_sent_text, true)
            {
                return;
            }
        }
    }

    fn end(&mut self, end: &AnswerEnd) {
        let Some(Running { mut events, answer }) = self.running.take() else {
            return;
        };
        let buffer = &mut self.buffer;
        let ending = answer.end(|delta, rated| events.delta(delta, rated, buffer));
        let spent = ending.spent(end);
        events.finish(end, ending, buffer);
        self.guard.set_status(StatusCode::OK);
        self.guard.spent(&spent);
    }

    fn fail(&mut self, error: ApiError) {
        self.guard.fail(&error);
        if let Some(Running { events, .. }) = self.running.take() {
            events.fail(error, &mut self.buffer);
        }
    }

    /// The last events. Their client may take them long after this body has gone, so they take the room of all along.
    fn last_events(&mut self) -> Bytes {
        let another = self.kept.another();
        let mut share = std::mem::replace(&mut self.kept, another);
        if let Some(held) = self.held.take() {
            share.absorb(held);
        }
        holding(self.buffer.split(), share)
    }
}

impl<E: AnswerEvents> Body for AnswerBody<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        this.fill(cx);
        if this.running.is_none() && !this.buffer.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(this.last_events()))));
        }
        next_frame(&mut this.buffer, this.running.is_none())
    }

    fn is_end_stream(&self) -> bool {
        self.running.is_none() && self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use futures_util::stream::poll_fn;
    use genset_backend_common::output::TextChunk;
    use genset_backend_common::{EngineError, MetricsRegistry, Output, OutputStream};
    use tokio::sync::mpsc;

    use super::*;
    use crate::budget::MemoryBudget;
    use crate::http::metrics::HttpMetrics;

    const HIDDEN: &str = "Hm.";

    /// Events of an API that shows some of an answer.
    struct Hiding;

    impl AnswerEvents for Hiding {
        fn start(&mut self, out: &mut BytesMut) {
            out.extend_from_slice(b"start");
        }

        fn delta(&mut self, delta: Delta<'_>, _rated: &[TokenLogprobs], out: &mut BytesMut) {
            if let Delta::Content(text) = delta
                && text != HIDDEN
            {
                out.extend_from_slice(text.as_bytes());
            }
        }

        fn finish(self, _end: &AnswerEnd, _ending: Ending, out: &mut BytesMut) {
            out.extend_from_slice(b"end");
        }

        fn fail(self, _error: ApiError, out: &mut BytesMut) {
            out.extend_from_slice(b"error");
        }
    }

    /// A body that is pending has asked its answer, which wakes it. Where it stopped at what it does not show, nothing would.
    #[tokio::test]
    async fn what_is_not_shown_does_not_stop_the_body() {
        let (sender, mut receiver) = mpsc::channel::<Result<Output, EngineError>>(2);
        let outputs = poll_fn(move |cx| receiver.poll_recv(cx));
        let outputs = OutputStream::from_raw(Box::pin(outputs));
        let answer = Answer::new(outputs, None, Arc::from([]), 1);
        let memory = MemoryBudget::new(usize::MAX);
        let metrics = HttpMetrics::register(&MetricsRegistry::default(), false, memory);
        let guard = metrics.request("messages", "request");
        let mut body = stream(Hiding, answer, guard, None).into_body();
        let mut next = || {
            let polled = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
            polled.map(|frame| frame.unwrap().unwrap().into_data().ok())
        };
        assert_eq!(next(), Poll::Ready(Some(Bytes::from_static(b"start"))));
        assert_eq!(next(), Poll::Pending);
        for text in [HIDDEN, "shown"] {
            let chunk = TextChunk {
                text: text.into(),
                token_count: 1,
            };
            sender.try_send(Ok(Output::Text(chunk))).unwrap();
        }
        assert_eq!(next(), Poll::Ready(Some(Bytes::from_static(b"shown"))));
    }
}
