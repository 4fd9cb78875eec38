//! Whole answers and event streams as HTTP responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::{HeaderName, HeaderValue, header};
use http_body::Frame;
use serde_json::Value;
use tokio::time::{Instant, Sleep};

use super::handlers::App;
use super::held::{held, holding};
use super::metrics::IGNORED;
use crate::budget::MemoryShare;
use crate::error::ApiError;
use crate::work::Owner;

/// Adds the header that names the fields without an effect.
pub(super) fn with_ignored(mut response: Response, ignored: Option<HeaderValue>) -> Response {
    if let Some(ignored) = ignored {
        response.headers_mut().insert(IGNORED, ignored);
    }
    response
}

/// Tokens that are ready together are sent together, up to about this many bytes: one write, and a bound on what a fast engine
/// queues for a slow client.
pub(super) const FRAME_BYTES: usize = 8 << 10;

/// The header that has nginx pass events on as they come. By default it collects 4 to 8 KiB of an answer first.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// A comment, which every client of events ignores.
pub(super) const COMMENT: &[u8] = b": keep-alive\n\n";

/// What writes the events of a stream, as tokens arrive. Dropping it cancels the answers that still run.
pub(super) trait WriteEvents: Send + Unpin + 'static {
    /// What a silent stream sends, so that neither its client nor a proxy takes its connection for dead.
    const KEEP_ALIVE: &'static [u8] = COMMENT;

    /// Writes what is ready, until nothing is ready or the frame has [`FRAME_BYTES`].
    fn fill(&mut self, cx: &mut Context<'_>, frame: &mut BytesMut);

    /// Whether all events are written.
    fn has_ended(&self) -> bool;

    /// Returns the share that holds the last events: their client may take them long after the stream is gone.
    fn last_share(&mut self) -> Option<MemoryShare> {
        None
    }
}

/// The body of a streamed answer.
struct EventBody<W> {
    events: W,
    frame: BytesMut,
    /// `None` if it may be silent for any time.
    silence: Option<Silence>,
}

/// Notices that a stream is silent, within twice the limit. Its timer is reset only when it fires: a token costs no more than a
/// look at it.
pub(super) struct Silence {
    limit: Duration,
    sleep: Pin<Box<Sleep>>,
    has_sent: bool,
}

impl Silence {
    /// `None` for a limit of 0.
    pub(super) fn new(limit: Duration) -> Option<Self> {
        (!limit.is_zero()).then(|| Self {
            limit,
            sleep: Box::pin(tokio::time::sleep(limit)),
            has_sent: false,
        })
    }

    /// Ready each time the timer fires and nothing was sent since it fired last.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.sleep.as_mut().poll(cx));
            self.sleep.as_mut().reset(Instant::now() + self.limit);
            if !std::mem::take(&mut self.has_sent) {
                return Poll::Ready(());
            }
        }
    }
}

impl<W: WriteEvents> http_body::Body for EventBody<W> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Self {
            events,
            frame,
            silence,
        } = &mut *self;
        events.fill(cx, frame);
        let has_ended = events.has_ended();
        if frame.is_empty() {
            if has_ended {
                return Poll::Ready(None);
            }
            let Some(silence) = silence else {
                return Poll::Pending;
            };
            ready!(silence.poll(cx));
            let bytes = Bytes::from_static(W::KEEP_ALIVE);
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        if let Some(silence) = silence {
            silence.has_sent = true;
        }
        let bytes = frame.split();
        let share = if has_ended { events.last_share() } else { None };
        let bytes = match share {
            Some(share) => holding(bytes, share),
            None => bytes.freeze(),
        };
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.events.has_ended() && self.frame.is_empty()
    }
}

/// The response that streams `events`, beginning with what is written in `frame`. It shows a sign of life when it is silent for
/// `keep_alive`, unless that is 0.
pub(super) fn event_response(
    events: impl WriteEvents,
    frame: BytesMut,
    keep_alive: Duration,
) -> Response {
    events_response(Body::new(EventBody {
        events,
        frame,
        silence: Silence::new(keep_alive),
    }))
}

/// The response whose body is events.
pub(super) fn events_response(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(BUFFERING, HeaderValue::from_static("no"));
    response
}

pub(super) fn json_response(value: &Value) -> Response {
    whole_response(value.to_string().into())
}

/// Like [`json_response`], for what may be large: it holds room in the memory budget until it is sent.
///
/// # Errors
/// A 503 if there is no memory for it.
pub(super) fn large_json_response(app: &App, value: &Value) -> Result<Response, ApiError> {
    held(value.to_string(), app.metrics.share()).map(whole_response)
}

/// Like [`large_json_response`], but makes and writes the value on a thread for long work.
///
/// # Errors
/// As [`large_json_response`].
pub(super) async fn list_response(
    app: &App,
    make: impl FnOnce() -> Value + Send + 'static,
) -> Result<Response, ApiError> {
    let share = app.metrics.share();
    let write = move |_: &Owner| held(make().to_string(), share);
    let json = app.models.work().run(usize::MAX, None, write).await?;
    Ok(whole_response(json))
}

/// A whole JSON answer.
pub(super) fn whole_response(json: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_silent_once_nothing_was_sent_between_two_looks() {
        let limit = Duration::from_secs(15);
        assert!(Silence::new(Duration::ZERO).is_none());
        let started = Instant::now();
        let mut silence = Silence::new(limit).unwrap();
        silence.has_sent = true;
        for seconds in [30, 45] {
            poll_fn(|cx| silence.poll(cx)).await;
            assert_eq!(started.elapsed().as_secs(), seconds);
        }
    }
}
