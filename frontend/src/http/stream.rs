//! The events of a single streamed answer, for any API. Chats and completions stream several answers side by side; see `body`.

use std::task::{Context, Poll};
use std::time::Duration;

use axum::response::Response;
use bytes::BytesMut;
use http::StatusCode;

use super::metrics::RequestGuard;
use super::replies::{COMMENT, FRAME_BYTES, WriteEvents, event_response};
use crate::answer::{Answer, AnswerEnd, Ending, TokenLogprobs};
use crate::budget::MemoryShare;
use crate::error::ApiError;
use crate::markup::Delta;

/// How an API writes the events of one answer.
pub(super) trait AnswerEvents: Send + Unpin + 'static {
    /// What a silent stream sends; see [`WriteEvents::KEEP_ALIVE`].
    const KEEP_ALIVE: &'static [u8] = COMMENT;

    /// Writes the events before the answer.
    fn start(&mut self, out: &mut BytesMut);

    /// Writes a piece of the answer, and the logprobs that come with it.
    fn delta(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs], out: &mut BytesMut);

    /// Whether it keeps the whole answer to repeat it at the end.
    fn keeps_text(&self) -> bool {
        false
    }

    /// Writes the end of the answer.
    fn finish(self, end: &AnswerEnd, ending: Ending, out: &mut BytesMut);

    /// Writes the error that ended the answer.
    fn fail(self, error: ApiError, out: &mut BytesMut);
}

/// Returns the response that streams `answer`. It counts the request until its end, and keeps `held` until its last event is
/// sent. `keep_alive` is that of [`event_response`].
pub(super) fn stream<E: AnswerEvents>(
    mut events: E,
    answer: Answer,
    guard: RequestGuard,
    held: Option<MemoryShare>,
    keep_alive: Duration,
) -> Response {
    let mut guard = guard;
    let kept = guard.memory().another();
    let mut frame = BytesMut::new();
    events.start(&mut frame);
    let events = EventsOfOne {
        running: Some(Running { events, answer }),
        guard,
        kept,
        held,
        has_sent_text: false,
    };
    event_response(events, frame, keep_alive)
}

/// The events of one answer.
struct EventsOfOne<E> {
    /// `None` once it has ended.
    running: Option<Running<E>>,
    guard: RequestGuard,
    /// The memory of the answer, if all of it is kept.
    kept: MemoryShare,
    /// The memory of what its events contain besides the answer.
    held: Option<MemoryShare>,
    has_sent_text: bool,
}

struct Running<E> {
    events: E,
    answer: Answer,
}

impl<E: AnswerEvents> WriteEvents for EventsOfOne<E> {
    const KEEP_ALIVE: &'static [u8] = E::KEEP_ALIVE;

    /// The first text is sent at once.
    fn fill(&mut self, cx: &mut Context<'_>, frame: &mut BytesMut) {
        while frame.len() < FRAME_BYTES {
            let Some(Running { events, answer }) = &mut self.running else {
                return;
            };
            let mut has_text = false;
            let polled = answer.poll_deltas(cx, |delta, rated| {
                has_text = true;
                events.delta(delta, rated, frame);
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
                self.fail(error, frame);
                return;
            }
            match result {
                Ok(None) => {}
                Ok(Some(end)) => self.end(&end, frame),
                Err(error) => self.fail(error.into(), frame),
            }
            // Hidden reasoning writes nothing: a body that returned there would never be woken.
            if has_text && !frame.is_empty() && !std::mem::replace(&mut self.has_sent_text, true) {
                return;
            }
        }
    }

    fn has_ended(&self) -> bool {
        self.running.is_none()
    }

    fn last_share(&mut self) -> Option<MemoryShare> {
        let another = self.kept.another();
        let mut share = std::mem::replace(&mut self.kept, another);
        if let Some(held) = self.held.take() {
            share.absorb(held);
        }
        Some(share)
    }
}

impl<E: AnswerEvents> EventsOfOne<E> {
    fn end(&mut self, end: &AnswerEnd, frame: &mut BytesMut) {
        let Some(Running { mut events, answer }) = self.running.take() else {
            return;
        };
        let ending = answer.end(|delta, rated| events.delta(delta, rated, frame));
        let total = ending.total_usage(end);
        events.finish(end, ending, frame);
        self.guard.set_status(StatusCode::OK);
        self.guard.add_usage(&total);
    }

