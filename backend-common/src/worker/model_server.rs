//! The gauges that a load balancer in front of a worker reads: those that the Gateway API inference extension requires of a model
//! server. They are computed on each read, from the Worker's admission and the engine's published load.
//!
//! # Source
//! <https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-model-server-protocol>

use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use tokio::sync::watch;

use super::telemetry::Telemetry;
use crate::config::EngineConfig;
use crate::handles::{Admitted, Load, MetricsRegistry};

/// The gauges of one worker. Clones share state.
#[derive(Debug, Clone)]
pub(super) struct ModelServerMetrics {
    /// Admitted by the Worker.
    running: Gauge,
    /// Waiting for the Worker's admission.
    waiting: Gauge,
    load: watch::Receiver<Load>,
    cache: Arc<OnceLock<CacheInfo>>,
}

/// The engine's KV cache, as it declared it.
#[derive(Debug, Clone, Copy)]
struct CacheInfo {
    block_size_tokens: NonZeroU32,
    total_blocks: u64,
}

/// The values of the gauges.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Readings {
    queued: i64,
    running: i64,
    kv_cache_utilization: f64,
}

impl Readings {
    /// An engine that publishes no load counts as having no queue and no KV cache.
    fn new(admitted: i64, waiting: i64, load: Load) -> Self {
        let count = |gauge: i64| u32::try_from(gauge).unwrap_or(0);
        let load = load.at_worker(Admitted {
            running_requests: count(admitted),
            waiting_requests: count(waiting),
            ..Admitted::default()
        });
        Self {
            queued: load.waiting_requests.into(),
            running: load.running_requests.into(),
            kv_cache_utilization: utilization(load.kv_used_blocks, load.kv_total_blocks),
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a ratio of counts far below 2^53"
)]
fn utilization(used: u64, total: u64) -> f64 {
    match total {
        0 => 0.0,
        total => used.min(total) as f64 / total as f64,
    }
}

impl ModelServerMetrics {
    pub(super) fn new(telemetry: &Telemetry, load: watch::Receiver<Load>) -> Self {
        Self {
            running: telemetry.running.clone(),
            waiting: telemetry.waiting.clone(),
            load,
            cache: Arc::default(),
        }
    }

    pub(super) fn register(&self, registry: &MetricsRegistry) {
        registry.register_collector(self.clone());
    }

    /// Sets what the engine declared about its KV cache, if it has one.
    pub(super) fn started(&self, config: &EngineConfig) {
        if let (Some(block_size_tokens), Some(total_blocks)) =
            (config.kv_block_size, config.kv_total_blocks)
        {
            // Called once: a Worker starts its engine once.
            let _ = self.cache.set(CacheInfo {
                block_size_tokens,
                total_blocks,
            });
        }
    }
}

impl Collector for ModelServerMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let load = *self.load.borrow();
        let now = Readings::new(self.running.get(), self.waiting.get(), load);
        ConstGauge::new(now.queued).encode(encoder.encode_descriptor(
            "genset_model_server_queued_requests",
            "Requests that wait, for admission or in the engine.",
            None,
            MetricType::Gauge,
        )?)?;
        ConstGauge::new(now.running).encode(encoder.encode_descriptor(
            "genset_model_server_running_requests",
            "Requests that the engine works on.",
            None,
            MetricType::Gauge,
        )?)?;
        ConstGauge::new(now.kv_cache_utilization).encode(encoder.encode_descriptor(
            "genset_model_server_kv_cache_utilization",
            "Share of the KV blocks in use, from 0 to 1.",
            None,
            MetricType::Gauge,
        )?)?;
        let Some(cache) = self.cache.get() else {
            return Ok(());
        };
        // A gauge, because parsers of the older text format do not know the type `info`.
        let mut info = encoder.encode_descriptor(
            "genset_model_server_cache_config_info",
            "The engine's KV cache: tokens per block and blocks in all; always 1.",
            None,
            MetricType::Gauge,
        )?;
        let labels = [
            ("block_size", cache.block_size_tokens.to_string()),
            ("num_gpu_blocks", cache.total_blocks.to_string()),
        ];
        ConstGauge::new(1i64).encode(info.encode_family(&labels)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_inside_the_engine_is_queued_and_not_running() {
        let load = Load {
            running_requests: 3,
            waiting_requests: 2,
            kv_used_blocks: 25,
            kv_total_blocks: 100,
            ..Load::default()
        };
        let expected = Readings {
            queued: 9,
            running: 3,
            kv_cache_utilization: 0.25,
        };
        assert_eq!(Readings::new(5, 7, load), expected);
    }

    #[test]
    fn a_load_that_lags_behind_makes_nothing_negative_and_nothing_more_than_full() {
        let load = Load {
            waiting_requests: 9,
            kv_used_blocks: 5,
            kv_total_blocks: 4,
            ..Load::default()
        };
        let expected = Readings {
            queued: 2,
            running: 0,
            kv_cache_utilization: 1.0,
        };
        assert_eq!(Readings::new(2, 0, load), expected);
        let no_cache = Readings::new(0, 0, Load::default());
        assert!(no_cache.kv_cache_utilization.abs() < f64::EPSILON);
    }
}
