//! [`Waiting`]: the waiting requests in order, and the rate at which the first ones leave. Pure except for wakes: callers pass
//! the time.
//!
//! Requests that the same instances may take form a lane, and only the first of a lane is tried. So a request for an adapter that
//! only a full instance has does not block requests that other instances may take.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::{EngineError, GenerateRequest};
use genset_runtime::InstanceId;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The number of departures that determine the rate: enough to be stable, few enough to follow a change.
const RATE_WINDOW: usize = 32;

/// The fewest departures that determine a rate.
const RATE_FEWEST: usize = 4;

/// A request's position: the smallest is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    priority: Reverse<i32>,
    /// Requests without a deadline come after those with one.
    has_no_deadline: bool,
    deadline: Option<Instant>,
    arrival: u64,
}

impl Turn {
    /// After every request.
    pub(super) const LAST: Self = Self {
        priority: Reverse(i32::MIN),
        has_no_deadline: true,
        deadline: None,
        arrival: u64::MAX,
    };
}

/// What restricts the instances that may take a request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Restriction {
    adapter: Option<String>,
    rank: Option<u32>,
    left_out: Vec<InstanceId>,
}

impl Restriction {
    /// Returns the restriction of a request that may not go to `left_out`.
    pub(super) fn of(request: &GenerateRequest, left_out: &[InstanceId]) -> Self {
        Self {
            adapter: request.adapter.clone(),
            rank: request.data_parallel_rank,
            left_out: left_out.to_vec(),
        }
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Too many requests wait.
    Full,
    /// Its deadline would pass before its turn.
    Deadline,
}

/// A request that waits.
#[derive(Debug, Default)]
pub(super) struct Entry {
    woken: Notify,
    refusal: OnceLock<EngineError>,
}

impl Entry {
    /// Waits until its place in the queue may have changed.
    pub(super) async fn woken(&self) {
        self.woken.notified().await;
    }

    /// Returns the error it was refused with while waiting.
    pub(super) fn refusal(&self) -> Option<EngineError> {
        self.refusal.get().cloned()
    }

    /// Refuses the request.
    pub(super) fn refuse(&self, refusal: EngineError) {
        // The entry was removed from the queue, so no other caller sets this.
        let _ = self.refusal.set(refusal);
        self.woken.notify_one();
    }
}

/// The waiting requests: one non-empty lane per restriction.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    lanes: HashMap<Restriction, Lane>,
    arrivals: u64,
}

impl Waiting {
    /// Returns whether requests with this restriction wait.
    pub(super) fn has_lane(&self, restriction: &Restriction) -> bool {
        self.lanes.contains_key(restriction)
    }

    pub(super) fn len(&self) -> usize {
        self.lanes.values().map(|lane| lane.entries.len()).sum()
    }

    /// Returns whether the request is the first in its lane.
    pub(super) fn leads(&self, restriction: &Restriction, turn: Turn) -> bool {
        self.lanes
            .get(restriction)
            .and_then(|lane| lane.entries.first_key_value())
            .is_some_and(|(first, _)| *first == turn)
    }

    /// Returns whether the request is the first of all lanes.
    pub(super) fn is_first(&self, turn: Turn) -> bool {
        self.first_behind(None)
            .is_some_and(|(first, _)| *first == turn)
    }

    /// Returns the first of all, or the first lane leader after `turn`.
    fn first_behind(&self, turn: Option<Turn>) -> Option<(&Turn, &Arc<Entry>)> {
        self.lanes
            .values()
            .filter_map(|lane| lane.entries.first_key_value())
            .filter(|(first, _)| turn.is_none_or(|turn| **first > turn))
            .min_by_key(|(first, _)| **first)
    }

    pub(super) fn wake_first(&self) {
        if let Some((_, first)) = self.first_behind(None) {
            first.woken.notify_one();
        }
    }

    /// Wakes the next lane leader, after the request at `turn` was refused.
    pub(super) fn wake_next(&self, turn: Turn) {
        if let Some((_, next)) = self.first_behind(Some(turn)) {
            next.woken.notify_one();
        }
    }

    /// Returns the turn of a request that arrives now.
    pub(super) fn turn(&mut self, priority: i32, deadline: Option<Instant>) -> Turn {
        self.arrivals += 1;
        Turn {
            priority: Reverse(priority),
            has_no_deadline: deadline.is_none(),
            deadline,
            arrival: self.arrivals,
        }
    }

    pub(super) fn add(&mut self, restriction: &Restriction, turn: Turn) -> Arc<Entry> {
        let entry = Arc::new(Entry::default());
        let lane = self.lanes.entry(restriction.clone()).or_default();
        lane.entries.insert(turn, Arc::clone(&entry));
        entry
    }

    /// Removes the last of all, if it comes after `turn`. Also returns how long a request after it would have waited.
    pub(super) fn take_last_behind(
        &mut self,
        turn: Turn,
        now: Instant,
    ) -> Option<(Arc<Entry>, Option<Duration>)> {
        let lane = self.lanes.values_mut().max_by_key(|lane| lane.last())?;
        if lane.last() <= Some(turn) {
            return None;
        }
        let wait = lane.expected_wait(Turn::LAST, now);
        let (_, last) = lane.entries.pop_last()?;
        self.lanes.retain(|_, lane| !lane.entries.is_empty());
        Some((last, wait))
    }

