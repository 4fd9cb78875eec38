//! [`Ejections`]: an instance that fails one request after another, or half of its last 32, gets none for a while. For
//! [`GenerateClient`], which sees how requests end. Which instances a request passes over, `instances` decides. A worker whose
//! answers break the contract of streams is named in the log.
//!
//! [`GenerateClient`]: crate::GenerateClient

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::prometheus::metrics::family::Family;
use genset_backend_common::{
    EngineError, ErrorKind, FinishReason, GenerateRequest, MetricsRegistry, Output, OutputStream,
    TokenId, output::Violation,
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
    check: AnswerCheck,
}

/// What can be seen of the contract of streams from outside a worker. Our own workers keep it.
#[derive(Debug)]
struct AnswerCheck {
    vocab_size: u32,
    given_tokens: u32,
}

impl AnswerCheck {
    /// The rule that the next item of the answer breaks.
    fn broken_by(&mut self, output: &Output) -> Option<Violation> {
        self.given_tokens = self.given_tokens.saturating_add(output.token_count());
        let tokens: &[TokenId] = match output {
            Output::Tokens(chunk) => &chunk.token_ids,
            Output::Finished(end) => {
                let is_cancelled = end.reason == FinishReason::Cancelled;
                if !is_cancelled && end.usage.completion_tokens != self.given_tokens {
                    return Some(Violation::CompletionTokensMismatch);
                }
                &end.last.token_ids
            }
            Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => &[],
        };
        let is_unknown = |token: &TokenId| *token >= self.vocab_size;
        let has_unknown = tokens.iter().any(is_unknown);
        has_unknown.then_some(Violation::TokenOutOfRange)
    }
}

impl Trial {
    /// The trial of a request that goes to `instance`.
    pub(crate) fn new(
        ejections: &Arc<PoolEjections>,
        instance: &Arc<Instance>,
        request: &GenerateRequest,
    ) -> Self {
        let blocks = request.transfer.as_ref();
        let card = instance.record.card.as_ref();
        let vocab_size = card.and_then(|card| card.vocab_size);
        Self {
            ejections: Arc::clone(ejections),
            instance: Arc::clone(instance),
            has_blocks: blocks.is_some_and(|blocks| !blocks.is_none()),
            has_given: false,
            check: AnswerCheck {
                vocab_size: vocab_size.map_or(u32::MAX, NonZeroU32::get),
                given_tokens: 0,
            },
        }
    }

    /// The same items. The request is judged when they end or are dropped.
    pub(crate) fn watch(mut self, items: ResponseStream<Output>) -> ResponseStream<Output> {
        // An end without a terminal is a failure, too.
        let items = OutputStream::from_raw(items);
        Box::pin(items.inspect(move |item| match item {
            Ok(output) => self.gave(output),
            Err(error) => self.failed(error),
        }))
    }

    fn gave(&mut self, output: &Output) {
        if let Some(rule) = self.check.broken_by(output)
            && let Some(unlogged) = self.ejections.logged.unlogged(rule.name())
        {
            tracing::warn!(
                instance = %self.instance.record.instance,
                rule = rule.name(),
                unlogged,
                "a worker broke the output contract: {}; further answers like this are only counted for a minute",
                rule.what()
            );
        }
        let is_cancelled =
            matches!(output, Output::Finished(end) if end.reason == FinishReason::Cancelled);
        self.has_given |= !is_cancelled;
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
        let never_ejects = self.ejections.config.after == 0;
        if never_ejects || !is_own_fault || error.is_own_shortage() {
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
    use genset_backend_common::output::Finish;

    use super::*;

    #[test]
    fn wrong_tokens_and_wrong_counts_of_them_are_seen() {
        let ended = |count| Output::Finished(Box::new(Finish::length().into_finished(1, count)));
        for (token, count, expected) in [
            (7_u32, 1, [None, None]),
            (8, 1, [Some(Violation::TokenOutOfRange), None]),
            (7, 2, [None, Some(Violation::CompletionTokensMismatch)]),
        ] {
            let mut check = AnswerCheck {
                vocab_size: 8,
                given_tokens: 0,
            };
            let items = [Output::from(token), ended(count)];
            assert_eq!(items.map(|item| check.broken_by(&item)), expected);
        }
    }

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
