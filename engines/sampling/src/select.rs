//! Partial selection of the few tokens that `top_k`, `top_p` and `min_p` keep.
//!
//! A candidate is one number, a [`Key`], ordered by logit and then by id, the lowest first. So every selection has exactly
//! one right result, ties included, for any algorithm.

use genset_backend_common::TokenId;

use crate::math::exp;

/// The logit in the upper half, as an integer of the same order; in the lower half the complement of the token's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u64);

const SIGN: u32 = 1 << 31;

impl Key {
    pub(crate) fn new(token: TokenId, logit: f32) -> Self {
        // Adding 0 turns -0.0 into 0.0, which it equals.
        let bits = (logit + 0.0).to_bits();
        let ordered = if bits & SIGN == 0 { bits | SIGN } else { !bits };
        Self((u64::from(ordered) << 32) | u64::from(!token))
    }

    pub(crate) fn token(self) -> TokenId {
        let [.., a, b, c, d] = self.0.to_be_bytes();
        !TokenId::from_be_bytes([a, b, c, d])
    }

    pub(crate) fn logit(self) -> f32 {
        let [a, b, c, d, ..] = self.0.to_be_bytes();
        let ordered = u32::from_be_bytes([a, b, c, d]);
        f32::from_bits(if ordered & SIGN == 0 {
            !ordered
        } else {
            ordered & !SIGN
        })
    }
}

/// Puts the `k` best of `logits` that are at least `least` into `keys`, in no order.
pub(crate) fn top_k(logits: &[f32], k: usize, least: f32, keys: &mut Vec<Key>) {
    keys.clear();
    // Twice the room, so that a row needs few selections.
    let room = k.saturating_mul(2).max(256);
    let mut bar = least;
    for (token, logit) in (0..).zip(logits) {
        if *logit >= bar && *logit > f32::NEG_INFINITY {
            keys.push(Key::new(token, *logit));
            if keys.len() == room {
                keep_best(keys, k);
                // Later tokens with the same logit rank below those already kept.
                let worst = keys.iter().min().map_or(bar, |key| key.logit());
                bar = bar.max(worst);
            }
        }
    }
    keep_best(keys, k);
}

fn keep_best(keys: &mut Vec<Key>, k: usize) {
    if k < keys.len() {
        keys.select_nth_unstable_by(k, |a, b| b.cmp(a));
        keys.truncate(k);
    }
}

/// Puts all of `logits` that are at least `least` into `keys`.
pub(crate) fn at_least(logits: &[f32], least: f32, keys: &mut Vec<Key>) {
    keys.clear();
    let kept = (0..)
        .zip(logits)
        .filter(|(_, logit)| **logit >= least && **logit > f32::NEG_INFINITY);
    keys.extend(kept.map(|(token, logit)| Key::new(token, *logit)));
}

/// Computes a key's weight in the softmax, not normalized.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Weigh {
    pub(crate) best: f32,
    pub(crate) temperature: f32,
}

impl Weigh {
    fn weight(self, key: Key) -> f64 {
        f64::from(exp((key.logit() - self.best) / self.temperature))
    }

    pub(crate) fn sum(self, keys: &[Key]) -> f64 {
        keys.iter().map(|key| self.weight(*key)).sum()
    }

    /// The logit of a token with the weight `weight`, in `0.0..=1.0`. If `weight` is almost 0, the lowest logit whose weight is
    /// more than 0 in an `f32`.
    pub(crate) fn least(self, weight: f32) -> f32 {
        const LOWEST: f32 = -87.0;
        self.best + self.temperature * weight.ln().clamp(LOWEST, 0.0)
    }

    /// The number of the best of `keys` whose sum first reaches `target`; moves them to the front.
    pub(crate) fn reaching(self, keys: &mut [Key], target: f64) -> usize {
        self.crossing(keys, |mass, left| mass >= left, target) + 1
    }

    /// The index of the key at which the running sum, best first, exceeds `target`; reorders `keys`.
    pub(crate) fn passing(self, keys: &mut [Key], target: f64) -> usize {
        self.crossing(keys, |mass, left| mass > left, target)
    }

    /// Halves the range around the crossing until one key is left, so the cost is linear.
    fn crossing(self, keys: &mut [Key], is_past: fn(f64, f64) -> bool, target: f64) -> usize {
        let (mut start, mut end, mut left) = (0, keys.len(), target);
        while end - start > 1 {
            let half = start + (end - start) / 2;
            keys[start..end].select_nth_unstable_by(half - start, |a, b| b.cmp(a));
            let mass = self.sum(&keys[start..half]);
            if is_past(mass, left) {
                end = half;
            } else {
                left -= mass;
                start = half;
            }
        }
        start
    }
}

#[cfg(test)]
mod tests;
