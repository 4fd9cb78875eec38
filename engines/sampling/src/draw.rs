//! The random draws of a request: a function of its seed and the position alone.
//!
//! So a request's tokens do not depend on its neighbours in the batch, on preemptions, or on the instance that resumed it.
//!
//! # Source
//! SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), whose n-th output can be
//! computed without the ones before it.

use genset_backend_common::random::{STEP, mix};

/// The draw at `position`, in `0.0..1.0`. The seed is mixed first, so that adjacent seeds have unrelated sequences.
#[expect(clippy::cast_precision_loss, reason = "53 bits fit an f64")]
pub(crate) fn uniform(seed: u64, position: u64) -> f64 {
    let start = mix(seed.wrapping_add(STEP));
    let bits = mix(start.wrapping_add(STEP.wrapping_mul(position.wrapping_add(1))));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chi-square over 16 cells, for draws along one sequence and for first draws of adjacent seeds.
    #[test]
    fn draws_are_uniform_along_a_sequence_and_across_seeds() {
        let along: Vec<f64> = (0..16_000).map(|at| uniform(7, at)).collect();
        let across: Vec<f64> = (0..16_000).map(|seed| uniform(seed, 0)).collect();
        for draws in [along, across] {
            let mut cells = [0.0_f64; 16];
            for draw in draws {
                assert!((0.0..1.0).contains(&draw));
                let cell = (0..16).rev().find(|cell| draw * 16.0 >= f64::from(*cell));
                cells[usize::try_from(cell.unwrap()).unwrap()] += 1.0;
            }
            let chi: f64 = cells
                .iter()
                .map(|seen| (seen - 1000.0).powi(2) / 1000.0)
                .sum();
            // 15 degrees of freedom: 37.7 is the 0.1 % point.
            assert!(chi < 37.7, "{chi}");
        }
    }

    /// Changing the sequence breaks every resumed request, so it is pinned.
    #[test]
    fn the_sequence_is_pinned() {
        let bits: Vec<u64> = (0..3).map(|at| uniform(42, at).to_bits()).collect();
        assert_eq!(bits, PINNED);
    }

    const PINNED: [u64; 3] = [
        4_599_855_817_407_677_468,
        4_606_783_820_744_611_400,
        4_602_432_914_279_385_664,
    ];
}
