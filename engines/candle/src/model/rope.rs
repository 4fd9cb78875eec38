//! Rotary position embedding with a position per row.
//!
//! # Source
//! RoFormer (Su et al. 2021) in the layout of `transformers`: dimension `i` rotates with `i + head_dim / 2`. Llama 3's scaling
//! as in its reference code; YaRN (Peng et al. 2023) as in `transformers`.
//!
//! If only some dimensions rotate, `load` orders a head's rows so that pairs are still half a head apart; the other dimensions
//! have the frequency 0.

use genset_kernels::Turns;

use super::config::{Rope, RopeScaling};

/// The frequencies of one kind of layer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Frequencies {
    per_pair: Vec<f32>,
    /// The factor of rotated pairs.
    amplitude: f32,
}

impl Frequencies {
    /// For layers with full attention.
    pub(super) fn full(rope: &Rope, head_dim: usize) -> Self {
        let turning = scale(base(rope.theta, rope.rotary_dim), rope.theta, &rope.scaling);
        Self::new(turning, rope.amplitude, head_dim)
    }

    /// For layers with full attention or a window, without scaling.
    pub(super) fn of_theta(theta: f32, head_dim: usize) -> Self {
        Self::new(base(theta, head_dim), 1.0, head_dim)
    }

    /// For layers with a sliding window.
    pub(super) fn windowed(rope: &Rope, head_dim: usize) -> Self {
        match rope.window_theta {
            Some(theta) => Self::new(base(theta, rope.rotary_dim), 1.0, head_dim),
            None => Self::full(rope, head_dim),
        }
    }

    /// For layers without rotation, such as those of models with position embeddings.
    pub(super) fn still(head_dim: usize) -> Self {
        Self::new(Vec::new(), 1.0, head_dim)
    }

    fn new(mut turning: Vec<f32>, amplitude: f32, head_dim: usize) -> Self {
        turning.resize(head_dim / 2, 0.0);
        Self {
            per_pair: turning,
            amplitude,
        }
    }

    /// The factor of rotated pairs.
    pub(super) fn amplitude(&self) -> f32 {
        self.amplitude
    }

    /// The angle per position, for each pair of dimensions.
    pub(super) fn per_pair(&self) -> &[f32] {
        &self.per_pair
    }

    /// Cosines and sines for rows at `positions`.
    pub(super) fn turns(&self, positions: &[u32]) -> Turns {
        Turns::new(&self.per_pair, self.amplitude, positions)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a head's width")]
fn base(theta: f32, rotary_dim: usize) -> Vec<f32> {
    (0..rotary_dim / 2)
        .map(|pair| 1.0 / theta.powf((2 * pair) as f32 / rotary_dim as f32))
        .collect()
}

fn scale(mut frequencies: Vec<f32>, theta: f32, scaling: &RopeScaling) -> Vec<f32> {
    match scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => frequencies.iter_mut().for_each(|f| *f /= factor),
        RopeScaling::Factors(factors) => {
            frequencies
                .iter_mut()
                .zip(factors)
                .for_each(|(frequency, factor)| *frequency /= factor);
        }
        &RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context_length,
        } => {
            #[expect(clippy::cast_precision_loss, reason = "a context length")]
            let context = original_context_length as f32;
            for frequency in &mut frequencies {
                let wavelength = std::f32::consts::TAU / *frequency;
                let keep =
                    (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let keep = keep.clamp(0.0, 1.0);
                *frequency = (1.0 - keep) * *frequency / factor + keep * *frequency;
            }
        }
        &RopeScaling::Yarn {
            factor,
            fast_turns,
            slow_turns,
            original_context_length,
            is_rounded,
        } => {
            let pairs = frequencies.len();
            let pair_of = |turns| pair_that_turns(turns, pairs, theta, original_context_length);
            let (first, last) = (pair_of(fast_turns), pair_of(slow_turns));
            let (first, last) = if is_rounded {
                (first.floor(), last.ceil())
            } else {
                (first, last)
            };
            blend(&mut frequencies, factor, first, last);
        }
    }
    frequencies
}

/// The pair that rotates `turns` times in a context, as a fractional index.
#[expect(clippy::cast_precision_loss, reason = "sizes of a model")]
fn pair_that_turns(turns: f32, pairs: usize, theta: f32, context_length: usize) -> f32 {
    let wavelength = context_length as f32 / (turns * std::f32::consts::TAU);
    pairs as f32 * wavelength.ln() / theta.ln()
}

/// Divides the frequencies from pair `last` on, keeps those up to `first`, and blends those between.
#[expect(clippy::cast_precision_loss, reason = "the number of a pair")]
fn blend(frequencies: &mut [f32], factor: f32, first: f32, last: f32) {
    let highest = (2 * frequencies.len()) as f32 - 1.0;
    let (first, last) = (first.max(0.0), last.min(highest));
    let width = if first == last { 0.001 } else { last - first };
    for (pair, frequency) in frequencies.iter_mut().enumerate() {
        let divided = ((pair as f32 - first) / width).clamp(0.0, 1.0);
        *frequency = *frequency / factor * divided + *frequency * (1.0 - divided);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_high_and_divides_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context_length: 8192,
        };
        let plain = base(500_000.0, 128);
        let scaled = scale(plain.clone(), 500_000.0, &scaling);
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[63] * 8.0 / plain[63] - 1.0).abs() < 1e-6);
        assert!(
            scaled
                .iter()
                .zip(&plain)
                .all(|(s, p)| s <= p && *s * 8.0 >= *p * 0.999)
        );
    }

    #[test]
    fn yarn_keeps_fast_and_divides_slow_frequencies() {
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            fast_turns: 32.0,
            slow_turns: 1.0,
            original_context_length: 32_768,
            is_rounded: true,
        };
        let plain = base(1e6, 128);
        let scaled = scale(plain.clone(), 1e6, &scaling);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 4.0);
        let is_between = |(s, p): (&f32, &f32)| *s <= p * 1.0001 && *s * 4.0001 >= *p;
        assert!(scaled.iter().zip(&plain).all(is_between));
    }

    #[test]
    fn what_does_not_turn_keeps_its_value_and_its_size() {
        let rope = Rope {
            theta: 10.0,
            window_theta: None,
            scaling: RopeScaling::None,
            rotary_dim: 4,
            amplitude: 2.0,
            is_paired: false,
            still_every: None,
        };
        let turns = Frequencies::full(&rope, 8).turns(&[0, 5]);
        let (cos, sin) = turns.row(1);
        let lengths: Vec<f32> = cos.iter().zip(sin).map(|(c, s)| c * c + s * s).collect();
        assert!((lengths[0] - 4.0).abs() < 1e-5 && (lengths[1] - 4.0).abs() < 1e-5);
        assert_eq!((&cos[2..], &sin[2..]), (&[1.0, 1.0][..], &[0.0, 0.0][..]));
        let still = Frequencies::still(4).turns(&[9]);
        assert_eq!(still.row(0), (&[1.0, 1.0][..], &[0.0, 0.0][..]));
    }
}
