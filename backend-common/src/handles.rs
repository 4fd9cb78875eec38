//! The handles that an engine receives at start: metrics, load, progress and health. Each is cheap to clone, never waits, and
//! also works without a Worker, unconnected.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::error::{EngineError, STOPPED_EARLY};

/// Upper bounds of latency histograms, in seconds: from one millisecond, mostly doubling, to ten minutes. Frontend and worker use
/// the same bounds, so that their histograms are comparable.
pub const LATENCY_BUCKETS_S: [f64; 18] = [
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0,
    64.0, 256.0, 600.0,
];

/// Registers metrics; shared by everything in a process that serves one `/metrics`.
///
/// # Examples
/// ```
/// use genset_backend_common::MetricsRegistry;
/// use genset_backend_common::prometheus::metrics::gauge::Gauge;
///
/// let registry = MetricsRegistry::default();
/// let running: Gauge = registry.create("genset_sample_running_requests", "Requests being served");
/// running.set(3);
/// assert!(registry.encode().contains("genset_sample_running_requests 3"));
/// ```
#[derive(Clone, Default)]
pub struct MetricsRegistry {
    registry: Arc<Mutex<Registry>>,
    /// Metrics for operators only.
    private: Arc<Mutex<Registry>>,
    /// The labelled registries shown with this one, while they live.
    parts: Arc<Mutex<Vec<Part>>>,
}

/// A labelled registry as its parent holds it: the public metrics, and the private ones.
type Part = (Weak<Mutex<Registry>>, Weak<Mutex<Registry>>);

impl MetricsRegistry {
    /// Registers a metric under its full name. `help` is a sentence without its full stop.
    pub fn register(&self, name: &str, help: &str, metric: impl Metric) {
        let help = Self::escape_help(help);
        self.registry.lock().register(name, help, metric);
    }

    /// Registers a new metric with no counts, and returns it.
    #[must_use]
    pub fn create<M: Metric + Clone + Default>(&self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.register(name, help, metric.clone());
        metric
    }

    /// Like [`create`](Self::create), for a histogram with these upper bounds, smallest first.
    #[must_use]
    pub fn histogram(
        &self,
        name: &str,
        help: &str,
        bounds: impl IntoIterator<Item = f64>,
    ) -> Histogram {
        let metric = Histogram::new(bounds);
        self.register(name, help, metric.clone());
        metric
    }

    /// Like [`create`](Self::create), for a metric whose labels name clients: shown to operators only, not on public ports.
    #[must_use]
    pub fn create_private<M: Metric + Clone + Default>(&self, name: &str, help: &str) -> M {
        let metric = M::default();
        let help = Self::escape_help(help);
        self.private.lock().register(name, help, metric.clone());
        metric
    }

    /// Escapes line breaks and backslashes in a help text, as the text format requires. A collector must escape help texts from
    /// other sources: its encoder does not, and one line break makes all of `/metrics` unreadable.
    #[must_use]
    pub fn escape_help(help: &str) -> String {
        help.replace('\\', r"\\").replace('\n', r"\n")
    }

    /// Registers metrics that are computed on each read.
    pub fn register_collector(&self, collector: impl Collector) {
        self.registry.lock().register_collector(Box::new(collector));
    }

    /// Like [`register_collector`](Self::register_collector), for metrics shown to operators only, not on public ports.
    pub fn register_private_collector(&self, collector: impl Collector) {
        self.private.lock().register_collector(Box::new(collector));
    }

    /// Returns a registry whose metrics appear with this one's under an additional label, until its last clone is dropped: for a
    /// process with several workers, at once or in sequence. The registries of a labelled registry are not shown with this one.
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::MetricsRegistry;
    /// use genset_backend_common::prometheus::metrics::gauge::Gauge;
    ///
    /// let process = MetricsRegistry::default();
    /// let worker = process.labelled("worker", "first");
    /// let _running: Gauge = worker.create("running", "Requests being served");
    /// assert!(process.encode().contains(r#"running{worker="first"} 0"#));
    /// drop(worker);
    /// assert_eq!(process.encode(), "# EOF\n");
    /// ```
    #[must_use]
    pub fn labelled(&self, name: &str, value: &str) -> Self {
        let registry = || {
            let label = (Cow::Owned(name.to_owned()), Cow::Owned(value.to_owned()));
            Arc::new(Mutex::new(Registry::with_labels(std::iter::once(label))))
        };
        let part = Self {
            registry: registry(),
            private: registry(),
            parts: Arc::default(),
        };
        let mut parts = self.parts.lock();
        parts.retain(|(registry, _)| registry.strong_count() > 0);
        parts.push((
            Arc::downgrade(&part.registry),
            Arc::downgrade(&part.private),
        ));
        part
    }

