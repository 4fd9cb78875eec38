//! The metrics of every worker. The operators' guide documents names and labels.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::error::ErrorKind;
use crate::handles::{LATENCY_BUCKETS_S, MetricsRegistry};
use crate::log_limit::OncePerMinute;
use crate::output::{FinishReason, Violation};
use crate::recent::RecentRequests;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RuleLabel {
    rule: &'static str,
}

/// How a request left the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestEnd {
    /// With a `Finished` item.
    Finished(FinishReason),
    /// With an error, before or after the first item.
    Failed(ErrorKind),
    /// Its caller left: the call of `generate`, or its stream, was dropped.
    Dropped,
}

impl RequestEnd {
    fn label(self) -> &'static str {
        match self {
            Self::Finished(reason) => reason.name(),
            Self::Failed(kind) => kind.name(),
            Self::Dropped => "dropped",
        }
    }
}

/// The metrics of one worker. Clones share state.
#[derive(Debug, Clone)]
pub(super) struct Telemetry {
    requests: Family<OutcomeLabel, Counter>,
    violations: Family<RuleLabel, Counter>,
    pub(super) running: Gauge,
    pub(super) waiting: Gauge,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    time_to_first_token: Histogram,
    duration: Histogram,
    pub(super) recent: RecentRequests,
    /// Limits the log: an engine that breaks a rule may do so with each request, or each item.
    pub(super) logged: OncePerMinute,
}

impl Telemetry {
    pub(super) fn register(registry: &MetricsRegistry) -> Self {
        let this = Self {
            requests: registry.create("genset_worker_requests", "Requests by how they ended"),
            violations: registry.create(
                "genset_worker_contract_violations",
                "Rules of the output contract the engine was seen to break",
            ),
            running: registry.create("genset_worker_running_requests", "Requests in the engine"),
            waiting: registry.create(
                "genset_worker_waiting_requests",
                "Requests waiting for admission",
            ),
            prompt_tokens: registry.create("genset_worker_prompt_tokens", "Prompt tokens accepted"),
            completion_tokens: registry
                .create("genset_worker_completion_tokens", "Tokens streamed"),
            time_to_first_token: registry.histogram(
                "genset_worker_time_to_first_token_seconds",
                "From the call of generate to the first item",
                LATENCY_BUCKETS_S,
            ),
            duration: registry.histogram(
                "genset_worker_request_duration_seconds",
                "From the call of generate to the end of the stream",
                LATENCY_BUCKETS_S,
            ),
            recent: RecentRequests::default(),
            logged: OncePerMinute::default(),
        };
        for violation in Violation::ALL {
            // A rule that was never broken reads 0, so that alerts can use its increase.
            let _ = this.violations.get_or_create(&RuleLabel {
                rule: violation.name(),
            });
        }
        this
    }

    /// Counts a prompt: when its request is admitted, or at the end if only the engine counts it.
    pub(super) fn add_prompt_tokens(&self, prompt_tokens: u32) {
        self.prompt_tokens.inc_by(u64::from(prompt_tokens));
    }

    pub(super) fn first_item(&self, after: Duration) {
        self.time_to_first_token.observe(after.as_secs_f64());
    }

    pub(super) fn request_ended(&self, end: RequestEnd, completion_tokens: u32, after: Duration) {
        self.request_unanswered(end);
        self.completion_tokens.inc_by(u64::from(completion_tokens));
        self.duration.observe(after.as_secs_f64());
    }

    /// Counts a request that got no stream.
    pub(super) fn request_unanswered(&self, end: RequestEnd) {
        self.requests
            .get_or_create(&OutcomeLabel {
                outcome: end.label(),
            })
            .inc();
    }

    pub(super) fn violation(&self, violation: Violation) {
        self.violations
            .get_or_create(&RuleLabel {
                rule: violation.name(),
            })
            .inc();
    }
}
