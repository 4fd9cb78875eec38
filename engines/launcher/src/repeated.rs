//! [`Repeated`]: a server's own metrics, as the worker's `/metrics` repeats them. They are read out of the text that the server told
//! last, whenever somebody looks; nobody waits for the server then. Nothing that it says is trusted: what is shown is made anew out of what was
//! understood.
//!
//! # Source
//! <https://prometheus.io/docs/specs/om/open_metrics_spec/>, which is what `/metrics` is. The servers tell the older text format, in which a
//! counter's family has `_total` in its name, and times of creation are gauges.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::MetricsRegistry;
use genset_backend_common::prometheus::collector::Collector;
use genset_backend_common::prometheus::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use genset_backend_common::prometheus::metrics::MetricType;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::dialect::Dialect;
use crate::exposition::{Sample, count, unescaped};

/// Samples that are read; what comes behind them is left out.
const MAX_SAMPLES: usize = 20_000;
/// Labels that a series may have beside those that are added here.
const MAX_LABELS: usize = 128;
/// What our own metrics begin with, and nobody else's.
const OURS: &str = "genset_";
/// What llama-server averages since it was last asked, which is each second: nearly always 0.
const SINCE_ASKED: [&str; 2] = [
    "llamacpp:prompt_tokens_seconds",
    "llamacpp:predicted_tokens_seconds",
];
/// The label of metrics that are not named after the server, such as those of its process.
const SERVER: &str = "server";

/// What a server told last. Clones share.
#[derive(Debug, Clone)]
pub(crate) struct Repeated {
    source: Source,
    told: Arc<Mutex<Option<Told>>>,
}

#[derive(Debug)]
struct Told {
    at: Instant,
    metrics: Arc<str>,
}

/// Whose metrics they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    server: &'static str,
    /// What the names of metrics begin with that are the server's alone.
    prefix: &'static str,
}

impl Source {
    /// `None` for a server that has no metrics in the text format.
    pub(crate) fn of(dialect: Dialect) -> Option<Self> {
        let prefix = match dialect {
            Dialect::Vllm => "vllm:",
            Dialect::Sglang => "sglang:",
            Dialect::LlamaServer => "llamacpp:",
            Dialect::Trtllm | Dialect::LlamaCppPython => return None,
        };
        let server = dialect.kind().name();
        Some(Self { server, prefix })
    }
}

impl Repeated {
    /// Nothing yet, of such a server, shown in `registry` where operators look.
    pub(crate) fn registered(source: Source, registry: &MetricsRegistry) -> Self {
        let repeated = Self {
            source,
            told: Arc::default(),
        };
        registry.register_private_collector(repeated.clone());
        repeated
    }

    /// Takes what the server tells now.
    pub(crate) fn tell(&self, metrics: &str) {
        *self.told.lock() = Some(Told {
            at: Instant::now(),
            metrics: metrics.into(),
        });
    }

    /// Forgets what was told longer ago.
    pub(crate) fn expire(&self, after: Duration) {
        let mut told = self.told.lock();
        told.take_if(|told| told.at.elapsed() >= after);
    }

    /// Forgets a server that is gone.
    pub(crate) fn forget(&self) {
        *self.told.lock() = None;
    }
}

impl Collector for Repeated {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let told = self
            .told
            .lock()
            .as_ref()
            .map(|told| Arc::clone(&told.metrics));
        match told {
            Some(metrics) => Families::read(&metrics, self.source).encode(&mut encoder),
            None => Ok(()),
        }
    }
}

/// By name, in order.
type Labels = Vec<(String, String)>;

/// What was understood, by the names of the samples.
#[derive(Debug, Default)]
struct Families {
    by_name: BTreeMap<String, Family>,
    /// The names of all samples that these families may have.
    taken: BTreeSet<String>,
}

#[derive(Debug)]
struct Family {
    help: String,
    series: Series,
}

/// Values by their labels.
#[derive(Debug)]
enum Series {
    Counters(BTreeMap<Labels, f64>),
    Gauges(BTreeMap<Labels, f64>),
    Histograms(BTreeMap<Labels, Histogram>),
}

#[derive(Debug, Default)]
struct Histogram {
    /// Upper bounds, and the observations up to each.
    buckets: Vec<(f64, f64)>,
    sum: f64,
}

/// What a sample is in its family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Counter,
    Gauge,
    Bucket,
    Sum,
    Count,
}