    /// Returns every metric in the OpenMetrics text format, for operators.
    #[must_use]
    pub fn encode(&self) -> String {
        let parts = self.parts();
        let parts: Vec<_> = parts
            .iter()
            .flat_map(|[registry, private]| [&**registry, &**private])
            .collect();
        Self::text(&[&self.registry, &self.private], &parts)
    }

    /// Like [`encode`](Self::encode), without the private metrics: for the public.
    #[must_use]
    pub fn encode_public(&self) -> String {
        let parts = self.parts();
        let parts: Vec<_> = parts.iter().map(|[registry, _]| &**registry).collect();
        Self::text(&[&self.registry], &parts)
    }

    /// Returns the labelled registries that are still alive.
    fn parts(&self) -> Vec<[Arc<Mutex<Registry>>; 2]> {
        let parts = self.parts.lock();
        let live = parts
            .iter()
            .filter_map(|(registry, private)| Some([registry.upgrade()?, private.upgrade()?]));
        live.collect()
    }

    fn text(own: &[&Mutex<Registry>], parts: &[&Mutex<Registry>]) -> String {
        let mut text = String::new();
        let encoded = own
            .iter()
            .chain(parts)
            .try_for_each(|registry| encode_registry(&mut text, &registry.lock()));
        if !parts.is_empty() {
            text = families_together(&text);
        }
        if encoded.and_then(|()| encode_eof(&mut text)).is_err() {
            // Writing to a String only fails if a metric's own encoder fails.
            tracing::error!("a metric could not be encoded; /metrics is cut short");
        }
        text
    }
}

/// Groups the lines of a metric from several registries: the format requires one block under one head. If two registries disagree
/// about its type, the first one wins.
fn families_together(text: &str) -> String {
    let mut families: Vec<Vec<&str>> = Vec::new();
    for line in text.split_inclusive('\n') {
        match families.last_mut() {
            Some(family) if !line.starts_with("# HELP ") => family.push(line),
            Some(_) | None => families.push(vec![line]),
        }
    }
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut together: Vec<Vec<&str>> = Vec::with_capacity(families.len());
    for family in families {
        let head = family.first().copied().unwrap_or_default();
        let name = head.split(' ').nth(2).unwrap_or_default();
        match places.entry(name) {
            Entry::Vacant(place) => {
                place.insert(together.len());
                together.push(family);
            }
            Entry::Occupied(place) => {
                let first = &mut together[*place.get()];
                // The line after the head has the type.
                if first.get(1) == family.get(1) {
                    first.extend(family.into_iter().filter(|line| !line.starts_with('#')));
                }
            }
        }
    }
    together.concat().concat()
}

crate::debug_as!(|_| MetricsRegistry { .. });

/// The load of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Requests that are running.
    pub running_requests: u32,
    /// Requests accepted and not yet scheduled.
    pub waiting_requests: u32,
    /// KV blocks in use.
    pub kv_used_blocks: u64,
    /// The total number of KV blocks; 0 if the engine has none.
    pub kv_total_blocks: u64,
    /// KV events published so far, summed over the ranks if each has its own. Set by the Worker.
    #[serde(skip_serializing_if = "is_zero")]
    pub kv_events: u64,
    /// The maximum number of requests, running and waiting together; more are refused. 0 if unknown. Set by the Worker.
    #[serde(skip_serializing_if = "is_zero")]
    pub max_requests: u64,
    /// Median time from the call of `generate` to the first item, over the recent requests, in microseconds; `None` before the
    /// first. Set by the Worker, as are the two below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recent_ttft_us: Option<u64>,
    /// Prompt tokens of the recent requests.
    #[serde(skip_serializing_if = "is_zero")]
    pub recent_prompt_tokens: u64,
    /// Those whose KV blocks were reused.
    #[serde(skip_serializing_if = "is_zero")]
    pub recent_cached_tokens: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The requests that a Worker has admitted or queued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Admitted {
    /// Requests in the engine.
    pub running_requests: u32,
    /// Requests waiting for a slot in the engine.
    pub waiting_requests: u32,
    /// The maximum of both together.
    pub max_requests: u64,
}

