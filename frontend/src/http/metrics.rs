//! The metrics of the HTTP server. Names and labels are documented in the operators' guide.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::Usage;
use genset_backend_common::{LATENCY_BUCKETS_S, MetricsRegistry, RequestContext};
use genset_runtime::continue_trace;
use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::time::Instant;
use tracing::Span;

/// The status of a request that was dropped before its answer ended: nginx's, which the error table uses too.
const CLIENT_LEFT: u16 = 499;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    status: u16,
}

/// The server's metrics. Clones share.
#[derive(Debug, Clone)]
pub(super) struct HttpMetrics {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    requests: Family<RequestLabels, Counter>,
    in_flight: Gauge,
    connections: Gauge,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    time_to_first_token: Histogram,
    duration: Histogram,
}

impl HttpMetrics {
    pub(super) fn register(registry: &MetricsRegistry) -> Self {
        let shared = Shared {
            requests: Family::default(),
            in_flight: Gauge::default(),
            connections: Gauge::default(),
            prompt_tokens: Counter::default(),
            completion_tokens: Counter::default(),
            time_to_first_token: Histogram::new(LATENCY_BUCKETS_S),
            duration: Histogram::new(LATENCY_BUCKETS_S),
        };
        let name = |name: &str| format!("genset_http_{name}");
        registry.register(
            &name("requests"),
            "Requests by endpoint and status",
            shared.requests.clone(),
        );
        registry.register(
            &name("requests_in_flight"),
            "Requests not answered to the end",
            shared.in_flight.clone(),
        );
        registry.register(
            &name("connections"),
            "Open connections",
            shared.connections.clone(),
        );
        registry.register(
            &name("prompt_tokens"),
            "Prompt tokens of answered requests",
            shared.prompt_tokens.clone(),
        );
        registry.register(
            &name("completion_tokens"),
            "Completion tokens of answered requests",
            shared.completion_tokens.clone(),
        );
        registry.register(
            &name("time_to_first_token_seconds"),
            "From the request's last byte to the first text",
            shared.time_to_first_token.clone(),
        );
        registry.register(
            &name("request_duration_seconds"),
            "From the request's last byte to the answer's",
            shared.duration.clone(),
        );
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Counts a request in until the guard is dropped. Its status is that of a client that left until another is set.
    pub(super) fn request(&self, endpoint: &'static str) -> RequestGuard {
        self.shared.in_flight.inc();
        let started = Instant::now();
        RequestGuard {
            metrics: self.clone(),
            endpoint,
            status: StatusCode::from_u16(CLIENT_LEFT).unwrap_or(StatusCode::BAD_REQUEST),
            started,
            has_text: false,
            span: Span::none(),
        }
    }

    /// Counts a connection in until the guard is dropped.
    pub(super) fn connection(&self) -> ConnectionGuard {
        self.shared.connections.inc();
        ConnectionGuard(self.clone())
    }
}

/// A request being answered.
#[derive(Debug)]
pub(super) struct RequestGuard {
    metrics: HttpMetrics,
    endpoint: &'static str,
    status: StatusCode,
    started: Instant,
    has_text: bool,
    /// Open as long as the request is; disabled where nobody sees spans.
    span: Span,
}

impl RequestGuard {
    pub(super) fn set_status(&mut self, status: StatusCode) {
        self.status = status;
    }

    /// Opens the request's span as a child of the client's trace; the context is what workers shall see.
    pub(super) fn trace(&mut self, ctx: RequestContext) -> RequestContext {
        self.span = tracing::debug_span!(
            "http_request",
            otel.kind = "server",
            otel.status_code = tracing::field::Empty,
            http.response.status_code = tracing::field::Empty,
            endpoint = self.endpoint,
            request_id = ctx.id(),
        );
        continue_trace(&self.span, ctx)
    }

    /// Notes that the request has arrived: what it takes from here on is the server's time.
    pub(super) fn body_read(&mut self) {
        self.started = Instant::now();
    }

    /// Notes the first text; later calls change nothing.
    pub(super) fn text(&mut self) {
        if !std::mem::replace(&mut self.has_text, true) {
            self.metrics
                .shared
                .time_to_first_token
                .observe(self.elapsed().as_secs_f64());
        }
    }

    pub(super) fn usage(&self, usage: &Usage) {
        self.metrics
            .shared
            .prompt_tokens
            .inc_by(u64::from(usage.prompt_tokens));
        self.metrics
            .shared
            .completion_tokens
            .inc_by(u64::from(usage.completion_tokens));
    }

    fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.span
            .record("http.response.status_code", self.status.as_u16());
        if self.status.is_server_error() {
            self.span.record("otel.status_code", "ERROR");
        }
        let shared = &self.metrics.shared;
        shared.in_flight.dec();
        let labels = RequestLabels {
            endpoint: self.endpoint,
            status: self.status.as_u16(),
        };
        shared.requests.get_or_create(&labels).inc();
        shared.duration.observe(self.elapsed().as_secs_f64());
    }
}

/// An open connection.
#[derive(Debug)]
pub(super) struct ConnectionGuard(HttpMetrics);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.shared.connections.dec();
    }
}
