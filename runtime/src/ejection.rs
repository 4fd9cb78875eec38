//! [`Ejections`]: an instance that fails one request after another, or half of its last 32, gets none for a while. For
//! [`GenerateClient`], which sees how requests end. Which instances a request passes over, `instances` decides.
//!
//! [`GenerateClient`]: crate::GenerateClient

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::{
    EngineError, ErrorKind, FinishReason, GenerateRequest, MetricsRegistry, Output, OutputStream,
};

use crate::instances::Instance;
#[cfg(feature = "cli")]
use crate::network_args::{in_seconds, positive_seconds};
use crate::plane::ResponseStream;

/// How much longer than the first ejection of an instance a later one may be.
const MOST_DOUBLED: u32 = 64;

/// When instances are ejected, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct EjectionConfig {
    /// Requests that an instance fails in a row, by its own fault, before it gets none for a while; 0 for no limit
    ///
    /// As many of its last 32, but at least 16, also do.
    #[cfg_attr(feature = "cli", arg(id = "eject_after", long = "eject-after", env = "GENSET_EJECT_AFTER", value_name = "FAILURES",
        default_value_t = Self::default().after))]
    pub after: u32,
    /// How long such an instance gets no request while others can take them, in seconds; twice as long each time, until it answers
    /// one, and at most 64 times as long
    ///
    /// One that failed half of its requests must answer 32 in a row.
    #[cfg_attr(feature = "cli", arg(id = "eject_time", long = "eject-time", env = "GENSET_EJECT_TIME", value_name = "EJECT_TIME",
        default_value = in_seconds(Self::default().time), value_parser = positive_seconds))]
    pub time: Duration,
}

impl Default for EjectionConfig {
    fn default() -> Self {
        Self {
            after: 5,
            time: Duration::from_secs(5),
        }
    }
}

impl EjectionConfig {
    /// How long an instance is ejected whose last ejection, if any, lasted for `last`.
    pub(crate) fn time_after(&self, last: Option<Duration>) -> Duration {
        let longest = self.time.saturating_mul(MOST_DOUBLED);
        last.map_or(self.time, |last| last.saturating_mul(2).min(longest))
    }
}

type Label = [(&'static str, String); 1];

/// The ejections of all models: the settings and the metric. Clones share state.
#[derive(Debug, Clone)]
pub struct Ejections {
    config: EjectionConfig,
    counts: Family<Label, Counter>,
}

impl Ejections {
    /// Registers the metric, once per registry.
    #[must_use]
    pub fn register(registry: &MetricsRegistry, config: EjectionConfig) -> Self {
        let counts = registry.create(
            "genset_router_ejections",
            "How often an instance that failed one request after another, or half of them, got none for a while",
        );
        Self { config, counts }
    }

    /// Those of the instances of `pool`, its value of the label `model`.
    pub(crate) fn of(&self, pool: &str) -> PoolEjections {
        PoolEjections {
            config: self.config,
            count: self
                .counts
                .get_or_create_owned(&[("model", pool.to_owned())]),
            logged: OncePerMinute::default(),
        }
    }
}

/// The ejections of a client's instances.
#[derive(Debug)]
pub(crate) struct PoolEjections {
    config: EjectionConfig,
    count: Counter,
    logged: OncePerMinute,
}

/// A request at an instance, whose end tells of the instance.
#[derive(Debug)]
pub(crate) struct Trial {
    ejections: Arc<PoolEjections>,
    instance: Arc<Instance>,
    /// Whether the request names KV blocks of another instance, which may be at fault.
    has_blocks: bool,
    /// Whether the instance gave a part of the answer, and has not failed since.
    has_given: bool,
}

impl Trial {
    /// The trial of a request that goes to `instance`; `None` if its end does not matter.
    pub(crate) fn new(
        ejections: &Arc<PoolEjections>,
        instance: &Arc<Instance>,
        request: &GenerateRequest,
    ) -> Option<Self> {
        let blocks = request.transfer.as_ref();
        (ejections.config.after > 0).then(|| Self {
            ejections: Arc::clone(ejections),
            instance: Arc::clone(instance),
            has_blocks: blocks.is_some_and(|blocks| !blocks.is_none()),
            has_given: false,
        })
    }

    /// The same items. The request is judged when they end or are dropped.
    pub(crate) fn watch(mut self, items: ResponseStream<Output>) -> ResponseStream<Output> {
        // An end without a terminal is a failure, too.
        let items = OutputStream::from_raw(items);
        Box::pin(items.inspect(move |item| match item {
            Ok(Output::Finished(end)) if end.reason == FinishReason::Cancelled => {}
            Ok(_) => self.has_given = true,
            Err(error) => self.failed(error),
        }))
    }

    /// The request failed.
    pub(crate) fn failed(&mut self, error: &EngineError) {
        self.has_given = false;
        let is_own_fault = match error.kind() {
            ErrorKind::Internal => true,
            ErrorKind::StreamIncomplete => !self.has_blocks,
            // The request's fault, a full instance, or one that is away or says that it cannot now: such a request moves on.
            ErrorKind::InvalidArgument
            | ErrorKind::ContextLengthExceeded
            | ErrorKind::Unsupported
            | ErrorKind::NotFound
            | ErrorKind::Overloaded
            | ErrorKind::Unavailable
            | ErrorKind::EngineShutdown
            | ErrorKind::CannotConnect
            | ErrorKind::Disconnected
            | ErrorKind::DeadlineExceeded
            | ErrorKind::Cancelled => false,
        };
        if !is_own_fault || error.is_own_shortage() {
            return;
        }
        let Some(time) = self.instance.failed(&self.ejections.config) else {
            return;
        };
        self.ejections.count.inc();
        if let Some(unlogged) = self.ejections.logged.unlogged("ejected") {
            tracing::warn!(
                instance = %self.instance.record.instance,
                seconds = time.as_secs_f64(),
                unlogged,
                %error,
                "an instance failed one request after another, or half of them; it gets none for a while if others can take them"
            );
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // Whoever reads an answer may drop it early: at a stop string, or because the client left.
        if self.has_given {
            self.instance.answered();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ejection_is_twice_as_long_up_to_a_limit() {
        let config = EjectionConfig::default();
        let mut last = None;
        for seconds in [5, 10, 20, 40, 80, 160, 320, 320] {
            let time = config.time_after(last);
            assert_eq!(time.as_secs(), seconds);
            last = Some(time);
        }
        let long = EjectionConfig {
            time: Duration::MAX,
            ..config
        };
        assert_eq!(long.time_after(Some(Duration::MAX)), Duration::MAX);
    }
}