impl Load {
    /// Returns the number of running and waiting requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        u64::from(self.running_requests) + u64::from(self.waiting_requests)
    }

    /// Returns a Worker's load: the engine's, plus the requests queued before the engine, and the limit on all of them. If the
    /// engine publishes no load, all admitted requests count as running.
    #[must_use]
    pub fn at_worker(self, admitted: Admitted) -> Self {
        let waiting_inside = self.waiting_requests.min(admitted.running_requests);
        Self {
            running_requests: admitted.running_requests - waiting_inside,
            waiting_requests: admitted.waiting_requests.saturating_add(waiting_inside),
            max_requests: admitted.max_requests,
            ..self
        }
    }
}

/// Where an engine publishes its [`Load`]; the latest value counts.
#[derive(Debug, Clone, Default)]
pub struct LoadPublisher {
    sender: Arc<watch::Sender<Load>>,
    /// The KV blocks that the engine declared; accessed under the lock of `sender`.
    declared_blocks: Arc<AtomicU64>,
}

impl LoadPublisher {
    /// Publishes the current load. If `kv_total_blocks` is 0, a Worker substitutes the number that its engine declared
    /// ([`EngineConfig::kv_total_blocks`](crate::EngineConfig::kv_total_blocks)).
    pub fn publish(&self, mut load: Load) {
        self.sender.send_if_modified(|current| {
            self.fill_in(&mut load);
            std::mem::replace(current, load) != load
        });
    }

    /// Sets the number of KV blocks that the engine declared.
    pub(crate) fn declare_blocks(&self, blocks: u64) {
        self.sender.send_if_modified(|current| {
            self.declared_blocks.store(blocks, Ordering::Relaxed);
            let before = *current;
            self.fill_in(current);
            *current != before
        });
    }

    fn fill_in(&self, load: &mut Load) {
        if load.kv_total_blocks == 0 {
            load.kv_total_blocks = self.declared_blocks.load(Ordering::Relaxed);
        }
    }

    /// Subscribes to the load.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Load> {
        self.sender.subscribe()
    }
}

/// The progress of a long start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// The current stage ("loading weights").
    pub stage: String,
    /// The completed fraction, `0.0..=1.0`; `None` if unknown.
    pub fraction: Option<f32>,
}

/// Where an engine reports the progress of its start; shown as a bar on a terminal and as log lines elsewhere.
#[derive(Debug, Clone, Default)]
pub struct ProgressReporter {
    sender: Arc<watch::Sender<Progress>>,
}

impl ProgressReporter {
    /// Reports the current stage; `fraction` is clamped to `0.0..=1.0`.
    pub fn report(&self, stage: &str, fraction: Option<f32>) {
        let fraction = fraction.map(|f| f.clamp(0.0, 1.0));
        self.sender.send_replace(Progress {
            stage: stage.to_owned(),
            fraction,
        });
    }

    /// Subscribes to the progress.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Progress> {
        self.sender.subscribe()
    }
}

/// Where an engine reports that it has failed: its device is lost, or its scheduler thread has died. The Worker then unlists the
/// instance, ends every request with a migratable error, cleans up and exits as failed.
///
/// An engine that recovers by itself reports instead that it is down, and later that it is up. The Worker then unlists the
/// instance, ends its requests likewise, waits, and lists it again once a canary has passed.
#[derive(Debug, Clone, Default)]
pub struct HealthReporter {
    dead: CancellationToken,
    reason: Arc<Mutex<Option<String>>>,
    down: Arc<watch::Sender<Option<String>>>,
    steps: Arc<AtomicU64>,
}

impl HealthReporter {
    /// Reports the engine dead. The first reason wins.
    pub fn report_dead(&self, reason: impl Into<String>) {
        self.reason.lock().get_or_insert_with(|| reason.into());
        self.dead.cancel();
    }

    /// Reports that the engine does not serve until [`report_up`](Self::report_up).
    pub fn report_down(&self, reason: impl Into<String>) {
        self.down.send_replace(Some(reason.into()));
    }

    /// Reports that an engine that was down serves again.
    pub fn report_up(&self) {
        self.down.send_replace(None);
    }

    /// Reports that the engine has computed a step for any of its requests. While steps are reported, an engine whose canary
    /// waits behind a long prompt counts as alive.
    pub fn report_step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the total number of reported steps.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Subscribes to whether the engine is down, with the reason; `None` while it is up.
    #[must_use]
    pub fn downs(&self) -> watch::Receiver<Option<String>> {
        self.down.subscribe()
    }

    /// Returns the reason, once the engine was reported dead.
    #[must_use]
    pub fn dead_reason(&self) -> Option<String> {
        self.reason.lock().clone()
    }

