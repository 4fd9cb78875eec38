//! `/control` on a worker's status port: the operations of `genset control`, for this worker only.
//!
//! Access is as on the request plane: with a control secret, for callers that present it; without one, for programs on this
//! machine. Web pages have no access: browsers send `Origin` with every modifying request, and such requests are refused.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use genset_backend_common::ports::Control;
use genset_backend_common::{EngineError, error::At};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::controls::{OPERATIONS, perform, request_of};
use crate::plane::WireSecret;

/// How long receiving a request's body may take.
const BODY_TIME: Duration = Duration::from_secs(10);

/// The handler of `/control`, and its access rules.
#[derive(Clone)]
pub struct ControlDoor {
    control: Arc<dyn Control>,
    secret: Option<WireSecret>,
}

impl ControlDoor {
    /// Serves `control` to callers that present `secret`; without a secret, only on a loopback port.
    #[must_use]
    pub fn new(control: Arc<dyn Control>, secret: Option<WireSecret>) -> Self {
        Self { control, secret }
    }
}

genset_backend_common::debug_as!(|it| ControlDoor {
    secret: it.secret,
    ..
});

#[derive(Clone)]
struct Open {
    door: ControlDoor,
    is_local: bool,
    /// The runtime for engine requests: not the thread that serves the health endpoints.
    tasks: Handle,
}

/// The routes of a process with a worker, which runs on the current runtime; `is_local` if only this machine reaches the port.
pub(super) fn router(door: ControlDoor, is_local: bool) -> Router {
    let open = Open {
        door,
        is_local,
        tasks: Handle::current(),
    };
    Router::new()
        .route("/control", get(list))
        .route("/control/{op}", post(ask).get(how))
        .layer(from_fn_with_state(open.clone(), check))
        .with_state(open)
}

/// The routes of a process without a worker.
pub(super) fn closed() -> Router {
    let refuse = || async {
        let error = EngineError::not_found("this process has no worker; ask one of them");
        refused(&error)
    };
    Router::new()
        .route("/control", any(refuse))
        .route("/control/{op}", any(refuse))
}

async fn check(State(open): State<Open>, request: Request, next: Next) -> Response {
    match open.right_of(request.headers()) {
        Ok(()) => next.run(request).await,
        Err((status, message)) => {
            let body = json!({"error": {"kind": "forbidden", "message": message}});
            let mut response = (status, in_json(&body)).into_response();
            if status == StatusCode::UNAUTHORIZED {
                let scheme = HeaderValue::from_static("Bearer");
                response
                    .headers_mut()
                    .insert(header::WWW_AUTHENTICATE, scheme);
            }
            response
        }
    }
}

impl Open {
    fn right_of(&self, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        if headers.contains_key(header::ORIGIN) {
            return Err((StatusCode::FORBIDDEN, "web pages may not control workers"));
        }
        match &self.door.secret {
            None if self.is_local => Ok(()),
            None => Err((
                StatusCode::FORBIDDEN,
                "control is off: other machines can reach this port, and the worker has no --control-secret-file",
            )),
            Some(secret) => {
                if given_secret(headers).is_some_and(|given| secret.is(given)) {
                    return Ok(());
                }
                Err((
                    StatusCode::UNAUTHORIZED,
                    "send the secret of the worker's --control-secret-file, as `Authorization: Bearer SECRET`",
                ))
            }
        }
    }
}

/// The secret that a request presents. The scheme may be in any case, as for API keys.
fn given_secret(headers: &HeaderMap) -> Option<&[u8]> {
    let given = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, secret) = given.split_at_checked(b"Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then_some(secret.trim_ascii())
}

async fn list() -> impl IntoResponse {
    let operations = OPERATIONS.map(|operation| {
        let takes: Value = serde_json::from_str(operation.takes).unwrap_or_default();
        json!({"op": operation.op, "takes": takes, "does": operation.does})
    });
    in_json(&json!({"operations": operations}))
}

async fn how(Path(op): Path<String>) -> Response {
    let message = format!("operations need POST: POST /control/{op}; GET /control lists all");
    let body = json!({"error": {"kind": "invalid_argument", "message": message}});
    let allow = [(header::ALLOW, "POST")];
    (StatusCode::METHOD_NOT_ALLOWED, allow, in_json(&body)).into_response()
}

async fn ask(State(open): State<Open>, Path(op): Path<String>, request: Request) -> Response {
    let body = match timeout(BODY_TIME, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(rejection)) => return rejection.into_response(),
        Err(_elapsed) => {
            let message = "the body did not come in time\n";
            return (StatusCode::REQUEST_TIMEOUT, message).into_response();
        }
    };
    let request = match fields_of(&body).and_then(|fields| request_of(&op, fields)) {
        Ok(request) => request,
        Err(error) => return refused(&error),
    };
    let control = Arc::clone(&open.door.control);
    let performed = async move { perform(&*control, request).await };
    let reply = AbortOnDropHandle::new(open.tasks.spawn(performed)).await;
    match reply {
        Ok(Ok(reply)) => in_json(&reply).into_response(),
        Ok(Err(error)) => refused(&error),
        Err(_ended) => refused(&EngineError::engine_shutdown("the process ends")),
    }
}

/// An empty body means no fields.
fn fields_of(body: &[u8]) -> Result<Value, EngineError> {
    if body.trim_ascii().is_empty() {
        return Ok(json!({}));
    }
    serde_json::from_slice(body)
        .map_err(|error| EngineError::invalid_argument(At::other("body"), error.to_string()))
}

fn in_json(value: &impl Serialize) -> ([(HeaderName, &'static str); 1], String) {
    // Names are strings and numbers are finite, so JSON can represent everything.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    ([(header::CONTENT_TYPE, "application/json")], text)
}

fn refused(error: &EngineError) -> Response {
    let status = StatusCode::from_u16(error.policy().http_status)
        .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = json!({"error": {"kind": error.kind().name(), "message": error.to_string()}});
    (status, in_json(&body)).into_response()
}
