//! [`PublishedMetrics`]: metrics that an engine publishes as data, shown on the worker's `/metrics`. For engines in another
//! process, or in another language in this process. A Rust engine registers its metrics in its [`MetricsRegistry`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use serde::Deserialize;

use crate::handles::MetricsRegistry;

/// The label that distinguishes several workers in one process. An engine's own series cannot have it: with a duplicate label,
/// all of `/metrics` would be refused.
pub const ENDPOINT_LABEL: &str = "genset_endpoint";

/// The most series of one process; further ones are dropped with a warning.
const MAX_SERIES: usize = 4096;
/// The most buckets of a histogram.
const MAX_BUCKETS: usize = 128;
/// The most bytes of a series' name, labels and help together; a longer one is dropped with a warning.
const MAX_TEXT_BYTES: usize = 4 << 10;
/// The warning, given once: a process publishes its series repeatedly.
const OVER_LIMIT: &str = "this series is dropped, as are all others over a limit: 4096 series, and 4 KiB for the name, the labels \
                          and the help of each";

/// The current value of one series.
#[derive(Debug, Clone, Deserialize)]
pub struct MetricSample {
    name: String,
    #[serde(default)]
    help: String,
    kind: SampleKind,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// For a gauge or counter.
    #[serde(default)]
    value: f64,
    /// For a histogram: upper bound, and observations above the previous bound. The last bound is infinite.
    #[serde(default)]
    buckets: Vec<(f64, u64)>,
    /// For a histogram: the sum of all observations.
    #[serde(default)]
    sum: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SampleKind {
    Gauge,
    Counter,
    Histogram,
}

impl MetricSample {
    /// Returns why Prometheus would refuse the sample.
    fn problem(&self) -> Option<&'static str> {
        if !is_metric_name(&self.name) || !self.labels.keys().all(|name| is_label_name(name)) {
            return Some("a metric whose name or labels are not valid in Prometheus");
        }
        if self.labels.contains_key(ENDPOINT_LABEL) {
            return Some("a metric with the label genset_endpoint, which the worker sets");
        }
        if self.kind != SampleKind::Histogram {
            return None;
        }
        let bounds: Vec<f64> = self.buckets.iter().map(|(bound, _)| *bound).collect();
        if bounds.last() != Some(&f64::INFINITY) || bounds.len() > MAX_BUCKETS {
            return Some("a histogram needs 1 to 128 buckets, the last with an infinite bound");
        }
        if !bounds.is_sorted_by(|lower, upper| lower < upper) {
            return Some("a histogram whose bounds do not rise");
        }
        let mut counts = self.buckets.iter().map(|(_, count)| *count);
        let count = counts.try_fold(0, u64::checked_add);
        let problem = "a histogram whose counts together exceed 64 bits";
        count.is_none().then_some(problem)
    }

    /// Returns the bytes kept for it beside its value.
    fn text_bytes(&self) -> usize {
        let labels = self.labels.iter();
        let labels = labels.map(|(name, value)| name.len() + value.len());
        self.name.len() + self.help.len() + labels.sum::<usize>()
    }

    fn value(self) -> Value {
        match self.kind {
            SampleKind::Gauge => Value::Gauge(self.value),
            SampleKind::Counter => Value::Counter(self.value),
            SampleKind::Histogram => Value::Histogram {
                buckets: self.buckets,
                sum: self.sum,
            },
        }
    }
}

#[derive(Debug)]
enum Value {
    Gauge(f64),
    Counter(f64),
    Histogram { buckets: Vec<(f64, u64)>, sum: f64 },
}

impl Value {
    fn encode(&self, series: &mut MetricEncoder<'_>) -> fmt::Result {
        match self {
            Self::Gauge(value) => series.encode_gauge(value),
            Self::Counter(value) => series.encode_counter::<NoLabelSet, _, f64>(value, None),
            Self::Histogram { buckets, sum } => {
                // Cannot overflow: a histogram whose counts do is dropped before.
                let count = buckets.iter().map(|(_, count)| count).sum();
                series.encode_histogram::<NoLabelSet>(*sum, count, buckets, None)
            }
        }
    }
}

/// The metrics that an engine publishes: the last value of each series. Keeps at most 4096 series, each with at most 4 KiB of
/// name, labels and help. Other series, and those that Prometheus would refuse, are dropped with a warning. Clones share state.
#[derive(Debug, Clone, Default)]
pub struct PublishedMetrics(Arc<Mutex<Families>>);

impl PublishedMetrics {
    /// Returns an empty set, shown by `registry`.
    #[must_use]
    pub fn register(registry: &MetricsRegistry) -> Self {
        let metrics = Self::default();
        metrics.register_in(registry);
        metrics
    }

    /// Makes `registry` show them, including those already published.
    pub fn register_in(&self, registry: &MetricsRegistry) {
        registry.register_collector(self.clone());
    }

    /// Sets series to these values.
    pub fn publish(&self, samples: Vec<MetricSample>) {
        self.0.lock().extend(samples);
    }

