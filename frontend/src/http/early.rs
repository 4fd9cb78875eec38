//! Streams that begin while their request still waits for its turn: signs of life, and then the answer, or its refusal as an event.
//! Not for silence after that: a streamed answer has [signs of life](super::replies) of its own.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::Frame;
use tokio::sync::oneshot;

use super::replies::{COMMENT, Silence, events_response};

/// Lets the stream of a request begin before its answer. Dropping it keeps the answer's status open.
#[derive(Debug)]
pub(super) struct Begin {
    limit: Duration,
    begin: oneshot::Sender<()>,
}

impl Begin {
    /// Returns it with what tells that the stream is to begin. `limit` is the silence that a stream may have.
    pub(super) fn new(limit: Duration) -> (Self, oneshot::Receiver<()>) {
        let (begin, begun) = oneshot::channel();
        (Self { limit, begin }, begun)
    }

    /// Waits for `turn`. The stream begins if that takes longer than the limit.
    pub(super) async fn unless<T>(self, turn: impl Future<Output = T>) -> T {
        let mut turn = pin!(turn);
        if let Ok(done) = tokio::time::timeout(self.limit, turn.as_mut()).await {
            return done;
        }
        // Nobody listens if the client has left.
        let _ = self.begin.send(());
        turn.await
    }
}

/// What stands before the JSON of an error in an event.
pub(super) const ERROR_DATA: &[u8] = b"data: ";

/// The same for Anthropic's API.
pub(super) const NAMED_ERROR_DATA: &[u8] = b"event: error\ndata: ";

/// The response of a stream that begins before `response`, which is the same stream or an error. `error_data` stands before the
/// error's JSON, and `limit` is the silence that a stream may have.
pub(super) fn early_response(
    response: BoxFuture<'static, Response>,
    error_data: &'static [u8],
    limit: Duration,
) -> Response {
    events_response(Body::new(EarlyBody {
        stage: Stage::Waiting(response),
        next: Some(Bytes::from_static(COMMENT)),
        silence: Silence::new(limit),
        error_data,
    }))
}

struct EarlyBody {
    stage: Stage,
    /// What is sent before anything else. At first a sign of life: the stream was silent before it began.
    next: Option<Bytes>,
    /// `None` if it may be silent for any time.
    silence: Option<Silence>,
    error_data: &'static [u8],
}

enum Stage {
    /// The response is not there yet.
    Waiting(BoxFuture<'static, Response>),
    /// Its body has the events of the answer.
    Answered(Body),
    /// Its body is the JSON of an error.
    Refused(Body),
    Ended,
}

impl http_body::Body for EarlyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let error_data = self.error_data;
        let Self {
            stage,
            next,
            silence,
            ..
        } = self.get_mut();
        loop {
            if let Some(bytes) = next.take() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            match stage {
                Stage::Waiting(response) => {
                    if let Poll::Ready(response) = response.as_mut().poll(cx) {
                        if response.status().is_success() {
                            *stage = Stage::Answered(response.into_body());
                        } else {
                            *stage = Stage::Refused(response.into_body());
                            *next = Some(Bytes::from_static(error_data));
                        }
                        continue;
                    }
                    let Some(silence) = silence else {
                        return Poll::Pending;
                    };
                    ready!(silence.poll(cx));
                    *next = Some(Bytes::from_static(COMMENT));
                }
                Stage::Answered(body) => return Pin::new(body).poll_frame(cx),
                Stage::Refused(body) => {
                    let frame = ready!(Pin::new(body).poll_frame(cx));
                    if frame.is_some() {
                        return Poll::Ready(frame);
                    }
                    *stage = Stage::Ended;
                    *next = Some(Bytes::from_static(b"\n\n"));
                }
                Stage::Ended => return Poll::Ready(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use futures_util::FutureExt;

    use super::*;
    use crate::error::{ApiError, Param};

    #[tokio::test]
    async fn a_refusal_of_a_stream_that_has_begun_is_an_event() {
        let error = ApiError::draining();
        let json = error.to_json(Param::plain).to_string();
        let refused = async move { error.response(Param::plain) }.boxed();
        let response = early_response(refused, NAMED_ERROR_DATA, Duration::from_secs(15));
        assert_eq!(response.status(), 200);
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let expected = format!(": keep-alive\n\nevent: error\ndata: {json}\n\n");
        assert_eq!(body, expected);
    }
}
