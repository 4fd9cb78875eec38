//! Whole answers and event streams as HTTP responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::{HeaderValue, header};
use http_body::Frame;
use serde_json::Value;

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

/// What writes the events of a stream, as tokens arrive. Dropping it cancels the answers that still run.
pub(super) trait WriteEvents: Send + Unpin + 'static {
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
}

impl<W: WriteEvents> http_body::Body for EventBody<W> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Self { events, frame } = &mut *self;
        events.fill(cx, frame);
        let has_ended = events.has_ended();
        if frame.is_empty() {
            return match has_ended {
                true => Poll::Ready(None),
                false => Poll::Pending,
            };
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

/// The response that streams `events`, beginning with what is written in `frame`.
pub(super) fn event_response(events: impl WriteEvents, frame: BytesMut) -> Response {
    let mut response = Response::new(Body::new(EventBody { events, frame }));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
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