    /// Drops all of them: their publisher is gone.
    pub fn clear(&self) {
        *self.0.lock() = Families::default();
    }
}

/// The last value of every series, by the metric's name.
#[derive(Debug, Default)]
struct Families {
    by_name: BTreeMap<String, Family>,
    series: usize,
    /// Whether the warning about limits was given.
    is_over_limit: bool,
}

#[derive(Debug)]
struct Family {
    kind: SampleKind,
    help: String,
    values: BTreeMap<Vec<(String, String)>, Value>,
}

impl Families {
    fn extend(&mut self, samples: Vec<MetricSample>) {
        for sample in samples {
            let name = sample.name.clone();
            if let Err(problem) = self.set(sample) {
                tracing::warn!(name, "{problem}");
            }
        }
    }

    fn set(&mut self, sample: MetricSample) -> Result<(), &'static str> {
        if let Some(problem) = sample.problem() {
            return Err(problem);
        }
        if sample.text_bytes() > MAX_TEXT_BYTES {
            return self.over_limit();
        }
        let labels: Vec<_> = sample.labels.clone().into_iter().collect();
        if let Some(family) = self.by_name.get_mut(&sample.name) {
            if family.kind != sample.kind {
                return Err("a metric that was of another kind before");
            }
            if let Some(value) = family.values.get_mut(&labels) {
                *value = sample.value();
                return Ok(());
            }
        }
        // Before storing anything, so that no family without a value remains.
        if self.series >= MAX_SERIES {
            return self.over_limit();
        }
        self.series += 1;
        let family = self
            .by_name
            .entry(sample.name.clone())
            .or_insert_with(|| Family {
                kind: sample.kind,
                help: MetricsRegistry::escape_help(&sample.help),
                values: BTreeMap::new(),
            });
        family.values.insert(labels, sample.value());
        Ok(())
    }

    /// Returns the warning, the first time.
    fn over_limit(&mut self) -> Result<(), &'static str> {
        if std::mem::replace(&mut self.is_over_limit, true) {
            return Ok(());
        }
        Err(OVER_LIMIT)
    }
}

/// Returns whether Prometheus accepts it as a metric name.
#[must_use]
pub fn is_metric_name(name: &str) -> bool {
    is_name(name, |c| c == '_' || c == ':')
}

/// Returns whether Prometheus accepts it as a label name.
#[must_use]
pub fn is_label_name(name: &str) -> bool {
    is_name(name, |c| c == '_')
}

fn is_name(name: &str, also: fn(char) -> bool) -> bool {
    !name.starts_with(|c: char| c.is_ascii_digit())
        && !name.is_empty()
        && name.chars().all(|c| c.is_ascii_alphanumeric() || also(c))
}

