//! The metrics of the HTTP server. Names and labels are documented in the operators' guide.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::Usage;
use genset_backend_common::{
    MetricsRegistry, RequestContext, context::TraceContext, handles::LATENCY_BUCKETS_S,
};
use genset_runtime::continue_trace;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Span;

use super::access::Caller;
use crate::answer::{Account, StepMetrics, TokenCounters, TotalUsage};
use crate::budget::{MemoryBudget, MemoryShare};
use crate::error::{ApiError, shown};
use crate::keys::cache_salt;
use crate::model::ServedModel;
use crate::openai::{CommonParams, Hints};
use crate::pipeline::{Answers, Prepared, REASONING_EFFORT, Room};
use crate::work::Place;

/// The status of a request that was dropped before its answer ended: nginx's code, which the error table uses too.
const CLIENT_LEFT: u16 = 499;

/// The request header that names the data-parallel rank which must serve it.
const RANK: &str = "x-genset-data-parallel-rank";

/// The response header that names the request's fields without an effect.
pub(super) const IGNORED: HeaderName = HeaderName::from_static("x-genset-ignored");

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    endpoint: &'static str,
    kind: &'static str,
}

/// Bucket bounds of the length histograms, in tokens.
const LENGTH_BUCKETS: [f64; 16] = [
    1.0,
    4.0,
    16.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16_384.0,
    32_768.0,
    65_536.0,
    131_072.0,
    1_048_576.0,
];

/// The server's metrics. Clones share state.
#[derive(Debug, Clone)]
pub(super) struct HttpMetrics {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    requests: Family<RequestLabels, Counter>,
    in_flight: Gauge,
    /// Requests that arrived whole and were accepted. A draining server refuses all others.
    under_way: watch::Sender<usize>,
    connections: Gauge,
    refused_connections: Counter,
    tokens: TokenCounters,
    cached_tokens: Counter,
    reasoning_tokens: Counter,
    input_length: Histogram,
    output_length: Histogram,
    failures: Family<FailureLabels, Counter>,
    steps: StepMetrics,
    duration: Histogram,
    has_access_log: bool,
    memory: MemoryBudget,
}

