//! Flags of the KV-aware choice, for a server and for a simulation.

use clap::{ArgAction, Args};
use genset_backend_common::EngineError;
use genset_router::KvConfig;

use super::http::{Seconds, seconds};

#[derive(Debug, Clone, Args)]
pub(crate) struct KvArgs {
    /// With kv: what a block to prefill costs, where a block of a running sequence costs 1; 0 looks at load alone
    #[arg(long, env = "GENSET_KV_OVERLAP_SCORE_WEIGHT", default_value_t = KvConfig::default().overlap_score_weight)]
    kv_overlap_score_weight: f64,
    /// With kv: how much chance there is in the choice; with 0 the lowest cost wins
    #[arg(long, env = "GENSET_ROUTER_TEMPERATURE", default_value_t = KvConfig::default().temperature)]
    router_temperature: f64,
    /// With kv: whether the KV events of workers are followed; otherwise what was routed is assumed to be cached. true or false
    #[arg(long, env = "GENSET_USE_KV_EVENTS", value_name = "BOOL", default_value_t = KvConfig::default().use_events, action = ArgAction::Set)]
    use_kv_events: bool,
    /// With kv: for how long what was routed is assumed to be cached where there are no KV events, in seconds
    #[arg(long, env = "GENSET_KV_APPROX_TTL", default_value = "120", value_parser = seconds)]
    kv_approx_ttl: Seconds,
}

impl KvArgs {
    /// What the flags say, and the rest of `other`.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub(crate) fn config(&self, other: KvConfig) -> Result<KvConfig, EngineError> {
        let config = KvConfig {
            overlap_score_weight: self.kv_overlap_score_weight,
            temperature: self.router_temperature,
            use_events: self.use_kv_events,
            assumed_ttl: self.kv_approx_ttl.0,
            ..other
        };
        config.validate()?;
        Ok(config)
    }
}