impl Collector for PublishedMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, family) in &self.0.lock().by_name {
            let (kind, name) = match family.kind {
                SampleKind::Gauge => (MetricType::Gauge, name.as_str()),
                SampleKind::Histogram => (MetricType::Histogram, name.as_str()),
                // The registry appends the suffix.
                SampleKind::Counter => (
                    MetricType::Counter,
                    name.strip_suffix("_total").unwrap_or(name),
                ),
            };
            let mut metric = encoder.encode_descriptor(name, &family.help, None, kind)?;
            for (labels, value) in &family.values {
                // An empty label set would be written with empty braces.
                if labels.is_empty() {
                    value.encode(&mut metric)?;
                } else {
                    value.encode(&mut metric.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns what `/metrics` shows for samples.
    fn shown(samples: &[serde_json::Value]) -> String {
        let registry = MetricsRegistry::default();
        let metrics = PublishedMetrics::register(&registry);
        metrics.publish(serde_json::from_value(samples.into()).unwrap());
        registry.encode()
    }

    #[test]
    fn the_last_value_of_every_series_is_shown() {
        let sample = |name, kind, value| json!({"name": name, "kind": kind, "value": value, "labels": {"rank": "0"}, "help": "H"});
        let text = shown(&[
            sample("my_queue", "gauge", 2.5),
            sample("my_steps_total", "counter", 7.0),
            sample("my_queue", "gauge", 3.0),
            sample("my_queue", "counter", 9.0),
            sample("no name", "gauge", 1.0),
            json!({"name": "bare", "kind": "gauge", "value": 4.0}),
            json!({"name": "forged", "kind": "gauge", "labels": {ENDPOINT_LABEL: "a.b.c"}}),
        ]);
        assert!(text.contains("my_queue{rank=\"0\"} 3.0"), "{text}");
        assert!(text.contains("my_steps_total{rank=\"0\"} 7.0"), "{text}");
        assert!(text.contains("bare 4.0"), "{text}");
        assert!(!text.contains("no name"), "{text}");
        assert!(!text.contains("forged"), "{text}");
    }

    #[test]
    fn a_help_text_of_several_lines_stays_on_one() {
        let text = shown(&[
            json!({"name": "my_queue", "kind": "gauge", "value": 1.0, "help": "One\nbad line \\ two"}),
        ]);
        let lines: Vec<&str> = text.lines().collect();
        let expected = [
            r"# HELP my_queue One\nbad line \\ two",
            "# TYPE my_queue gauge",
            "my_queue 1.0",
            "# EOF",
        ];
        assert_eq!(lines, expected);
    }

    fn shown_histogram(bounds: &[f64]) -> String {
        let sample = MetricSample {
            kind: SampleKind::Histogram,
            labels: BTreeMap::from([("rank".to_owned(), "1".to_owned())]),
            buckets: bounds.iter().map(|bound| (*bound, 2)).collect(),
            sum: 4.5,
            ..gauge("my_step_seconds", "")
        };
        let registry = MetricsRegistry::default();
        PublishedMetrics::register(&registry).publish(vec![sample]);
        registry.encode()
    }

    #[test]
    fn a_histogram_has_its_buckets_sum_and_count() {
        let text = shown_histogram(&[0.5, 1.0, f64::INFINITY]);
        for line in [
            "# TYPE my_step_seconds histogram",
            "my_step_seconds_sum{rank=\"1\"} 4.5",
            "my_step_seconds_count{rank=\"1\"} 6",
            "my_step_seconds_bucket{le=\"0.5\",rank=\"1\"} 2",
            "my_step_seconds_bucket{le=\"1.0\",rank=\"1\"} 4",
            "my_step_seconds_bucket{le=\"+Inf\",rank=\"1\"} 6",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_histogram_that_makes_no_sense_is_dropped() {
        for bounds in [
            &[][..],
            &[1.0],
            &[2.0, 1.0, f64::INFINITY],
            &[f64::NAN, f64::INFINITY],
        ] {
            assert!(!shown_histogram(bounds).contains("my_step"), "{bounds:?}");
        }
    }

    #[test]
    fn series_beyond_the_limit_are_dropped() {
        let sample = |number: usize| json!({"name": "many", "kind": "gauge", "value": 1.0, "labels": {"n": number.to_string()}});
        let samples: Vec<_> = (0..MAX_SERIES + 10).map(sample).collect();
        let lines = shown(&samples);
        let lines = lines.lines().filter(|line| line.starts_with("many{"));
        assert_eq!(lines.count(), MAX_SERIES);
    }

    fn gauge(name: &str, help: &str) -> MetricSample {
        MetricSample {
            name: name.to_owned(),
            help: help.to_owned(),
            kind: SampleKind::Gauge,
            labels: BTreeMap::new(),
            value: 1.0,
            buckets: Vec::new(),
            sum: 0.0,
        }
    }

    #[test]
    fn names_beyond_the_limit_leave_no_family() {
        let mut families = Families::default();
        let samples = (0..10_000).map(|number| gauge(&format!("many_{number}"), "H"));
        families.extend(samples.collect());
        assert_eq!(families.by_name.len(), MAX_SERIES);
        let is_whole = |family: &Family| family.values.len() == 1;
        assert!(families.by_name.values().all(is_whole));
        // Known series still update.
        let mut known = gauge("many_0", "H");
        known.value = 2.0;
        families.set(known).unwrap();
        let values: Vec<_> = families.by_name["many_0"].values.values().collect();
        assert!(matches!(values[..], [Value::Gauge(2.0)]), "{values:?}");
    }

    #[test]
    fn series_with_too_much_text_are_dropped_with_one_warning() {
        let mut families = Families::default();
        let much = "x".repeat(MAX_TEXT_BYTES);
        let mut labelled = gauge("labelled", "");
        labelled.labels = BTreeMap::from([("rank".to_owned(), much.clone())]);
        assert_eq!(families.set(labelled), Err(OVER_LIMIT));
        for (name, help) in [("helped", much.as_str()), (much.as_str(), "H")] {
            assert_eq!(families.set(gauge(name, help)), Ok(()));
        }
        assert!(families.by_name.is_empty());
        // Exactly at the limit.
        let (name, help) = much.split_at(8);
        families.set(gauge(name, help)).unwrap();
        assert_eq!(families.by_name.len(), 1);
    }

    #[test]
    fn a_histogram_of_more_observations_than_can_be_counted_is_dropped() {
        let registry = MetricsRegistry::default();
        let metrics = PublishedMetrics::register(&registry);
        let histogram = |name, first| MetricSample {
            kind: SampleKind::Histogram,
            buckets: vec![(1.0, first), (f64::INFINITY, 1)],
            ..gauge(name, "H")
        };
        let samples = vec![
            histogram("my_many", u64::MAX - 1),
            histogram("my_more", u64::MAX),
        ];
        metrics.publish(samples);
        let text = registry.encode();
        let count = format!("my_many_count {}\n", u64::MAX);
        assert!(text.contains(&count), "{text}");
        assert!(!text.contains("my_more"), "{text}");
    }
}