    fn fail(&mut self, error: ApiError, frame: &mut BytesMut) {
        self.guard.fail(&error);
        if let Some(Running { events, .. }) = self.running.take() {
            events.fail(error, frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::Waker;

    use bytes::Bytes;
    use futures_util::stream::poll_fn;
    use genset_backend_common::output::TextChunk;
    use genset_backend_common::{EngineError, MetricsRegistry, Output, OutputStream};
    use http_body::Body;
    use parking_lot::Mutex;
    use tokio::sync::mpsc;
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::budget::MemoryBudget;
    use crate::http::metrics::HttpMetrics;

    const HIDDEN: &str = "Hm.";

    /// An API's events that hide a part of the answer.
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

    type Sender = mpsc::Sender<Result<Output, EngineError>>;

    /// The body of an answer, and what its engine sends. The request's id is `request`.
    fn hiding() -> (Sender, axum::body::Body) {
        let (sender, mut receiver): (Sender, _) = mpsc::channel(2);
        let outputs = poll_fn(move |cx| receiver.poll_recv(cx));
        let outputs = OutputStream::from_raw(Box::pin(outputs));
        let answer = Answer::new(outputs, None, Arc::from([]), 1);
        let memory = MemoryBudget::new(usize::MAX);
        let metrics = HttpMetrics::register(&MetricsRegistry::default(), false, memory);
        let guard = metrics.request("messages", "request");
        let response = stream(Hiding, answer, guard, None, Duration::ZERO);
        (sender, response.into_body())
    }

    /// What the body sends now.
    fn next(body: &mut axum::body::Body) -> Poll<Option<Bytes>> {
        let polled = Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop()));
        polled.map(|frame| frame.unwrap().unwrap().into_data().ok())
    }

    /// A pending body has polled its answer, which wakes it. A body that stopped at hidden text would never be woken.
    #[tokio::test]
    async fn what_is_not_shown_does_not_stop_the_body() {
        let (sender, mut body) = hiding();
        let start = Bytes::from_static(b"start");
        assert_eq!(next(&mut body), Poll::Ready(Some(start)));
        assert_eq!(next(&mut body), Poll::Pending);
        for text in [HIDDEN, "shown"] {
            let chunk = TextChunk {
                text: text.into(),
                token_count: 1,
            };
            sender.try_send(Ok(Output::Text(chunk))).unwrap();
        }
        let shown = Bytes::from_static(b"shown");
        assert_eq!(next(&mut body), Poll::Ready(Some(shown)));
    }

    /// The `request_id` of each warning of a thread.
    #[derive(Debug, Clone, Default)]
    struct WarnedOf(Arc<Mutex<Vec<String>>>);

    impl Visit for WarnedOf {
        fn record_debug(&mut self, _field: &Field, _value: &dyn fmt::Debug) {}

        fn record_str(&mut self, field: &Field, value: &str) {
            if field.name() == "request_id" {
                self.0.lock().push(value.to_owned());
            }
        }
    }

    impl Subscriber for WarnedOf {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() <= tracing::Level::WARN
        }

        fn new_span(&self, _span: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _span: &Id, _values: &Record<'_>) {}

        fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

        fn event(&self, event: &Event<'_>) {
            event.record(&mut self.clone());
        }

        fn enter(&self, _span: &Id) {}

        fn exit(&self, _span: &Id) {}
    }

    #[tokio::test]
    async fn what_the_client_is_not_told_is_logged_with_its_request() {
        let warned = WarnedOf::default();
        let _log = tracing::subscriber::set_default(warned.clone());
        for (id, expected) in [(None, "request"), (Some("request.1f"), "request.1f")] {
            let error = EngineError::internal("/dev/nvidia0 is gone");
            let error = id.into_iter().fold(error, EngineError::with_request_id);
            let (sender, mut body) = hiding();
            sender.try_send(Err(error)).unwrap();
            assert!(next(&mut body).is_ready(), "it ends");
            assert_eq!(warned.0.lock().pop().as_deref(), Some(expected));
        }
    }
}
