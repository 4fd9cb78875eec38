//! [`Lag`]: how far the index is behind the workers' KV events, by the event counts that workers report with their load.

use std::collections::BTreeMap;
use std::time::Duration;

use genset_runtime::InstanceId;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::metrics::ModelMetrics;

/// Minimum interval between comparisons: loads arrive no more often.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The instances whose events are late.
#[derive(Debug)]
pub(super) struct Lag {
    /// Entries of an instance are not trusted once its events are later than this.
    max_age: Duration,
    metrics: ModelMetrics,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    looked: Option<Instant>,
    late: BTreeMap<InstanceId, Late>,
}

#[derive(Debug)]
struct Late {
    /// The published event count when events were first missed.
    published: u64,
    since: Instant,
    missing: u64,
}

impl Lag {
    pub(super) fn new(max_age: Duration, metrics: ModelMetrics) -> Self {
        Self {
            max_age,
            metrics,
            state: Mutex::default(),
        }
    }

    /// Compares, at most once an interval, the event counts that instances published with those in the index. `taken` returns the
    /// latter, in order, without instances of which a snapshot is missing. The former may be of a subset of the instances: a
    /// request compares its candidates.
    pub(super) fn look(
        &self,
        published: impl Iterator<Item = (InstanceId, u64)>,
        taken: impl FnOnce() -> Vec<(InstanceId, u64)>,
    ) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let is_due = |looked: Instant| now.duration_since(looked) >= LOOK_INTERVAL;
        if !state.looked.is_none_or(is_due) {
            return;
        }
        state.looked = Some(now);
        let all_taken = taken();
        let taken = |instance: InstanceId| {
            let found = all_taken.binary_search_by_key(&instance, |(instance, _)| *instance);
            Some(all_taken.get(found.ok()?)?.1)
        };
        for (instance, published) in published {
            let known = state.late.remove(&instance);
            // Without a snapshot the index has no entries to distrust.
            let Some(taken) = taken(instance) else {
                continue;
            };
            let missing = published.saturating_sub(taken);
            if missing == 0 {
                continue;
            }
            let known = known.filter(|known| taken < known.published);
            let (published, since) =
                known.map_or((published, now), |late| (late.published, late.since));
            let entry = Late {
                published,
                since,
                missing,
            };
            state.late.insert(instance, entry);
        }
        // Drop instances that are gone.
        state.late.retain(|instance, _| taken(*instance).is_some());
        self.publish(&state, now);
    }

    /// Updates an instance's lag after events were applied.
    pub(super) fn took(&self, instance: InstanceId, taken: impl FnOnce() -> Option<u64>) {
        let mut state = self.state.lock();
        let Some(late) = state.late.get(&instance) else {
            return;
        };
        if taken().is_none_or(|taken| taken >= late.published) {
            state.late.remove(&instance);
            self.publish(&state, Instant::now());
        }
    }

    /// Returns the instances whose entries are not trusted, in order.
    pub(super) fn distrusted(&self) -> Vec<InstanceId> {
        let now = Instant::now();
        let state = self.state.lock();
        let is_old = |late: &Late| now.duration_since(late.since) > self.max_age;
        let old = state.late.iter().filter(|(_, late)| is_old(late));
        old.map(|(instance, _)| *instance).collect()
    }

    fn publish(&self, state: &State, now: Instant) {
        let late = state.late.values();
        // Workers choose these numbers.
        let missing = late
            .clone()
            .fold(0_u64, |sum, late| sum.saturating_add(late.missing));
        let oldest = late.map(|late| late.since).min();
        let age = oldest.map_or(Duration::ZERO, |since| now.duration_since(since));
        self.metrics.lag(missing, age);
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::MetricsRegistry;

    use super::*;
    use crate::config::RouterMode;
    use crate::kv::RouterMetrics;

    #[tokio::test(start_paused = true)]
    async fn events_are_late_from_when_they_are_missed_until_they_come() {
        let registry = MetricsRegistry::default();
        let metrics = RouterMetrics::register(&registry, RouterMode::Kv);
        let lag = Lag::new(Duration::from_secs(5), metrics.of("m"));
        let (late, punctual) = (InstanceId(1), InstanceId(2));
        let look = |published, taken| {
            let told = [(late, published), (punctual, 7), (InstanceId(3), 9)];
            lag.look(told.into_iter(), || vec![(late, taken), (punctual, 8)]);
        };
        let shows = |events: &str, seconds: &str| {
            let text = registry.encode();
            text.contains(&format!(
                "genset_router_lag_events{{model=\"m\"}} {events}\n"
            )) && text.contains(&format!(
                "genset_router_lag_seconds{{model=\"m\"}} {seconds}\n"
            ))
        };
        look(10, 4);
        assert!(shows("6", "0.0"), "{}", registry.encode());
        tokio::time::advance(Duration::from_secs(6)).await;
        // More events were published, and some arrived, but not all of the first missing ones.
        look(30, 9);
        assert!(shows("21", "6.0"), "{}", registry.encode());
        assert_eq!(lag.distrusted(), [late]);
        lag.took(late, || Some(9));
        assert_eq!(lag.distrusted(), [late]);
        lag.took(late, || Some(10));
        assert!(shows("0", "0.0"), "{}", registry.encode());
        assert!(lag.distrusted().is_empty());
        tokio::time::advance(Duration::from_secs(1)).await;
        // Late again, from now.
        look(30, 10);
        assert!(shows("20", "0.0"), "{}", registry.encode());
        assert!(lag.distrusted().is_empty());
    }

    #[test]
    fn counts_that_cannot_be_are_no_panic() {
        let registry = MetricsRegistry::default();
        let metrics = RouterMetrics::register(&registry, RouterMode::Kv);
        let lag = Lag::new(Duration::from_secs(5), metrics.of("m"));
        let liars = [InstanceId(1), InstanceId(2)];
        let told = liars.map(|liar| (liar, u64::MAX));
        lag.look(told.into_iter(), || liars.map(|liar| (liar, 4)).to_vec());
        let most = format!("genset_router_lag_events{{model=\"m\"}} {}\n", i64::MAX);
        assert!(registry.encode().contains(&most), "{}", registry.encode());
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_no_candidate_of_a_request_is_late_all_the_same() {
        let registry = MetricsRegistry::default();
        let metrics = RouterMetrics::register(&registry, RouterMode::Kv);
        let lag = Lag::new(Duration::from_secs(5), metrics.of("m"));
        let (late, other) = (InstanceId(1), InstanceId(2));
        let taken = || vec![(late, 4), (other, 4)];
        lag.look([(late, 10), (other, 4)].into_iter(), taken);
        for _ in 0..60 {
            tokio::time::advance(Duration::from_millis(100)).await;
            lag.look([(other, 4)].into_iter(), taken);
        }
        assert_eq!(lag.distrusted(), [late]);
        lag.look([(late, 10)].into_iter(), taken);
        assert_eq!(lag.distrusted(), [late]);
        // An instance that is gone is not late.
        tokio::time::advance(Duration::from_millis(100)).await;
        lag.look([(other, 4)].into_iter(), || vec![(other, 4)]);
        assert!(lag.distrusted().is_empty());
        assert!(
            registry
                .encode()
                .contains("genset_router_lag_events{model=\"m\"} 0\n")
        );
    }
}
