//! [`RouterConfig`]: how requests are routed, checked.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::str::FromStr;
use std::time::Duration;

use genset_backend_common::EngineError;
use genset_runtime::SelectionMode;

use crate::disaggregating::DisaggregationConfig;
use crate::migrating::MigrationConfig;

/// How an instance is chosen for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterMode {
    /// Whatever the request is: by turns, by chance or by load.
    Plain(SelectionMode),
    /// By what is cached where, and by load.
    Kv,
}

impl RouterMode {
    /// The names in flags.
    #[must_use]
    pub fn names() -> String {
        SelectionMode::ALL
            .map(SelectionMode::name)
            .into_iter()
            .chain([KV])
            .collect::<Vec<_>>()
            .join(", ")
    }
}

const KV: &str = "kv";

impl Default for RouterMode {
    fn default() -> Self {
        Self::Plain(SelectionMode::default())
    }
}

impl fmt::Display for RouterMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(mode) => mode.fmt(f),
            Self::Kv => f.write_str(KV),
        }
    }
}

impl FromStr for RouterMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == KV {
            return Ok(Self::Kv);
        }
        text.parse()
            .map(Self::Plain)
            .map_err(|_| format!("{text:?} is none of {}", Self::names()))
    }
}

/// How the requests of every model are routed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RouterConfig {
    /// How an instance is chosen.
    pub mode: RouterMode,
    /// How the mode `kv` does it.
    pub kv: KvConfig,
    /// The most requests of a model that wait while every instance is full; with 0 they are refused.
    pub max_waiting: usize,
    /// How requests move that have begun.
    pub migration: MigrationConfig,
    /// When prompts are computed by instances of their own.
    pub disaggregation: DisaggregationConfig,
}

impl RouterConfig {
    /// Whether it matters what a request's affinity key is.
    #[must_use]
    pub fn has_affinity(&self) -> bool {
        self.mode == RouterMode::Kv && self.kv.affinity_blocks > 0
    }
}

/// How KV-aware selection weighs what it knows.
#[derive(Debug, Clone, PartialEq)]
pub struct KvConfig {
    /// What a block to prefill costs, where a block of a running sequence costs 1. Finite, at least 0; with 0 nobody looks at
    /// prefix caches.
    pub overlap_score_weight: f64,
    /// How much chance there is in the choice. Finite, at least 0; with 0 the lowest cost wins.
    pub temperature: f64,
    /// Whether the KV events of workers are followed; otherwise what was routed is assumed to be cached.
    pub use_events: bool,
    /// For how long it is assumed.
    pub assumed_ttl: Duration,
    /// The most blocks that the index keeps for one worker, whatever it publishes.
    pub max_worker_blocks: NonZeroU32,
    /// An instance whose events are later than this is taken for having nothing cached.
    pub max_lag: Duration,
    /// What the instance that served a request's affinity key last may cost more than another and is still chosen, in KV
    /// blocks; with 0 keys have no effect.
    pub affinity_blocks: u32,
    /// The most affinity keys that are remembered, for each model; those used longest ago are forgotten first.
    pub max_affinity_keys: NonZeroUsize,
    /// Makes chance repeatable.
    pub seed: Option<u64>,
}

impl Default for KvConfig {
    fn default() -> Self {
        Self {
            overlap_score_weight: 1.0,
            temperature: 0.0,
            use_events: true,
            assumed_ttl: Duration::from_secs(120),
            max_worker_blocks: NonZeroU32::new(1 << 20).unwrap_or(NonZeroU32::MIN),
            max_lag: Duration::from_secs(5),
            affinity_blocks: 32,
            max_affinity_keys: NonZeroUsize::new(1 << 16).unwrap_or(NonZeroUsize::MIN),
            seed: None,
        }
    }
}

impl KvConfig {
    /// Checks the ranges.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub fn validate(&self) -> Result<(), EngineError> {
        for (flag, value) in [
            ("--kv-overlap-score-weight", self.overlap_score_weight),
            ("--router-temperature", self.temperature),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                let problem = format!("must be a finite number, at least 0, got {value}");
                return Err(EngineError::invalid_argument(flag, problem));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_has_its_name() {
        let plain = SelectionMode::ALL.map(RouterMode::Plain);
        for mode in plain.into_iter().chain([RouterMode::Kv]) {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "best".parse::<RouterMode>().unwrap_err();
        assert!(
            error.contains("round-robin") && error.contains("kv"),
            "{error}"
        );
    }

    #[test]
    fn values_out_of_range_are_refused_by_the_name_of_their_flag() {
        let base = KvConfig::default();
        base.validate().unwrap();
        for (weight, temperature, flag) in [
            (-1.0, 0.0, "--kv-overlap-score-weight"),
            (f64::NAN, 0.0, "--kv-overlap-score-weight"),
            (1.0, f64::INFINITY, "--router-temperature"),
        ] {
            let config = KvConfig {
                overlap_score_weight: weight,
                temperature,
                ..base.clone()
            };
            let error = config.validate().unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(flag));
        }
    }
}