    /// Returns the error for requests that the engine ends when it stops: `Disconnected` if it was reported dead, else
    /// `EngineShutdown`.
    #[must_use]
    pub fn stopped(&self) -> EngineError {
        match self.dead_reason() {
            Some(_) => EngineError::lost_with_engine(),
            None => EngineError::engine_shutdown(STOPPED_EARLY),
        }
    }

    /// Waits until the engine is reported dead, and returns the reason.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn died(&self) -> String {
        self.dead.cancelled().await;
        self.dead_reason().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
    use prometheus_client::metrics::MetricType;
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::{ConstGauge, Gauge};

    use super::*;
    use crate::error::ErrorKind;

    #[derive(Debug)]
    struct One(&'static str);

    impl Collector for One {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let metric = encoder.encode_descriptor(self.0, "One.", None, MetricType::Gauge)?;
            ConstGauge::new(1i64).encode(metric)
        }
    }

    #[test]
    fn private_collectors_are_for_operators_alone() {
        let registry = MetricsRegistry::default();
        registry.register_collector(One("shown"));
        registry.register_private_collector(One("private"));
        let (all, public) = (registry.encode(), registry.encode_public());
        assert!(all.contains("shown 1\n") && all.contains("private 1\n"));
        assert!(public.contains("shown 1\n") && !public.contains("private"));
        assert!(all.ends_with("# EOF\n") && all.matches("# EOF").count() == 1);
    }

    #[test]
    fn metrics_of_several_parts_stand_together_until_their_part_is_dropped() {
        let process = MetricsRegistry::default();
        let links: Gauge = process.create("links", "Connections");
        links.set(1);
        let [first, second] = ["a.b.c", "a.b.d"].map(|name| process.labelled("worker", name));
        let running = [&first, &second].map(|part| part.create::<Gauge>("running", "Requests"));
        for (gauge, value) in running.iter().zip([2, 3]) {
            gauge.set(value);
        }
        first.register_collector(One("shown"));
        second.register_private_collector(One("private"));
        let expected = [
            "# HELP links Connections.",
            "# TYPE links gauge",
            "links 1",
            "# HELP running Requests.",
            "# TYPE running gauge",
            r#"running{worker="a.b.c"} 2"#,
            r#"running{worker="a.b.d"} 3"#,
            "# HELP shown One.",
            "# TYPE shown gauge",
            r#"shown{worker="a.b.c"} 1"#,
            "# HELP private One.",
            "# TYPE private gauge",
            r#"private{worker="a.b.d"} 1"#,
            "# EOF",
        ];
        let text = process.encode();
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert!(!process.encode_public().contains("private"));
        drop(second);
        let text = process.encode();
        assert!(text.contains("a.b.c") && !text.contains("a.b.d"), "{text}");
        // Its metrics may live on, but are no longer shown.
        drop(first);
        running[0].set(4);
        assert_eq!(process.encode().lines().count(), 4);
    }

    #[test]
    fn of_parts_that_disagree_about_a_type_the_first_counts() {
        let process = MetricsRegistry::default();
        let [first, second] = ["a", "b"].map(|name| process.labelled("worker", name));
        let _gauge: Gauge = first.create("odd", "Odd");
        let _counter: Counter = second.create("odd", "Odd");
        let text = process.encode();
        let lines: Vec<&str> = text.lines().collect();
        let expected = [
            "# HELP odd Odd.",
            "# TYPE odd gauge",
            r#"odd{worker="a"} 0"#,
            "# EOF",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn requests_of_an_engine_that_stops_are_lost_where_it_has_died() {
        let health = HealthReporter::default();
        assert_eq!(health.stopped().kind(), ErrorKind::EngineShutdown);
        health.report_dead("its device is gone");
        assert_eq!(health.stopped().kind(), ErrorKind::Disconnected);
    }

    #[test]
    fn a_help_text_stays_on_its_line() {
        let registry = MetricsRegistry::default();
        let _gauge: Gauge = registry.create("bare", "One\nbad 1\\");
        let _private: Gauge = registry.create_private("private", "Two\n\nlines");
        let text = registry.encode();
        let helps: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("# HELP"))
            .collect();
        assert_eq!(
            helps,
            [
                r"# HELP bare One\nbad 1\\.",
                r"# HELP private Two\n\nlines."
            ]
        );
        let shown = ["# HELP ", "# TYPE ", "bare 0", "private 0", "# EOF"];
        let is_known = |line: &str| shown.iter().any(|start| line.starts_with(start));
        assert!(text.lines().all(is_known), "{text}");
    }
}
