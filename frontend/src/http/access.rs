//! Who may send requests: looks up API keys before a handler runs, and sets what browsers may do across origins.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::handlers::App;
use super::messages;
use super::metrics::IGNORED;
use super::request_id::{ANTHROPIC_REQUEST_ID, REQUEST_ID, request_id};
use crate::config::Origin;
use crate::error::{ApiError, SHOULD_RETRY};
use crate::keys::Key;

/// How long a browser may go by an answer to its `OPTIONS`. Browsers take two hours at most; without a time, seconds.
const PREFLIGHT_MAX_AGE: Duration = Duration::from_secs(2 * 60 * 60);

/// Who sent a request.
#[derive(Debug, Clone, Default)]
pub(super) struct Caller {
    /// The request's API key; `None` if the server requires no keys.
    pub(super) key: Option<Arc<Key>>,
    /// Whether the program itself sent it, for a batch or for a person at its terminal.
    pub(super) is_local: bool,
}

impl Caller {
    /// The key's name.
    pub(super) fn name(&self) -> Option<&str> {
        self.key.as_deref().map(Key::name)
    }
}

/// Identifies the caller, or refuses the request.
pub(super) async fn identify(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let found = app.keys.as_ref().map(|keys| keys.find(request.headers()));
    match found.transpose() {
        Ok(key) => {
            let caller = Caller {
                key,
                is_local: false,
            };
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => refused(&app, &request, "unauthorized", &error),
    }
}

/// The response to a request that is refused here. Counts it under the name `endpoint`.
pub(super) fn refused(
    app: &App,
    request: &Request,
    endpoint: &'static str,
    error: &ApiError,
) -> Response {
    let id = request_id(request.headers());
    app.metrics.request(endpoint, &id).fail(error);
    messages::refusal(request.uri().path(), request.headers(), error)
}

/// Allows pages of these origins everything that this server offers. `None` if there are no such origins.
pub(super) fn cors(origins: &[Origin]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let origins = if origins.iter().any(Origin::is_any) {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().map(Origin::header).cloned())
    };
    let methods = [Method::GET, Method::POST, Method::DELETE];
    let shown = [
        REQUEST_ID,
        ANTHROPIC_REQUEST_ID,
        IGNORED,
        header::RETRY_AFTER,
        SHOULD_RETRY,
    ];
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods(methods)
        .allow_headers(AllowHeaders::mirror_request())
        .max_age(PREFLIGHT_MAX_AGE)
        .expose_headers(shown);
    Some(layer)
}
