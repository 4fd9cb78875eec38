//! [`Repeated`]: a server's own metrics, repeated in the worker's `/metrics`. They are parsed from the last text whenever
//! `/metrics` is read, so no reader waits for the server. Nothing in the text is trusted: the output is rebuilt from what was
//! parsed.
//!
//! # Source
//! <https://prometheus.io/docs/specs/om/open_metrics_spec/>, the format of `/metrics`. The servers use the older text format,
//! in which a counter family's name includes `_total`, and creation times are gauges.

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

/// The maximum number of samples; further ones are left out.
const MAX_SAMPLES: usize = 20_000;
/// The maximum number of a series' own labels.
const MAX_LABELS: usize = 128;
/// The prefix of our own metrics; a server must not use it.
const OURS: &str = "genset_";
/// llama-server's averages since the last question, which is asked every second: nearly always 0.
const SINCE_ASKED: [&str; 2] = [
    "llamacpp:prompt_tokens_seconds",
    "llamacpp:predicted_tokens_seconds",
];
/// The label of metrics that are not named after the server, such as those of its process.
const SERVER: &str = "server";

/// The last metrics of a server. Clones share them.
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

/// The server that the metrics come from.
#[derive(Debug, Clone, Copy)]
struct Source {
    server: &'static str,
    /// The name prefix of metrics that only this server has.
    prefix: &'static str,
}

impl Source {
    fn of(dialect: Dialect) -> Option<Self> {
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
    /// Registers an empty set of metrics in `registry`; `None` for a server without metrics in the text format.
    pub(crate) fn registered(dialect: Dialect, registry: &MetricsRegistry) -> Option<Self> {
        let repeated = Self {
            source: Source::of(dialect)?,
            told: Arc::default(),
        };
        registry.register_private_collector(repeated.clone());
        Some(repeated)
    }

    /// Sets the server's current metrics.
    pub(crate) fn tell(&self, metrics: &str) {
        *self.told.lock() = Some(Told {
            at: Instant::now(),
            metrics: metrics.into(),
        });
    }

    /// Discards metrics that are older than `after`.
    pub(crate) fn expire(&self, after: Duration) {
        let mut told = self.told.lock();
        told.take_if(|told| told.at.elapsed() >= after);
    }

    /// Discards the metrics of a server that is gone.
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

/// Sorted by name.
type Labels = Vec<(String, String)>;

/// The parsed families, by name.
#[derive(Debug, Default)]
struct Families {
    by_name: BTreeMap<String, Family>,
    /// All sample names that these families may have.
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
    /// Upper bounds, with the number of observations up to each.
    buckets: Vec<(f64, f64)>,
    sum: f64,
}

/// The role of a sample in its family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Counter,
    Gauge,
    Bucket,
    Sum,
    Count,
}

/// The comment lines (`#`), by name.
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

    /// The family and the part that a sample name belongs to. Summaries and other types of the older format become gauges with
    /// the same names; creation times are left out.
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

    /// The help text, made one line.
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

    /// Adds a sample that is consistent with the previous ones; ignores others.
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
            // A histogram's buckets already count its observations.
            (Series::Counters(_) | Series::Gauges(_) | Series::Histograms(_), _) => {}
        }
        Some(())
    }

    /// Finds or creates a family; a name cannot belong to two.
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
    /// Upper bounds with the observations in each bucket, and the total; `None` if it is not a valid histogram.
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

/// The labels of a series, without a bucket's bound; `None` if Prometheus would refuse them.
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

/// All sample names that a family may have, including its own.
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
