//! [`Random`]: pseudorandom numbers that are the same in every run and with every version of any library.

use genset_backend_common::random::{STEP, mix};

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// A generator for one purpose: streams of the same seed are independent.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream.wrapping_mul(STEP))))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `end`, which is at least 1.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        let wide = u128::from(self.next()) * u128::from(end.max(1));
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// A number in `first..=last`.
    pub(crate) fn between(&mut self, (first, last): (u32, u32)) -> u32 {
        let spread = u64::from(last.saturating_sub(first)) + 1;
        first + u32::try_from(self.below(spread)).unwrap_or(0)
    }

    /// A number in `0.0..1.0`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are what a float holds")]
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The time in seconds between two events of a Poisson process with `per_second` events per second on average.
    pub(crate) fn gap_s(&mut self, per_second: f64) -> f64 {
        -(1.0 - self.unit()).ln() / per_second
    }

    /// A number of the standard normal distribution.
    ///
    /// # Source
    /// G. Box, M. Muller, "A Note on the Generation of Random Normal Deviates", 1958.
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}
