//! What the process publishes beside its answers: metrics, KV events, load, and that it can go on no more.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use genset_backend_common::prometheus::collector::Collector;
use genset_backend_common::prometheus::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use genset_backend_common::prometheus::metrics::MetricType;
use genset_backend_common::{
    EngineError, ErrorKind, HealthReporter, Load, LoadPublisher, StartContext,
};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::call::Call;

/// Series that one process may publish; what comes beyond is dropped with a warning.
const MAX_SERIES: usize = 4096;

/// One item of the endpoint `events`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    Metrics(Vec<Sample>),
    Kv(KvEventData),
    Load(Load),
    Dead { reason: String },
}

/// The value of one series.
#[derive(Debug, Deserialize)]
struct Sample {
    name: String,
    #[serde(default)]
    help: String,
    kind: SampleKind,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    value: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SampleKind {
    Gauge,
    Counter,
}

/// Where events go.
pub(crate) struct Sinks {
    kv_events: KvEventPublisher,
    load: LoadPublisher,
    health: HealthReporter,
    metrics: Arc<Mutex<Families>>,
}

impl Sinks {
    pub(crate) fn new(ctx: &StartContext) -> Self {
        let metrics = Arc::default();
        let collector = Published(Arc::clone(&metrics));
        ctx.metrics.register_collector(collector);
        Self {
            kv_events: ctx.kv_events.clone(),
            load: ctx.load.clone(),
            health: ctx.health.clone(),
            metrics,
        }
    }

    /// Publishes what the call answers until it ends.
    pub(crate) async fn follow(self, mut events: Call) {
        loop {
            match events.item().await {
                Ok(Some(event)) => self.publish(event),
                Ok(None) => return,
                Err(error) => return log_end(&error),
            }
        }
    }

    fn publish(&self, event: Event) {
        match event {
            Event::Metrics(samples) => self.metrics.lock().extend(samples),
            Event::Kv(data) => {
                self.kv_events.publish(data);
            }
            Event::Load(load) => self.load.publish(load),
            Event::Dead { reason } => self.health.report_dead(reason),
        }
    }
}

fn log_end(error: &EngineError) {
    use ErrorKind::{Cancelled, Disconnected, EngineShutdown, NotFound, Unsupported};
    if matches!(error.kind(), Unsupported | NotFound) {
        tracing::debug!(%error, "the engine's process publishes nothing");
    } else if !matches!(error.kind(), EngineShutdown | Disconnected | Cancelled) {
        tracing::error!(%error, "the engine's process publishes no more");
    }
}

/// The last value of every series, by the metric's name.
#[derive(Debug, Default)]
struct Families {
    by_name: BTreeMap<String, Family>,
    series: usize,
    is_full: bool,
}

#[derive(Debug)]
struct Family {
    kind: SampleKind,
    help: String,
    values: BTreeMap<Vec<(String, String)>, f64>,
}

impl Families {
    fn extend(&mut self, samples: Vec<Sample>) {
        for sample in samples {
            self.set(sample);
        }
    }

    fn set(&mut self, sample: Sample) {
        if !is_metric_name(&sample.name) || !sample.labels.keys().all(|name| is_label_name(name)) {
            tracing::warn!(
                name = sample.name,
                "a metric whose name or labels Prometheus does not take"
            );
            return;
        }
        let family = self.by_name.entry(sample.name).or_insert_with(|| Family {
            kind: sample.kind,
            help: sample.help,
            values: BTreeMap::new(),
        });
        let labels: Vec<_> = sample.labels.into_iter().collect();
        if let Some(value) = family.values.get_mut(&labels) {
            *value = sample.value;
        } else if self.series < MAX_SERIES {
            self.series += 1;
            family.values.insert(labels, sample.value);
        } else if !std::mem::replace(&mut self.is_full, true) {
            tracing::warn!(
                "the engine's process publishes more than {MAX_SERIES} series; the others are dropped"
            );
        }
    }
}

fn is_metric_name(name: &str) -> bool {
    is_name(name, |c| c == '_' || c == ':')
}

fn is_label_name(name: &str) -> bool {
    is_name(name, |c| c == '_')
}

fn is_name(name: &str, also: fn(char) -> bool) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || also(c))
}

/// The values as the registry reads them.
#[derive(Debug)]
struct Published(Arc<Mutex<Families>>);

impl Collector for Published {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, family) in &self.0.lock().by_name {
            let (kind, name) = match family.kind {
                SampleKind::Gauge => (MetricType::Gauge, name.as_str()),
                // The registry adds the suffix.
                SampleKind::Counter => (
                    MetricType::Counter,
                    name.strip_suffix("_total").unwrap_or(name),
                ),
            };
            let mut metric = encoder.encode_descriptor(name, &family.help, None, kind)?;
            for (labels, value) in &family.values {
                // An empty family would be written with empty braces.
                if labels.is_empty() {
                    encode_value(family.kind, *value, &mut metric)?;
                } else {
                    encode_value(family.kind, *value, &mut metric.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

fn encode_value(kind: SampleKind, value: f64, series: &mut MetricEncoder<'_>) -> fmt::Result {
    match kind {
        SampleKind::Gauge => series.encode_gauge(&value),
        SampleKind::Counter => series.encode_counter::<NoLabelSet, _, f64>(&value, None),
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::wire::{decode_payload, encode_payload};
    use serde_json::json;

    use super::*;

    fn publish(sinks: &Sinks, event: serde_json::Value) {
        sinks.publish(decode_payload(&encode_payload(&event).unwrap()).unwrap());
    }

    #[test]
    fn the_last_value_of_every_series_is_shown() {
        let ctx = StartContext::detached(1);
        let sinks = Sinks::new(&ctx);
        let sample = |name, kind, value| json!({"name": name, "kind": kind, "value": value, "labels": {"rank": "0"}, "help": "H"});
        let samples = [
            sample("my_queue", "gauge", 2.5),
            sample("my_steps_total", "counter", 7.0),
            sample("my_queue", "gauge", 3.0),
            sample("no name", "gauge", 1.0),
            json!({"name": "bare", "kind": "gauge", "value": 4.0}),
        ];
        publish(&sinks, json!({"metrics": samples}));
        let text = ctx.metrics.encode();
        assert!(text.contains("my_queue{rank=\"0\"} 3.0"), "{text}");
        assert!(text.contains("my_steps_total{rank=\"0\"} 7.0"), "{text}");
        assert!(text.contains("bare 4.0"), "{text}");
        assert!(!text.contains("no name"), "{text}");
    }

    #[test]
    fn load_kv_events_and_death_reach_their_handles() {
        let ctx = StartContext::detached(1);
        let sinks = Sinks::new(&ctx);
        publish(&sinks, json!({"load": {"running_requests": 3}}));
        assert_eq!(ctx.load.subscribe().borrow().running_requests, 3);
        publish(
            &sinks,
            json!({"kv": {"stored": {"parent": null, "blocks": [5, 6]}}}),
        );
        assert_eq!(ctx.kv_events.subscribe().snapshot.blocks.len(), 2);
        publish(&sinks, json!({"dead": {"reason": "the device is lost"}}));
        assert_eq!(
            ctx.health.dead_reason().as_deref(),
            Some("the device is lost")
        );
    }
}