    /// Removes a request, if present, and wakes the first of all.
    pub(super) fn remove(&mut self, restriction: &Restriction, turn: Turn) {
        if let Some(lane) = self.lanes.get_mut(restriction) {
            lane.entries.remove(&turn);
            // The rate of an empty lane is meaningless.
            if lane.entries.is_empty() {
                self.lanes.remove(restriction);
            }
        }
        self.wake_first();
    }

    /// Records that a request leaves for an instance.
    pub(super) fn served(&mut self, restriction: &Restriction, now: Instant) {
        if let Some(lane) = self.lanes.get_mut(restriction) {
            lane.served(now);
        }
    }

    /// Undoes [`Self::served`] for the request that left at `left`: no instance took it.
    pub(super) fn not_served(&mut self, restriction: &Restriction, left: Instant) {
        if let Some(lane) = self.lanes.get_mut(restriction) {
            lane.served.retain(|served| *served != left);
        }
    }

    /// Returns how long a request at this turn would wait at its lane's recent rate; `None` if the rate is unknown.
    pub(super) fn expected_wait(
        &self,
        restriction: &Restriction,
        turn: Turn,
        now: Instant,
    ) -> Option<Duration> {
        self.lanes.get(restriction)?.expected_wait(turn, now)
    }
}

/// Requests that the same instances may take, in order.
#[derive(Debug, Default)]
struct Lane {
    entries: BTreeMap<Turn, Arc<Entry>>,
    /// When the last ones left for an instance, while the lane was never empty.
    served: VecDeque<Instant>,
}

impl Lane {
    fn last(&self) -> Option<Turn> {
        self.entries.last_key_value().map(|(last, _)| *last)
    }

    fn served(&mut self, now: Instant) {
        if self.served.len() == RATE_WINDOW {
            self.served.pop_front();
        }
        self.served.push_back(now);
    }

    fn expected_wait(&self, turn: Turn, now: Instant) -> Option<Duration> {
        if self.served.len() < RATE_FEWEST {
            return None;
        }
        let since = now.saturating_duration_since(*self.served.front()?);
        let intervals = u32::try_from(self.served.len() - 1).ok()?;
        let before = u32::try_from(self.entries.range(..turn).count()).ok()?;
        Some((since / intervals).saturating_mul(before.saturating_add(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn priority_goes_before_deadline_and_that_before_arrival() {
        let (mut waiting, any) = (Waiting::default(), Restriction::default());
        let soon = Some(Instant::now() + Duration::from_secs(1));
        let late = Some(Instant::now() + Duration::from_secs(9));
        let turns = [
            (0, None),
            (0, late),
            (-1, soon),
            (0, None),
            (5, None),
            (0, soon),
        ]
        .map(|(priority, deadline)| waiting.turn(priority, deadline));
        for turn in turns {
            drop(waiting.add(&any, turn));
        }
        let order: Vec<_> = waiting.lanes[&any].entries.keys().collect();
        let expected = [4, 5, 1, 0, 3, 2].map(|index: usize| &turns[index]);
        assert_eq!(order, expected);
        assert!(turns.iter().all(|turn| *turn < Turn::LAST));
        let now = Instant::now();
        assert!(waiting.take_last_behind(turns[2], now).is_none());
        assert!(waiting.take_last_behind(turns[3], now).is_some());
        assert_eq!(waiting.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_follows_from_the_rate_and_the_place() {
        let (mut waiting, any) = (Waiting::default(), Restriction::default());
        let mut now = Instant::now();
        let first = waiting.turn(0, None);
        drop(waiting.add(&any, first));
        for _ in 0..RATE_FEWEST {
            assert_eq!(waiting.expected_wait(&any, Turn::LAST, now), None);
            waiting.served(&any, now);
            now += Duration::from_secs(2);
        }
        // Four departures bound three intervals in eight seconds.
        let each = Duration::from_secs(8) / 3;
        let last = Turn::LAST;
        assert_eq!(waiting.expected_wait(&any, first, now), Some(each));
        assert_eq!(waiting.expected_wait(&any, last, now), Some(each * 2));
        // A request that returns did not depart.
        waiting.served(&any, now);
        waiting.not_served(&any, now);
        assert_eq!(waiting.expected_wait(&any, first, now), Some(each));
        waiting.remove(&any, first);
        assert_eq!(waiting.expected_wait(&any, last, now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn each_restriction_has_a_first_and_all_have_one_order() {
        let (mut waiting, any) = (Waiting::default(), Restriction::default());
        let adapted = Restriction {
            adapter: Some("a".to_owned()),
            ..Restriction::default()
        };
        let turns = [0, 1, 2, 3].map(|_| waiting.turn(0, None));
        for (turn, restriction) in turns.into_iter().zip([&adapted, &adapted, &any, &any]) {
            drop(waiting.add(restriction, turn));
        }
        assert!(waiting.leads(&adapted, turns[0]) && !waiting.leads(&adapted, turns[1]));
        assert!(waiting.leads(&any, turns[2]) && !waiting.leads(&any, turns[3]));
        assert!(waiting.is_first(turns[0]) && !waiting.is_first(turns[2]));
        let behind = |turn| waiting.first_behind(Some(turn)).map(|(first, _)| *first);
        assert_eq!(behind(turns[0]), Some(turns[2]));
        assert_eq!(behind(turns[2]), None);
        let now = Instant::now();
        assert!(waiting.take_last_behind(turns[2], now).is_some());
        assert!(waiting.take_last_behind(turns[2], now).is_none());
        waiting.remove(&any, turns[2]);
        assert!(!waiting.has_lane(&any) && waiting.has_lane(&adapted));
    }
}