impl HttpMetrics {
    /// Registers the metrics of a server whose requests take their memory from `memory`.
    pub(super) fn register(
        registry: &MetricsRegistry,
        has_access_log: bool,
        memory: MemoryBudget,
    ) -> Self {
        memory.register(registry);
        let shared = Shared {
            requests: registry.create("genset_http_requests", "Requests by endpoint and status"),
            in_flight: registry.create(
                "genset_http_requests_in_flight",
                "Requests not answered to the end",
            ),
            under_way: watch::Sender::new(0),
            connections: registry.create("genset_http_connections", "Open connections"),
            refused_connections: registry.create(
                "genset_http_refused_connections",
                "Connections closed because their peer had too many",
            ),
            tokens: TokenCounters {
                prompt: registry.create(
                    "genset_http_prompt_tokens",
                    "Prompt tokens that engines accepted",
                ),
                completion: registry.create(
                    "genset_http_completion_tokens",
                    "Completion tokens given, also of requests that ended early",
                ),
            },
            cached_tokens: registry.create(
                "genset_http_cached_tokens",
                "Prompt tokens that engines had in their cache",
            ),
            reasoning_tokens: registry.create(
                "genset_http_reasoning_tokens",
                "Reasoning tokens of answered requests",
            ),
            input_length: registry.histogram(
                "genset_http_input_length_tokens",
                "Prompt tokens of an answered request",
                LENGTH_BUCKETS,
            ),
            output_length: registry.histogram(
                "genset_http_output_length_tokens",
                "Completion tokens of an answered request",
                LENGTH_BUCKETS,
            ),
            failures: registry.create(
                "genset_http_failures",
                "Requests that ended with an error, by what went wrong",
            ),
            steps: StepMetrics::register(registry),
            has_access_log,
            memory,
            duration: registry.histogram(
                "genset_http_request_duration_seconds",
                "From the request's last byte to the answer's",
                LATENCY_BUCKETS_S,
            ),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Waits until no request is under way. A request whose body is still arriving does not count.
    pub(super) async fn idle(&self) {
        let mut under_way = self.shared.under_way.subscribe();
        // The sender lives as long as `self`.
        drop(under_way.wait_for(|count| *count == 0).await);
    }

    /// Counts a request until the guard is dropped. Its status is that of a client that left, until another is set.
    pub(super) fn request(&self, endpoint: &'static str, request_id: &str) -> RequestGuard {
        self.shared.in_flight.inc();
        let started = Instant::now();
        RequestGuard {
            metrics: self.clone(),
            endpoint,
            status: StatusCode::from_u16(CLIENT_LEFT).unwrap_or(StatusCode::BAD_REQUEST),
            started,
            first_text: None,
            account: self.account(None),
            model: String::new(),
            request_id: request_id.to_owned(),
            ctx: None,
            caller: Caller::default(),
            rank: None,
            memory: self.shared.memory.share(),
            ignored: None,
            place: None,
            span: Span::none(),
        }
    }

    /// Returns an empty share of the memory budget, for work that is not a request to a model.
    pub(super) fn share(&self) -> MemoryShare {
        self.shared.memory.share()
    }

    fn account(&self, caller: Option<&Caller>) -> Arc<Account> {
        let key = caller.and_then(|caller| caller.key.clone());
        Arc::new(Account::new(key, self.shared.tokens.clone()))
    }

    /// Counts a connection that was closed because its peer has too many.
    pub(super) fn refuse_connection(&self) {
        self.shared.refused_connections.inc();
    }

    /// Counts a connection until the guard is dropped.
    pub(super) fn connection(&self) -> ConnectionGuard {
        self.shared.connections.inc();
        ConnectionGuard(self.clone())
    }
}

/// A request in progress.
#[derive(Debug)]
pub(super) struct RequestGuard {
    metrics: HttpMetrics,
    endpoint: &'static str,
    status: StatusCode,
    started: Instant,
    /// When the first text was ready to send.
    first_text: Option<Instant>,
    /// Its cost, charged as tokens are produced.
    account: Arc<Account>,
    model: String,
    request_id: String,
    /// The context that workers receive; `None` until the request is traced.
    ctx: Option<RequestContext>,
    caller: Caller,
    /// The data-parallel rank that its header names.
    rank: Option<u32>,
    /// The memory held for the request until its answer ends.
    memory: MemoryShare,
    /// The value of the answer's header for fields without an effect.
    ignored: Option<HeaderValue>,
    /// Its place among the requests to its model, held until the answer ends.
    place: Option<Place>,
    /// Open as long as the request is; disabled if no subscriber records spans.
    span: Span,
}

impl RequestGuard {
    pub(super) fn set_status(&mut self, status: StatusCode) {
        self.status = status;
    }

    /// Accepts the request, and opens its span as a child of the client's trace. Returns the context for workers. Called once.
    pub(super) fn trace(&mut self, ctx: RequestContext) -> RequestContext {
        self.span = tracing::debug_span!(
            "http_request",
            otel.kind = "server",
            otel.status_code = tracing::field::Empty,
            http.response.status_code = tracing::field::Empty,
            // The client's own id; `request_id` has a suffix that makes it unique.
            "http.response.header.x-request-id" = self.request_id,
            endpoint = self.endpoint,
            request_id = ctx.id(),
        );
        let ctx = continue_trace(&self.span, ctx);
        self.ctx = Some(ctx.clone());
        let shared = &self.metrics.shared;
        shared.under_way.send_modify(|count| *count += 1);
        ctx
    }

    /// Notes that the request has arrived: time counts as the server's from here on.
    pub(super) fn body_read(&mut self) {
        self.started = Instant::now();
    }

    /// Notes the caller, and counts the request on the caller's account.
    ///
    /// # Errors
    /// A 429 when one of the caller's quotas is used up.
    pub(super) fn admit(&mut self, caller: Caller) -> Result<(), ApiError> {
        let key = caller.key.clone();
        if key.is_some() {
            self.account = self.metrics.account(Some(&caller));
        }
        // Also for a refused request: operators look for callers that send too many.
        self.caller = caller;
        key.map_or(Ok(()), |key| key.admit())
    }

    /// Its part of the memory budget. Whatever may outlive the request needs [another](MemoryShare::another) share.
    pub(super) fn memory(&mut self) -> &mut MemoryShare {
        &mut self.memory
    }

    /// Prepares a job with room for what is made of the parsed request: the template's copy, then text, then tokens. The room
    /// lasts as long as the work does, even if the client leaves. Afterwards the request holds what the job holds.
    ///
    /// # Errors
    /// The errors of the job; a 503 if there is no memory for it.
    pub(super) async fn prepare<J, F>(
        &mut self,
        ctx: &RequestContext,
        job: impl FnOnce(Room) -> F,
    ) -> Result<J, ApiError>
    where
        J: Prepared,
        F: Future<Output = Result<J, ApiError>>,
    {
        let mut memory = self.memory.another();
        memory.grow(2 * self.memory.bytes())?;
        memory.absorb(std::mem::replace(&mut self.memory, memory.another()));
        let deadline = ctx.deadline();
        let room = Room {
            deadline,
            memory,
            salt: self.callers_salt(),
        };
        let job = job(room).await?;
        self.memory.resize(job.held_bytes())?;
        Ok(job)
    }

    /// Waits for a place among the requests to its model.
    ///
    /// # Errors
    /// A 429 when too many requests wait already, a 504 when the deadline passes first.
    pub(super) async fn enter(
        &mut self,
        model: &ServedModel,
        deadline: Option<Instant>,
    ) -> Result<(), ApiError> {
        self.place = Some(model.admission.admit(deadline).await?);
        Ok(())
    }

    /// Notes the model that the request names.
    pub(super) fn model(&mut self, name: &str) {
        self.model = shown(name).into_owned();
    }

    /// Notes the fields without an effect. `effort` is the API's name for a chat's `reasoning_effort`.
    pub(super) fn ignores(&mut self, hints: &Hints, effort: &str) {
        let ours = |field| {
            if field == REASONING_EFFORT {
                effort
            } else {
                field
            }
        };
        let names: Vec<&str> = hints.fields().map(ours).collect();
        if !names.is_empty() {
            // These are names of known fields only.
            self.ignored = HeaderValue::try_from(names.join(", ")).ok();
        }
    }

    /// The value of the answer's header [`IGNORED`].
    pub(super) fn ignored(&mut self) -> Option<HeaderValue> {
        self.ignored.take()
    }

    /// Notes the error, and logs what the client is not told of it.
    pub(super) fn fail(&mut self, error: &ApiError) {
        error.log(Some(&self.request_id));
        self.status = error.status;
        let labels = FailureLabels {
            endpoint: self.endpoint,
            kind: error.failure(),
        };
        self.metrics.shared.failures.get_or_create(&labels).inc();
    }

    /// Measures the pace of its answers, and charges their tokens to the caller.
    pub(super) fn measure(&self, answers: &mut Answers) {
        answers.measure(&self.metrics.shared.steps, self.started, &self.account);
    }

    /// Notes when the first text was ready; later calls change nothing.
    pub(super) fn text(&mut self) {
        self.first_text.get_or_insert_with(Instant::now);
    }

    /// Notes the data-parallel rank that a header names.
    ///
    /// # Errors
    /// A 400 that names the header.
    pub(super) fn read_rank(&mut self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(value) = headers.get(RANK) else {
            return Ok(());
        };
        let rank = value.to_str().ok().and_then(|value| value.parse().ok());
        let problem = "expected a rank, an integer between 0 and 4294967295";
        self.rank = Some(rank.ok_or_else(|| ApiError::invalid(RANK, problem))?);
        Ok(())
    }

    /// The rank that a header names.
    pub(super) fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// Adds what is known of a request besides its body: the rank from its header, and its caller's key. The key goes into the
    /// salt, so that keys share no cached prompts.
    pub(super) fn complete(&self, params: &mut CommonParams) {
        params.data_parallel_rank = self.rank.or(params.data_parallel_rank);
        let given = params.cache_salt.take();
        params.cache_salt = cache_salt(self.caller.key.as_deref(), given.as_deref());
    }

    /// The cache salt of a request that sets none.
    pub(super) fn callers_salt(&self) -> Option<String> {
        cache_salt(self.caller.key.as_deref(), None)
    }

    /// The account that pays for it.
    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Records the usage of an answered request. It is already charged.
    pub(super) fn add_usage(&self, total: &TotalUsage) {
        self.usage(&total.usage);
        let reasoning_tokens = u64::from(total.reasoning_tokens);
        self.metrics
            .shared
            .reasoning_tokens
            .inc_by(reasoning_tokens);
    }

    /// Like [`Self::add_usage`], for a request without answers of its own.
    pub(super) fn usage(&self, usage: &Usage) {
        let shared = &self.metrics.shared;
        shared
            .cached_tokens
            .inc_by(u64::from(usage.cached_tokens.unwrap_or(0)));
        shared
            .output_length
            .observe(f64::from(usage.completion_tokens));
        self.input_length(usage.prompt_tokens);
    }

    /// Records the prompt's length; alone for embeddings and scores, which complete nothing.
    pub(super) fn input_length(&self, prompt_tokens: u32) {
        let shared = &self.metrics.shared;
        shared.input_length.observe(f64::from(prompt_tokens));
    }

    /// Logs one line for the request.
    fn log(&self) {
        let milliseconds = |duration: Duration| (duration.as_secs_f64() * 1e4).round() / 10.0;
        let first_text = self
            .first_text
            .map(|at| milliseconds(at.saturating_duration_since(self.started)));
        let ctx = self.ctx.as_ref();
        let (moves, trace) = (
            ctx.map(RequestContext::moves),
            ctx.and_then(RequestContext::trace),
        );
        tracing::info!(
            target: "genset::access",
            endpoint = self.endpoint,
            status = self.status.as_u16(),
            model = self.model,
            key = self.caller.name(),
            ms = milliseconds(self.elapsed()),
            first_text_ms = first_text,
            prompt_tokens = self.account.prompt_tokens(),
            completion_tokens = self.account.completion_tokens(),
            moves = moves.filter(|moves| *moves > 0),
            request_id = self.request_id,
            trace_id = trace.map(TraceContext::trace_id),
        );
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
        if self.ctx.is_some() {
            shared.under_way.send_modify(|count| *count -= 1);
        }
        let labels = RequestLabels {
            endpoint: self.endpoint,
            status: self.status.as_u16(),
        };
        shared.requests.get_or_create(&labels).inc();
        shared.duration.observe(self.elapsed().as_secs_f64());
        if shared.has_access_log {
            self.log();
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{ApiKeys, KeyHash};

    #[test]
    fn a_request_that_a_quota_refuses_is_its_callers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys.toml");
        let hash = KeyHash::of("sk-a");
        let entry = format!("[[key]]\nname = \"a\"\nhash = \"{hash}\"\nrequests_per_minute = 1\n");
        std::fs::write(&path, entry).expect("a file");
        let registry = MetricsRegistry::default();
        let keys = ApiKeys::load(path, &registry).expect("they load");
        let metrics = HttpMetrics::register(&registry, false, MemoryBudget::new(1));
        for is_admitted in [true, false] {
            let mut guard = metrics.request("chat_completions", "r");
            let caller = Caller {
                key: keys.named("a"),
                is_local: false,
            };
            assert_eq!(guard.admit(caller).is_ok(), is_admitted);
            assert_eq!(guard.caller.name(), Some("a"));
        }
    }
}
