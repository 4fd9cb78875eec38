//! [`RouterConfig`]: checked routing settings; with the feature `cli`, command-line flags.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::str::FromStr;
use std::time::Duration;

use genset_backend_common::{EngineError, spelling::none_of};
use genset_runtime::{EjectionConfig, SelectionMode};
#[cfg(feature = "cli")]
use genset_runtime::{in_seconds, positive_seconds};

use crate::disaggregating::DisaggregationConfig;
use crate::migrating::MigrationConfig;

/// How an instance is chosen for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterMode {
    /// Independent of the request: round-robin, random or by load.
    Plain(SelectionMode),
    /// By cached prefix and load.
    Kv,
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
        let names = SelectionMode::ALL.map(SelectionMode::name);
        text.parse()
            .map(Self::Plain)
            .map_err(|_| none_of(text, names.into_iter().chain([KV])))
    }
}

/// How the requests of every model are routed; with the feature `cli`, flags.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct RouterConfig {
    /// Selection of instances: round-robin, random, least-loaded, power-of-two, or kv for the one with most of the prompt in its
    /// cache, as far as load allows
    #[cfg_attr(feature = "cli", arg(long = "router-mode", env = "GENSET_ROUTER_MODE", value_name = "ROUTER_MODE",
        default_value_t = Self::default().mode))]
    pub mode: RouterMode,
    /// How the mode `kv` does it.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub kv: KvConfig,
    /// Most requests of one model that wait while every instance is full, by priority, then by deadline; 0 refuses them
    #[cfg_attr(feature = "cli", arg(id = "router_queue", long = "router-queue", env = "GENSET_ROUTER_QUEUE",
        value_name = "REQUESTS", default_value_t = Self::default().max_waiting))]
    pub max_waiting: usize,
    /// When an instance that fails one request after another, or half of them, gets none for a while.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub ejection: EjectionConfig,
    /// When prompts are computed by instances of their own.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub disaggregation: DisaggregationConfig,
    /// How requests move that have begun.
    #[cfg_attr(feature = "cli", command(flatten))]
    pub migration: MigrationConfig,
}

impl RouterConfig {
    /// Returns whether the affinity key of a request influences its routing.
    #[must_use]
    pub fn has_affinity(&self) -> bool {
        self.mode == RouterMode::Kv && self.kv.affinity_blocks > 0
    }
}

/// How KV-aware selection weighs what it knows.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct KvConfig {
    /// With kv: cost of a KV block to prefill, where a KV block of a running sequence costs 1; 0 considers load alone
    #[cfg_attr(feature = "cli", arg(long = "kv-overlap-score-weight", env = "GENSET_KV_OVERLAP_SCORE_WEIGHT",
        value_name = "KV_OVERLAP_SCORE_WEIGHT", default_value_t = Self::default().overlap_score_weight))]
    pub overlap_score_weight: f64,
    /// With kv: randomness of the choice; with 0 the lowest cost wins
    #[cfg_attr(feature = "cli", arg(long = "router-temperature", env = "GENSET_ROUTER_TEMPERATURE",
        value_name = "ROUTER_TEMPERATURE", default_value_t = Self::default().temperature))]
    pub temperature: f64,
    /// With kv: whether the KV events of workers are followed; otherwise routed prompts are assumed to be cached. true or false
    #[cfg_attr(feature = "cli", arg(long = "use-kv-events", env = "GENSET_USE_KV_EVENTS", value_name = "BOOL",
        default_value_t = Self::default().use_events, action = clap::ArgAction::Set))]
    pub use_events: bool,
    /// With kv: how long routed prompts are assumed to be cached where there are no KV events, in seconds
    #[cfg_attr(feature = "cli", arg(long = "kv-approx-ttl", env = "GENSET_KV_APPROX_TTL", value_name = "KV_APPROX_TTL",
        default_value = in_seconds(Self::default().assumed_ttl), value_parser = positive_seconds))]
    pub assumed_ttl: Duration,
    /// With kv: most KV blocks of one worker in the index, whatever it publishes
    #[cfg_attr(feature = "cli", arg(long = "kv-max-worker-blocks", env = "GENSET_KV_MAX_WORKER_BLOCKS",
        value_name = "KV_MAX_WORKER_BLOCKS", default_value_t = Self::default().max_worker_blocks))]
    pub max_worker_blocks: NonZeroU32,
    /// With kv: how late the KV events of a worker may be, in seconds; with later ones it counts as a worker with nothing cached
    #[cfg_attr(feature = "cli", arg(long = "kv-max-lag", env = "GENSET_KV_MAX_LAG", value_name = "KV_MAX_LAG",
        default_value = in_seconds(Self::default().max_lag), value_parser = positive_seconds))]
    pub max_lag: Duration,
    /// With kv: how much more the last instance of an affinity key may cost than another and still be chosen, in KV blocks; 0
    /// ignores affinity keys
    #[cfg_attr(feature = "cli", arg(long, env = "GENSET_AFFINITY_BLOCKS", value_name = "BLOCKS", default_value_t = Self::default().affinity_blocks))]
    pub affinity_blocks: u32,
    /// With kv: most affinity keys that are remembered, for each model; those used longest ago are forgotten first
    #[cfg_attr(feature = "cli", arg(long = "affinity-keys", env = "GENSET_AFFINITY_KEYS", value_name = "KEYS",
        default_value_t = Self::default().max_affinity_keys))]
    pub max_affinity_keys: NonZeroUsize,
    /// Makes chance repeatable.
    #[cfg_attr(feature = "cli", arg(skip))]
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
    /// Checks the ranges: weight and temperature are finite and at least 0.
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
