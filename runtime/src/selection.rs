//! Selection: which instance a request goes to.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::names::InstanceId;

/// A live instance that a request may go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The instance.
    pub instance: InstanceId,
    /// Its data-parallel ranks, from its card, at least 1.
    pub ranks: u32,
    /// Its number of requests: those in flight from this client, or the number it last published, if larger.
    pub load: usize,
    /// Of these, the requests of other clients, as last published.
    pub others: usize,
    /// KV blocks in use there, as last published.
    pub kv_used_blocks: u64,
    /// Its total number of KV blocks, as last published; 0 if it has none or has not published yet.
    pub kv_total_blocks: u64,
    /// KV events it had published at its last load report.
    pub kv_events: u64,
}

/// Chooses among candidates. Called for every request; must not wait.
pub trait Selector: fmt::Debug + Send + Sync + 'static {
    /// Returns the index of the chosen candidate, or `None` to reject them all. `candidates` is not empty and ordered by id.
    fn select(&self, candidates: &[Candidate]) -> Option<usize>;
}

genset_backend_common::named! {
    /// The selection modes that every client supports.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
    pub enum SelectionMode: FromStr {
        /// Each in turn.
        #[default]
        RoundRobin = "round-robin",
        /// At random, with equal probability.
        Random = "random",
        /// The one with the fewest requests.
        LeastLoaded = "least-loaded",
        /// The less loaded of two drawn at random.
        PowerOfTwo = "power-of-two",
    }
}

impl SelectionMode {
    /// Whether the mode uses the load that workers publish.
    #[must_use]
    pub const fn uses_load(self) -> bool {
        match self {
            Self::RoundRobin | Self::Random => false,
            Self::LeastLoaded | Self::PowerOfTwo => true,
        }
    }

    /// Creates a selector of this mode.
    #[must_use]
    pub fn selector(self) -> Box<dyn Selector> {
        match self {
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::Random => Box::new(Random),
            Self::LeastLoaded => Box::new(LeastLoaded::default()),
            Self::PowerOfTwo => Box::new(PowerOfTwo),
        }
    }
}

/// Each in turn.
#[derive(Debug, Default)]
pub struct RoundRobin {
    next: AtomicUsize,
}

impl Selector for RoundRobin {
    fn select(&self, candidates: &[Candidate]) -> Option<usize> {
        self.next
            .fetch_add(1, Ordering::Relaxed)
            .checked_rem(candidates.len())
    }
}

/// At random, with equal probability.
#[derive(Debug, Clone, Copy)]
pub struct Random;

impl Selector for Random {
    fn select(&self, candidates: &[Candidate]) -> Option<usize> {
        (!candidates.is_empty()).then(|| rand::random_range(0..candidates.len()))
    }
}

/// The one with the fewest requests; ties are broken in turn.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    turn: AtomicUsize,
}

impl Selector for LeastLoaded {
    fn select(&self, candidates: &[Candidate]) -> Option<usize> {
        let least = candidates.iter().map(|candidate| candidate.load).min()?;
        let equals = candidates
            .iter()
            .filter(|candidate| candidate.load == least)
            .count();
        let turn = self
            .turn
            .fetch_add(1, Ordering::Relaxed)
            .checked_rem(equals)?;
        candidates
            .iter()
            .enumerate()
            .filter(|(_, c)| c.load == least)
            .map(|(index, _)| index)
            .nth(turn)
    }
}

/// The less loaded of two drawn at random.
///
/// # Source
/// Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
#[derive(Debug, Clone, Copy)]
pub struct PowerOfTwo;

impl Selector for PowerOfTwo {
    fn select(&self, candidates: &[Candidate]) -> Option<usize> {
        let first = Random.select(candidates)?;
        let second = Random.select(candidates)?;
        let load = |index: usize| candidates.get(index).map(|candidate| candidate.load);
        Some(if load(second) < load(first) {
            second
        } else {
            first
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(loads: &[usize]) -> Vec<Candidate> {
        (1..)
            .zip(loads)
            .map(|(id, load)| Candidate {
                instance: InstanceId(id),
                ranks: 1,
                load: *load,
                others: 0,
                kv_used_blocks: 0,
                kv_total_blocks: 0,
                kv_events: 0,
            })
            .collect()
    }

    #[test]
    fn round_robin_visits_all_in_turn() {
        let selector = RoundRobin::default();
        let picks: Vec<_> = (0..6)
            .filter_map(|_| selector.select(&candidates(&[0, 0, 0])))
            .collect();
        assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn least_loaded_prefers_the_idle_and_lets_equals_take_turns() {
        let selector = LeastLoaded::default();
        let picks: Vec<_> = (0..4)
            .filter_map(|_| selector.select(&candidates(&[2, 1, 9, 1])))
            .collect();
        assert_eq!(picks, [1, 3, 1, 3]);
    }

    #[test]
    fn two_choices_avoid_a_loaded_instance_mostly() {
        let picks = (0..1000)
            .filter_map(|_| PowerOfTwo.select(&candidates(&[100, 0, 0])))
            .filter(|i| *i == 0);
        // By chance, 1/9 of the pairs are the loaded one twice; a blind choice would pick it in 1/3.
        assert!(picks.count() < 200);
    }

    #[test]
    fn every_mode_has_a_name_and_a_selector() {
        for mode in SelectionMode::ALL {
            assert_eq!(mode.name().parse(), Ok(mode));
            assert!(mode.selector().select(&candidates(&[1])).is_some());
            assert!(mode.selector().select(&[]).is_none());
        }
        assert!(
            "kv".parse::<SelectionMode>()
                .unwrap_err()
                .contains("round-robin")
        );
    }
}