/// What the lines that begin with `#` say, by name.
#[derive(Debug, Default)]
struct About<'a> {
    kinds: BTreeMap<&'a str, &'a str>,
    helps: BTreeMap<&'a str, &'a str>,
}

impl<'a> About<'a> {
    fn read(metrics: &'a str) -> Self {
        let mut about = Self::default();
        for line in metrics.lines() {
            let (of, rest) = match (line.strip_prefix("# TYPE "), line.strip_prefix("# HELP ")) {
                (Some(rest), _) => (&mut about.kinds, rest),
                (None, Some(rest)) => (&mut about.helps, rest),
                (None, None) => continue,
            };
            if let Some((name, text)) = rest.split_once(' ')
                && !name.is_empty()
            {
                of.entry(name).or_insert(text);
            }
        }
        about
    }

    fn is(&self, name: &str, kinds: &[&str]) -> bool {
        let kind = self.kinds.get(name).map(|kind| kind.trim());
        kind.is_some_and(|kind| kinds.contains(&kind))
    }

    /// The family that a sample is of, by the name that it has here, and what it is there. Summaries and what else Prometheus' older
    /// format has become gauges of the same names; times of creation are left out.
    fn place<'n>(&self, name: &'n str) -> Option<(&'n str, Part)> {
        let parts = [
            ("_bucket", Part::Bucket),
            ("_sum", Part::Sum),
            ("_count", Part::Count),
        ];
        for (suffix, part) in parts {
            if let Some(family) = name.strip_suffix(suffix)
                && self.is(family, &["histogram"])
            {
                return Some((family, part));
            }
        }
        if let Some(family) = name.strip_suffix("_created")
            && (self.is(family, &["counter", "histogram", "summary"])
                || self.is(&format!("{family}_total"), &["counter"]))
        {
            return None;
        }
        if let Some(family) = name.strip_suffix("_total")
            && !family.is_empty()
            && (self.is(name, &["counter"]) || self.is(family, &["counter"]))
        {
            return Some((name, Part::Counter));
        }
        (!self.is(name, &["histogram"])).then_some((name, Part::Gauge))
    }

    /// On one line, whatever is in it.
    fn help(&self, name: &str) -> String {
        let of = ["", "_total", "_sum", "_count"];
        let mut told = of
            .iter()
            .filter_map(|suffix| self.helps.get(name.strip_suffix(*suffix)?));
        let help = unescaped(told.next().copied().unwrap_or_default());
        let is_shown = |c: char| if c.is_control() { ' ' } else { c };
        MetricsRegistry::escape_help(&help.chars().map(is_shown).collect::<String>())
    }
}

impl Families {
    fn read(metrics: &str, source: Source) -> Self {
        let about = About::read(metrics);
        let mut families = Self::default();
        let samples = metrics.lines().filter_map(Sample::read);
        for sample in samples.take(MAX_SAMPLES) {
            families.add(&sample, &about, source);
        }
        families
    }

    /// Adds a sample that makes sense beside those before it; others are left out.
    fn add(&mut self, sample: &Sample<'_>, about: &About<'_>, source: Source) -> Option<()> {
        let (name, part) = about.place(sample.name)?;
        let labels = labels(sample, part, source)?;
        let family = self.family(name, part, about)?;
        match (&mut family.series, part) {
            (Series::Counters(values), Part::Counter)
                if sample.value >= 0.0 && sample.value.is_finite() =>
            {
                values.entry(labels).or_insert(sample.value);
            }
            (Series::Gauges(values), Part::Gauge) => {
                values.entry(labels).or_insert(sample.value);
            }
            (Series::Histograms(all), Part::Bucket) => {
                let bound: f64 = sample.label("le")?.parse().ok()?;
                let buckets = &mut all.entry(labels).or_default().buckets;
                buckets.push((bound, sample.value));
            }
            (Series::Histograms(all), Part::Sum) => {
                all.entry(labels).or_default().sum = sample.value;
            }
            // The observations of a histogram are counted in its buckets.
            (Series::Counters(_) | Series::Gauges(_) | Series::Histograms(_), _) => {}
        }
        Some(())
    }

