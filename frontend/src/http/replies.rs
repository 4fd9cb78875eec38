//! Whole answers and event streams as HTTP responses.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderValue, header};
use serde_json::Value;

use super::handlers::App;
use super::held::held;
use super::metrics::IGNORED;
use crate::error::ApiError;
use crate::work::Owner;

/// Adds the header that names the fields without an effect.
pub(super) fn with_ignored(mut response: Response, ignored: Option<HeaderValue>) -> Response {
    if let Some(ignored) = ignored {
        response.headers_mut().insert(IGNORED, ignored);
    }
    response
}

pub(super) fn event_response<B>(body: B) -> Response
where
    B: http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let mut response = Response::new(Body::new(body));
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
