//! Metrics of requests in two legs.

use std::time::Duration;

use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::prometheus::metrics::histogram::Histogram;
use genset_backend_common::{ErrorKind, MetricsRegistry, handles::LATENCY_BUCKETS_S};

type Label = [(&'static str, String); 1];
type Labels = [(&'static str, String); 2];
type Failures = [(&'static str, String); 3];

/// The metrics of all models. Clones share.
#[derive(Debug, Clone)]
pub struct Legs {
    apart: Family<Label, Counter>,
    whole: Family<Labels, Counter>,
    failures: Family<Failures, Counter>,
    prefill_s: Histogram,
    handover_s: Histogram,
}

impl Legs {
    /// Registers them, once per registry.
    #[must_use]
    pub fn register(registry: &MetricsRegistry) -> Self {
        Self {
            apart: registry.create("genset_disaggregated_requests", "Requests that were begun in two legs"),
            whole: registry.create("genset_disaggregated_whole_requests", "Requests of models with roles that were not split into legs, by reason"),
            failures: registry.create("genset_disaggregated_leg_failures", "Legs that failed after an instance had taken them, by leg and kind of error"),
            prefill_s: registry.histogram("genset_disaggregated_prefill_seconds", "From sending a request to a prefill instance until it has computed the prompt", LATENCY_BUCKETS_S),
            handover_s: registry.histogram("genset_disaggregated_handover_seconds", "From the end of the prefill leg until the decode instance gives its first item: the choice, and the transfer of KV blocks", LATENCY_BUCKETS_S),
        }
    }

    pub(super) fn of(&self, model: &str) -> ModelLegs {
        ModelLegs {
            all: self.clone(),
            model: model.to_owned(),
        }
    }
}

/// Why a request is served whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whole {
    /// Its prompt is short, after subtracting the cached prefix.
    Short,
    /// Its prompt is not token ids.
    NoTokens,
    /// There are neither prefill nor decode instances; not counted.
    NotApart,
    /// There is no prefill instance.
    NoPrefill,
    /// There is no decode instance.
    NoDecode,
    /// No prefill instance took it.
    PrefillRefused,
    /// No decode instance took it.
    DecodeRefused,
}

impl Whole {
    const fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::NoTokens => "no_tokens",
            Self::NotApart => "not_apart",
            Self::NoPrefill => "no_prefill",
            Self::NoDecode => "no_decode",
            Self::PrefillRefused => "prefill_refused",
            Self::DecodeRefused => "decode_refused",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    Prefill,
    Decode,
}

/// The metrics of one model.
#[derive(Debug)]
pub(super) struct ModelLegs {
    all: Legs,
    model: String,
}

impl ModelLegs {
    fn model(&self) -> (&'static str, String) {
        ("model", self.model.clone())
    }

    pub(super) fn apart(&self) {
        self.all.apart.get_or_create(&[self.model()]).inc();
    }

    pub(super) fn whole(&self, why: Whole) {
        if why == Whole::NotApart {
            return;
        }
        let labels = [self.model(), ("reason", why.name().to_owned())];
        self.all.whole.get_or_create(&labels).inc();
    }

    pub(super) fn failed(&self, leg: Leg, kind: ErrorKind) {
        let leg = match leg {
            Leg::Prefill => "prefill",
            Leg::Decode => "decode",
        };
        let reason = kind.name().to_owned();
        let labels = [self.model(), ("leg", leg.to_owned()), ("reason", reason)];
        self.all.failures.get_or_create(&labels).inc();
    }

    pub(super) fn prefilled_in(&self, time: Duration) {
        self.all.prefill_s.observe(time.as_secs_f64());
    }

    pub(super) fn handed_over_in(&self, time: Duration) {
        self.all.handover_s.observe(time.as_secs_f64());
    }
}
