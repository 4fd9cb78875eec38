//! [`Waiting`]: who waits, in order, and how fast the first ones leave. Pure but for the wakes: the time is given.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::EngineError;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Requests whose times make the rate: enough to be steady, few enough to follow a change.
const RATE_WINDOW: usize = 32;

/// Fewer make no rate.
const RATE_FEWEST: usize = 4;

/// When it is a request's turn: the smallest is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    priority: Reverse<i32>,
    /// One without a deadline comes after those that have one.
    has_no_deadline: bool,
    deadline: Option<Instant>,
    arrival: u64,
}

impl Turn {
    /// After everybody's.
    pub(super) const LAST: Self = Self {
        priority: Reverse(i32::MIN),
        has_no_deadline: true,
        deadline: None,
        arrival: u64::MAX,
    };
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Too many wait.
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

    /// What it was refused with while it waited.
    pub(super) fn refusal(&self) -> Option<EngineError> {
        self.refusal.get().cloned()
    }

    /// Refuses it.
    pub(super) fn refuse(&self, refusal: EngineError) {
        // It was taken out of the queue, so nobody else does.
        let _ = self.refusal.set(refusal);
        self.woken.notify_one();
    }
}

/// Who waits, in order.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    entries: BTreeMap<Turn, Arc<Entry>>,
    arrivals: u64,
    /// When the last ones left for an instance, while somebody waited all the time.
    served: VecDeque<Instant>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_first(&self, turn: Turn) -> bool {
        self.entries
            .first_key_value()
            .is_some_and(|(first, _)| *first == turn)
    }

    /// The turn of a request that arrives now.
    pub(super) fn turn(&mut self, priority: i32, deadline: Option<Instant>) -> Turn {
        self.arrivals += 1;
        Turn {
            priority: Reverse(priority),
            has_no_deadline: deadline.is_none(),
            deadline,
            arrival: self.arrivals,
        }
    }

    pub(super) fn add(&mut self, turn: Turn) -> Arc<Entry> {
        let entry = Arc::new(Entry::default());
        self.entries.insert(turn, Arc::clone(&entry));
        entry
    }

    /// Takes the last one out, if its turn is after `turn`.
    pub(super) fn take_last_behind(&mut self, turn: Turn) -> Option<Arc<Entry>> {
        let last = self.entries.last_entry()?;
        (*last.key() > turn).then(|| last.remove())
    }

    /// Takes one out, if it is there, and wakes the first.
    pub(super) fn remove(&mut self, turn: Turn) {
        self.entries.remove(&turn);
        match self.entries.first_key_value() {
            Some((_, first)) => first.woken.notify_one(),
            // The rate of a queue says nothing when there was none.
            None => self.served.clear(),
        }
    }

    /// One left for an instance.
    pub(super) fn served(&mut self, now: Instant) {
        if self.served.len() == RATE_WINDOW {
            self.served.pop_front();
        }
        self.served.push_back(now);
    }

    /// How long a request of this turn would wait, at the rate at which the last ones left; `None` while that is not known.
    pub(super) fn expected_wait(&self, turn: Turn, now: Instant) -> Option<Duration> {
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
        let mut waiting = Waiting::default();
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
            drop(waiting.add(turn));
        }
        let order: Vec<_> = waiting.entries.keys().collect();
        let expected = [4, 5, 1, 0, 3, 2].map(|index: usize| &turns[index]);
        assert_eq!(order, expected);
        assert!(turns.iter().all(|turn| *turn < Turn::LAST));
        assert!(waiting.take_last_behind(turns[2]).is_none());
        assert!(waiting.take_last_behind(turns[3]).is_some());
        assert_eq!(waiting.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_follows_from_the_rate_and_the_place() {
        let mut waiting = Waiting::default();
        let mut now = Instant::now();
        let first = waiting.turn(0, None);
        drop(waiting.add(first));
        for _ in 0..RATE_FEWEST {
            assert_eq!(waiting.expected_wait(Turn::LAST, now), None);
            waiting.served(now);
            now += Duration::from_secs(2);
        }
        // Four left in eight seconds, the last of them nobody.
        let each = Duration::from_secs(8) / 3;
        assert_eq!(waiting.expected_wait(first, now), Some(each));
        assert_eq!(waiting.expected_wait(Turn::LAST, now), Some(each * 2));
        waiting.remove(first);
        assert_eq!(waiting.expected_wait(Turn::LAST, now), None);
    }
}
