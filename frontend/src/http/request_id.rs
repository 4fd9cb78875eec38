//! The request's id: the client's, or one made here. Every answer carries it, so that its request can be found in the log and
//! among the spans.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::messages::reads_anthropics;

/// The header with the id.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The header in which Anthropic's clients look for the id.
pub(super) const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The longest id that is accepted from a client, in bytes.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Gives every request a usable id before any other layer sees it, and gives the answer the same id.
pub(super) async fn carry(mut request: Request, next: Next) -> Response {
    let id = match usable(request.headers()) {
        Some(id) => id.clone(),
        None => made(),
    };
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let is_anthropics = reads_anthropics(request.uri().path(), request.headers());
    let mut response = next.run(request).await;
    if is_anthropics {
        let headers = response.headers_mut();
        headers.insert(ANTHROPIC_REQUEST_ID, id.clone());
    }
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The id of a request that came through [`carry`].
pub(super) fn request_id(headers: &HeaderMap) -> String {
    let id = usable(headers).and_then(|id| id.to_str().ok());
    id.unwrap_or_default().to_owned()
}

/// The header, if it is short and printable.
fn usable(headers: &HeaderMap) -> Option<&HeaderValue> {
    let id = headers.get(REQUEST_ID)?;
    let is_usable = matches!(id.len(), 1..=MAX_REQUEST_ID_BYTES) && id.to_str().is_ok();
    is_usable.then_some(id)
}

fn made() -> HeaderValue {
    let id = format!("req-{:032x}", rand::random::<u128>());
    HeaderValue::try_from(id).unwrap_or_else(|_| HeaderValue::from_static("req-"))
}
