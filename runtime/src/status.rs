//! The status server of a process: `/live`, `/ready`, `/health`, `/metrics` and, for a worker, `/control`. It has its own port
//! and, if the runtime has one, its own thread, so that it responds while everything else is saturated.

#[cfg(feature = "cli")]
mod args;
mod control;
mod exposition;
mod health;
mod serve;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

#[cfg(feature = "cli")]
pub use args::StatusArgs;
pub use control::ControlDoor;
use exposition::Exposition;
pub use health::{Health, HealthSource};

use crate::component::Runtime;
use crate::host_names::unknown_host;

/// The media type of the metrics.
pub const METRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns whether the process should get requests.
pub type Readiness = Arc<dyn Fn() -> bool + Send + Sync>;

/// A running status server; it ends when dropped or with its runtime.
#[derive(Debug)]
pub struct StatusServer {
    address: SocketAddr,
    _task: tokio_util::task::AbortOnDropHandle<()>,
}

#[derive(Clone)]
struct Source {
    metrics: Exposition,
    health: HealthSource,
}

impl StatusServer {
    /// Listens on `address` (port 0 for any) and serves the runtime's metrics and `health`. For a worker, also serves operators'
    /// requests to `control`.
    ///
    /// # Errors
    /// If the address cannot be listened on.
    pub async fn bind(
        address: SocketAddr,
        runtime: &Runtime,
        health: HealthSource,
        control: Option<ControlDoor>,
    ) -> std::io::Result<Self> {
        let bound = async move { Ok(TcpListener::bind(address).await) };
        let listener = runtime
            .run_vital(bound)
            .await
            .map_err(std::io::Error::other)??;
        let address = listener.local_addr()?;
        let source = Source {
            metrics: Exposition::new(runtime.metrics().clone()),
            health,
        };
        let is_local = address.ip().to_canonical().is_loopback();
        let mut router = router(source).merge(match control {
            Some(door) => control::router(door, is_local),
            None => control::closed(),
        });
        if is_local {
            router = router.layer(from_fn(refuse_other_names));
        }
        let task = runtime.spawn(serve::serve(listener, router));
        Ok(Self {
            address,
            _task: task,
        })
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn router(source: Source) -> Router {
    Router::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(source)
}

/// On loopback, responds only under this machine's own names. Otherwise any web page could read the responses by pointing its own
/// name at this address.
async fn refuse_other_names(request: Request, next: Next) -> Response {
    match unknown_host(request.headers(), request.uri(), |_| false) {
        None => next.run(request).await,
        Some(_) => {
            let message = "this port answers to its address and to localhost only\n";
            (StatusCode::FORBIDDEN, message).into_response()
        }
    }
}

/// 200 if the process should get requests, otherwise 503.
fn status_of(health: &Health) -> StatusCode {
    if health.is_ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

async fn ready(State(source): State<Source>) -> Response {
    let health = source.health.now();
    (status_of(&health), format!("{}\n", health.word())).into_response()
}

async fn health(State(source): State<Source>) -> Response {
    let health = source.health.now();
    let body = format!("{:#}\n", health.to_json());
    let json = [(header::CONTENT_TYPE, "application/json")];
    (status_of(&health), json, body).into_response()
}

async fn metrics(State(source): State<Source>) -> Response {
    match source.metrics.text().await {
        Some(text) => ([(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], text).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the process ends\n").into_response(),
    }
}
