//! [`Quantiles`]: the distribution of times, within a percent, in little memory.

use std::collections::BTreeMap;
use std::time::Duration;

/// Each bucket's end is 2 % above the previous one's.
const GROWTH: f64 = 1.02;
/// The end of bucket 0, in milliseconds.
const ORIGIN_MS: f64 = 0.5;
/// Shorter times count as this, in milliseconds.
const LEAST_MS: f64 = 0.001;

/// Times, counted in buckets.
#[derive(Debug, Clone, Default)]
pub struct Quantiles {
    counts: BTreeMap<i32, u64>,
    total: u64,
}

impl Quantiles {
    /// Counts a time.
    pub fn add(&mut self, time: Duration) {
        let ms = time.as_secs_f64() * 1000.0;
        let bucket = (ms.max(LEAST_MS) / ORIGIN_MS).ln() / GROWTH.ln();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the logarithm of a time is small"
        )]
        let bucket = bucket.round() as i32;
        *self.counts.entry(bucket).or_default() += 1;
        self.total += 1;
    }

    /// Adds the times of another one.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (bucket, count) in &other.counts {
            *self.counts.entry(*bucket).or_default() += count;
        }
        self.total += other.total;
    }

    /// The time in milliseconds that a share of all times do not exceed, within a percent; `None` if there are none.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "counts are far below 2^52"
    )]
    #[must_use]
    pub fn ms(&self, share: f64) -> Option<f64> {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.counts.iter().find(|(_, count)| {
            seen += **count;
            seen >= rank
        });
        found.map(|(bucket, _)| ORIGIN_MS * GROWTH.powi(*bucket))
    }

    /// Points of the cumulative distribution: milliseconds, and the share of times that do not exceed them.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    #[must_use]
    pub fn points(&self) -> Vec<(f64, f64)> {
        let mut seen = 0;
        let point = |(bucket, count): (&i32, &u64)| {
            seen += count;
            let ms = ORIGIN_MS * GROWTH.powi(*bucket);
            (ms, seen as f64 / self.total as f64)
        };
        self.counts.iter().map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_a_percent() {
        let mut quantiles = Quantiles::default();
        assert_eq!(quantiles.ms(0.5), None);
        for ms in 1..=1000 {
            quantiles.add(Duration::from_millis(ms));
        }
        for (share, expected) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let ms = quantiles.ms(share).unwrap();
            assert!((ms / expected - 1.0).abs() < 0.011, "{share}: {ms}");
        }
        let points = quantiles.points();
        assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
        assert!((points[points.len() - 1].1 - 1.0).abs() < 1e-12);
    }

    #[test]
    fn short_times_are_told_apart() {
        for us in [1, 20, 300] {
            let mut quantiles = Quantiles::default();
            quantiles.add(Duration::from_micros(us));
            let ms = quantiles.ms(0.5).unwrap();
            assert!((ms * 1000.0 / us as f64 - 1.0).abs() < 0.011, "{us}: {ms}");
        }
    }
}
