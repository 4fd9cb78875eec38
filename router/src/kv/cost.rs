//! The cost of a candidate, and the choice by cost. Pure: no clock, no lock.

use rand::{Rng, RngExt};

use super::metrics::Reason;

/// A candidate's work with this request, in KV blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Work {
    /// Blocks to prefill, including this request's, cached or not.
    pub(super) prefill_blocks: f64,
    /// Leading blocks of this request that the candidate has cached.
    pub(super) overlap_blocks: u32,
    /// Blocks of the candidate's sequences, including this request's.
    pub(super) active_blocks: f64,
}

impl Work {
    /// Returns the candidate's cost, in blocks. With a `weight` of 0 only the active blocks count.
    pub(super) fn cost(&self, weight: f64) -> f64 {
        let prefill = (self.prefill_blocks - f64::from(self.overlap_blocks)).max(0.0);
        weight.mul_add(prefill, self.active_blocks)
    }
}

/// The candidates for a request, with their costs.
#[derive(Debug, Default)]
pub(super) struct Weighed {
    works: Vec<Work>,
    /// Costs from the works; the favourite's is reduced by the affinity allowance.
    costs: Vec<f64>,
    favourite: Option<usize>,
    /// Whether the favourite costs more than another.
    costs_more: bool,
}

impl Weighed {
    /// Computes the costs of candidates. The `favourite` may cost `affinity_blocks` more than another.
    pub(super) fn new(
        works: Vec<Work>,
        weight: f64,
        favourite: Option<usize>,
        affinity_blocks: u32,
    ) -> Self {
        let mut costs: Vec<f64> = works.iter().map(|work| work.cost(weight)).collect();
        let lowest = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let mut costs_more = false;
        if let Some(cost) = favourite.and_then(|index| costs.get_mut(index)) {
            costs_more = *cost > lowest;
            *cost -= f64::from(affinity_blocks);
        }
        Self {
            works,
            costs,
            favourite,
            costs_more,
        }
    }

    /// Returns the index of the chosen candidate, as [`choose`] does.
    pub(super) fn choose(
        &self,
        temperature: f64,
        turn: usize,
        random: &mut impl Rng,
    ) -> Option<usize> {
        choose(&self.costs, temperature, turn, random)
    }

    pub(super) fn reason(&self, index: usize) -> Reason {
        let has_overlap = (self.works.get(index)).is_some_and(|work| work.overlap_blocks > 0);
        if self.favourite == Some(index) && (self.costs_more || !has_overlap) {
            Reason::Affinity
        } else if has_overlap {
            Reason::Overlap
        } else {
            Reason::Load
        }
    }

    /// Returns at most `most` candidates by cost, `chosen` first.
    pub(super) fn in_order(&self, chosen: usize, most: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.costs.len()).collect();
        let cost = |index: &usize| self.costs.get(*index).copied().unwrap_or(f64::INFINITY);
        order.sort_by(|a, b| {
            let is_chosen = |index: &usize| *index == chosen;
            (is_chosen(b).cmp(&is_chosen(a))).then_with(|| cost(a).total_cmp(&cost(b)))
        });
        order.truncate(most);
        order
    }

    /// Returns a candidate's work and cost.
    pub(super) fn of(&self, index: usize) -> Option<(&Work, f64)> {
        self.works.get(index).zip(self.costs.get(index).copied())
    }
}

/// Returns the index of the lowest cost; `turn` breaks ties. With a temperature above 0, draws an index by softmax over the
/// negated costs, scaled to `0..=1` by their range.
pub(super) fn choose(
    costs: &[f64],
    temperature: f64,
    turn: usize,
    random: &mut impl Rng,
) -> Option<usize> {
    let lowest = costs.iter().copied().fold(f64::INFINITY, f64::min);
    if temperature > 0.0 {
        return soft(costs, lowest, temperature, random);
    }
    // Costs are sums of blocks: a difference below a thousandth of a block is a tie.
    let is_lowest = |cost: &f64| *cost <= lowest + 1e-3;
    let equals = costs.iter().filter(|cost| is_lowest(cost)).count();
    let turn = turn.checked_rem(equals)?;
    let mut lowest = costs.iter().enumerate().filter(|(_, cost)| is_lowest(cost));
    lowest.nth(turn).map(|(index, _)| index)
}

