//! Who may ask: API keys looked up before a handler runs, and what browsers may do across origins.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::handlers::App;
use super::messages;
use super::metrics::IGNORED;
use super::request_id::{ANTHROPIC_REQUEST_ID, REQUEST_ID, request_id};
use crate::config::Origin;
use crate::error::ApiError;
use crate::keys::Key;

/// Who asks.
#[derive(Debug, Clone, Default)]
pub(super) struct Caller {
    /// The key that the request came with; `None` on a server that asks for none.
    pub(super) key: Option<Arc<Key>>,
    /// Whether the program itself asks, for a batch or a person at its terminal.
    pub(super) is_local: bool,
}

impl Caller {
    /// The key's name.
    pub(super) fn name(&self) -> Option<&str> {
        self.key.as_deref().map(Key::name)
    }
}

/// Finds out who asks, or refuses.
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

/// The answer to a request that comes no further, counted under the name `endpoint`.
pub(super) fn refused(
    app: &App,
    request: &Request,
    endpoint: &'static str,
    error: &ApiError,
) -> Response {
    let id = request_id(request.headers());
    app.metrics.request(endpoint, &id).fail(error);
    if request.uri().path().starts_with("/v1/messages") {
        messages::anthropic_error(error, &id)
    } else {
        error.clone().into_response()
    }
}

/// What pages of these origins may do: everything that this server has. `None` where there are no such origins.
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
    ];
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods(methods)
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(shown);
    Some(layer)
}
