//! [`LocalFrontend`]: the server's routes without a listener.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use genset_runtime::Runtime;
use http::{Request, StatusCode, header};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::access::Caller;
use super::handlers::{App, local_router};
use super::request_id::REQUEST_ID;
use crate::budget::MemoryShare;
use crate::config::FrontendConfig;
use crate::error::{ApiError, ErrorCode};
use crate::keys::Key;
use crate::model::Models;

/// The routes of a [`FrontendServer`](super::FrontendServer) for the program itself. Requests get the same checks and errors as
/// over HTTP, without a port or keys.
#[derive(Debug, Clone)]
pub struct LocalFrontend {
    router: Router,
    app: App,
    /// Who sends the requests.
    caller: Caller,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalAnswer {
    /// The HTTP status: 200 to 599.
    pub status: u16,
    /// The value of `x-request-id`.
    pub request_id: String,
    /// After how long the same request may succeed, if the server says so.
    pub retry_after: Option<Duration>,
    /// The stable name of the error, if it has one, also in APIs whose error bodies have none.
    pub code: Option<&'static str>,
    /// The answer, or the error in the API's format: JSON. It keeps its part of the memory budget until it is dropped.
    pub body: Bytes,
}

impl LocalFrontend {
    /// Makes the routes for these models, with the limits of `config` and no access log. The metrics are registered with the
    /// runtime: create only one of these, or one server, for each runtime.
    #[must_use]
    pub fn new(runtime: &Runtime, models: Models, config: FrontendConfig) -> Self {
        let config = FrontendConfig {
            access_log: false,
            api_keys: None,
            ..config
        };
        let never = CancellationToken::new();
        Self::within(App::new(runtime, models, Arc::new(config), None, never))
    }

    /// The routes of a server, without a key.
    pub(super) fn within(app: App) -> Self {
        Self {
            router: local_router(app.clone()),
            app,
            caller: Caller {
                key: None,
                is_local: true,
            },
        }
    }

    /// The same routes for requests with this key.
    pub(crate) fn of(&self, key: Option<Arc<Key>>) -> Self {
        Self {
            caller: Caller {
                key,
                is_local: true,
            },
            ..self.clone()
        }
    }

    /// An empty share of the memory budget, for a caller that reads requests.
    pub(crate) fn memory(&self) -> MemoryShare {
        self.app.metrics.share()
    }

    /// Sends a JSON body as a POST to a path, such as `/v1/chat/completions`, and returns the whole answer, which must not be a
    /// stream.
    ///
    /// # Errors
    /// When the path is invalid, or the answer is not JSON. An error status is not an error here.
    ///
    /// # Cancel safety
    /// The request is cancelled when the future is dropped.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Result<LocalAnswer, ApiError> {
        let mut request = Request::post(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body.into()))
            .map_err(|error| {
                let message = format!("{path:?} is no path: {error}.");
                ApiError::new(StatusCode::NOT_FOUND, message)
            })?;
        request.extensions_mut().insert(self.caller.clone());
        let Ok(response) = self.router.clone().oneshot(request).await;
        let (head, body) = response.into_parts();
        let text = |name| head.headers.get(name).and_then(|value| value.to_str().ok());
        let retry_after = text(header::RETRY_AFTER).and_then(|seconds| seconds.parse().ok());
        let request_id = text(REQUEST_ID).unwrap_or_default().to_owned();
        let code = head.extensions.get::<ErrorCode>().map(|code| code.0);
        let no_json = || {
            let message = format!("The answer to {path} is no JSON.");
            ApiError::new(StatusCode::BAD_GATEWAY, message)
        };
        let body = to_bytes(body, usize::MAX).await.map_err(|_| no_json())?;
        let bytes = body.len();
        // An engine that writes the API's objects itself may write invalid JSON.
        let check = move |_: &_| {
            let is_json = serde_json::from_slice::<&RawValue>(&body).is_ok();
            Ok(is_json.then_some(body))
        };
        let body = self.app.models.work().run(bytes, None, check).await?;
        let body = body.ok_or_else(no_json)?;
        Ok(LocalAnswer {
            status: head.status.as_u16(),
            request_id,
            retry_after: retry_after.map(Duration::from_secs),
            code,
            body,
        })
    }
}