fn soft(costs: &[f64], lowest: f64, temperature: f64, random: &mut impl Rng) -> Option<usize> {
    let highest = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let range = if highest > lowest {
        highest - lowest
    } else {
        1.0
    };
    let weight = |cost: &f64| (-(cost - lowest) / range / temperature).exp();
    let sum: f64 = costs.iter().map(weight).sum();
    let mut drawn = random.random::<f64>() * sum;
    for (index, cost) in costs.iter().enumerate() {
        drawn -= weight(cost);
        if drawn <= 0.0 {
            return Some(index);
        }
    }
    costs.len().checked_sub(1)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn work(prefill_blocks: f64, overlap_blocks: u32, active_blocks: f64) -> Work {
        Work {
            prefill_blocks,
            overlap_blocks,
            active_blocks,
        }
    }

    #[test]
    fn overlap_lowers_the_cost_by_its_weight_and_never_below_the_load() {
        assert_eq!(work(10.0, 4, 3.0).cost(1.0), 9.0);
        assert_eq!(work(10.0, 4, 3.0).cost(2.0), 15.0);
        assert_eq!(work(10.0, 40, 3.0).cost(1.0), 3.0);
        assert_eq!(work(10.0, 4, 3.0).cost(0.0), 3.0);
    }

    #[test]
    fn the_favourite_wins_as_long_as_it_costs_little_more() {
        let weighed = |works: [Work; 3], favourite| {
            let weighed = Weighed::new(works.into(), 1.0, favourite, 8);
            let index = weighed.choose(0.0, 0, &mut StdRng::seed_from_u64(1));
            index.map(|index| (index, weighed.reason(index)))
        };
        let idle = work(10.0, 0, 0.0);
        let cached = work(10.0, 4, 0.0);
        for (works, favourite, expected) in [
            ([idle; 3], Some(2), (2, Reason::Affinity)),
            (
                [idle, idle, work(10.0, 0, 7.0)],
                Some(2),
                (2, Reason::Affinity),
            ),
            ([idle, idle, work(10.0, 0, 9.0)], Some(2), (0, Reason::Load)),
            ([cached, idle, idle], Some(2), (2, Reason::Affinity)),
            ([cached, idle, cached], Some(2), (2, Reason::Overlap)),
            ([idle, cached, idle], None, (1, Reason::Overlap)),
        ] {
            assert_eq!(weighed(works, favourite), Some(expected));
        }
    }

    #[test]
    fn the_chosen_one_is_shown_first_and_then_the_cheapest() {
        let works = [3.0, 1.0, 2.0, 0.0].map(|active| work(0.0, 0, active));
        let weighed = Weighed::new(works.into(), 1.0, None, 0);
        assert_eq!(weighed.in_order(2, 3), [2, 3, 1]);
    }

    #[test]
    fn the_lowest_wins_and_equals_take_turns() {
        let mut random = StdRng::seed_from_u64(1);
        let mut pick = |turn| choose(&[2.0, 1.0, 9.0, 1.0], 0.0, turn, &mut random);
        assert_eq!([0, 1, 2].map(&mut pick), [Some(1), Some(3), Some(1)]);
        assert_eq!(choose(&[], 0.0, 0, &mut random), None);
        assert_eq!(choose(&[], 1.0, 0, &mut random), None);
    }

    #[test]
    fn a_temperature_draws_the_costlier_seldom_and_the_same_for_a_seed() {
        let draw = |temperature, seed| {
            let mut random = StdRng::seed_from_u64(seed);
            let mut counts = [0; 3];
            for _ in 0..3000 {
                let drawn = choose(&[10.0, 15.0, 20.0], temperature, 0, &mut random);
                counts[drawn.unwrap()] += 1;
            }
            counts
        };
        let warm = draw(0.5, 7);
        assert!(
            warm[0] > warm[1] && warm[1] > warm[2] && warm[2] > 100,
            "{warm:?}"
        );
        // Half of the range, at this temperature, is e times less likely.
        let ratio = f64::from(warm[0]) / f64::from(warm[1]);
        assert!((ratio - std::f64::consts::E).abs() < 0.4, "{ratio}");
        assert_eq!(warm, draw(0.5, 7));
        assert!(draw(0.01, 7)[0] == 3000);
        assert!(draw(1e9, 7).iter().all(|count| (900..1100).contains(count)));
    }
}