    /// A family that is there or can be: no name is of two.
    fn family(&mut self, name: &str, part: Part, about: &About<'_>) -> Option<&mut Family> {
        if !self.by_name.contains_key(name) {
            if name.starts_with(OURS) || SINCE_ASKED.contains(&name) {
                return None;
            }
            let names = names(name, part);
            if names.iter().any(|name| self.taken.contains(name)) {
                return None;
            }
            self.taken.extend(names);
            let series = match part {
                Part::Counter => Series::Counters(BTreeMap::new()),
                Part::Gauge => Series::Gauges(BTreeMap::new()),
                Part::Bucket | Part::Sum | Part::Count => Series::Histograms(BTreeMap::new()),
            };
            let help = about.help(name);
            let family = Family { help, series };
            self.by_name.insert(name.to_owned(), family);
        }
        self.by_name.get_mut(name)
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, family) in &self.by_name {
            let help = &family.help;
            match &family.series {
                Series::Counters(values) if values.is_empty() => {}
                Series::Counters(values) => {
                    // The registry adds the suffix.
                    let name = name.strip_suffix("_total").unwrap_or(name);
                    let mut metric =
                        encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
                    for (labels, value) in values {
                        write(&mut metric, labels, |series| {
                            series.encode_counter::<NoLabelSet, _, f64>(value, None)
                        })?;
                    }
                }
                Series::Gauges(values) => {
                    let mut metric =
                        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                    for (labels, value) in values {
                        write(&mut metric, labels, |series| series.encode_gauge(value))?;
                    }
                }
                Series::Histograms(all) => {
                    let all = all.iter().filter_map(|(labels, histogram)| {
                        Some((labels, histogram.sum, histogram.counts()?))
                    });
                    let all: Vec<_> = all.collect();
                    if all.is_empty() {
                        continue;
                    }
                    let mut metric =
                        encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
                    for (labels, sum, (counts, total)) in &all {
                        write(&mut metric, labels, |series| {
                            series.encode_histogram::<NoLabelSet>(*sum, *total, counts, None)
                        })?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Histogram {
    /// Upper bounds with the observations above the bound before, and all observations; `None` for what is no histogram.
    fn counts(&self) -> Option<(Vec<(f64, u64)>, u64)> {
        let mut buckets = self.buckets.clone();
        buckets.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let bounds = || buckets.iter().map(|(bound, _)| *bound);
        let is_whole = bounds().next_back() == Some(f64::INFINITY);
        if !is_whole || !bounds().is_sorted_by(|lower, upper| lower < upper) {
            return None;
        }
        let mut total: u64 = 0;
        let above = buckets.iter().map(|(bound, up_to)| {
            let before = std::mem::replace(&mut total, count(*up_to)?);
            Some((*bound, total.checked_sub(before)?))
        });
        let counts = above.collect::<Option<Vec<_>>>()?;
        Some((counts, total))
    }
}

/// The labels of a series, without the bound of a bucket; `None` for what Prometheus would not take.
fn labels(sample: &Sample<'_>, part: Part, source: Source) -> Option<Labels> {
    let is_of_histogram = matches!(part, Part::Bucket | Part::Sum | Part::Count);
    let is_bound = |name: &str| is_of_histogram && name == "le";
    let mut labels = Labels::new();
    for (name, value) in &sample.labels {
        if name.starts_with("__") || (is_bound(name) && part != Part::Bucket) {
            return None;
        }
        if !is_bound(name) {
            let is_shown = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
            let value = value.chars().map(is_shown).collect();
            labels.push(((*name).to_owned(), value));
        }
    }
    let is_named = labels.iter().any(|(name, _)| name == SERVER);
    if labels.len() - usize::from(is_named) > MAX_LABELS {
        return None;
    }
    if !is_named && !sample.name.starts_with(source.prefix) {
        labels.push((SERVER.to_owned(), source.server.to_owned()));
    }
    labels.sort();
    let is_once = labels.is_sorted_by(|(one, _), (other, _)| one < other);
    is_once.then_some(labels)
}

/// The names of all samples that a family may have, and its own.
fn names(name: &str, part: Part) -> Vec<String> {
    let (family, suffixes): (_, &[&str]) = match part {
        Part::Gauge => (name, &[""]),
        Part::Counter => {
            let family = name.strip_suffix("_total").unwrap_or(name);
            (family, &["", "_total", "_created"])
        }
        Part::Bucket | Part::Sum | Part::Count => {
            (name, &["", "_bucket", "_sum", "_count", "_created"])
        }
    };
    let with = |suffix: &&str| format!("{family}{suffix}");
    suffixes.iter().map(with).collect()
}

fn write(
    metric: &mut MetricEncoder<'_>,
    labels: &Labels,
    value: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    // An empty family would be written with empty braces.
    if labels.is_empty() {
        return value(metric);
    }
    value(&mut metric.encode_family(labels)?)
}

#[cfg(test)]
mod tests;
