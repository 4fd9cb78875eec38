//! Passes over a row of logits, written so that the compiler turns them into vector instructions.

use genset_backend_common::TokenId;

use crate::error::SampleError;

const LANES: usize = 16;
/// Logits per block. The best block is searched again for the best logit's place, which is cheap at this size.
const BLOCK: usize = 1024;

/// The best logit of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Best {
    /// The lowest id, if several are equal.
    pub(crate) token: TokenId,
    pub(crate) logit: f32,
}

/// The token that a [`Sampler`](crate::Sampler) chooses from `logits`, `[vocab]`, when [`is_argmax`] is true: the largest
/// logit, and the lowest id among equal ones. For engines that must not change the row.
///
/// [`is_argmax`]: crate::Sampler::is_argmax
///
/// # Errors
/// A logit is not a number or is plus infinity, or all are minus infinity.
pub fn best_token(logits: &[f32]) -> Result<TokenId, SampleError> {
    best(logits).map(|best| best.token)
}

/// The best of `logits`, in one pass. Also detects invalid logits.
///
/// # Errors
/// A logit is not a number or is plus infinity, or all are minus infinity.
pub(crate) fn best(logits: &[f32]) -> Result<Best, SampleError> {
    let (mut logit, mut start, mut has_nan) = (f32::NEG_INFINITY, 0, false);
    for (place, block) in logits.chunks(BLOCK).enumerate() {
        let (max, is_nan) = block_max(block);
        has_nan |= is_nan;
        if max > logit {
            (logit, start) = (max, place * BLOCK);
        }
    }
    if has_nan {
        let token = find(logits, 0, f32::is_nan);
        return Err(SampleError::NotANumber { token });
    }
    if logit == f32::INFINITY {
        let token = find(logits, start, |value| value == f32::INFINITY);
        return Err(SampleError::Infinite { token });
    }
    if logit == f32::NEG_INFINITY {
        return Err(SampleError::NothingPossible);
    }
    let token = find(logits, start, |value| value == logit);
    Ok(Best { token, logit })
}

fn find(logits: &[f32], start: usize, is_it: impl Fn(f32) -> bool) -> TokenId {
    let place = logits[start..].iter().position(|logit| is_it(*logit));
    TokenId::try_from(start + place.unwrap_or(0)).unwrap_or(TokenId::MAX)
}

#[expect(
    clippy::eq_op,
    reason = "only what is not a number differs from itself"
)]
fn block_max(block: &[f32]) -> (f32, bool) {
    let mut max = [f32::NEG_INFINITY; LANES];
    let mut nan = [0_u32; LANES];
    let (rows, rest) = block.as_chunks::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            let value = row[lane];
            max[lane] = if value > max[lane] { value } else { max[lane] };
            nan[lane] |= u32::from(value != value);
        }
    }
    for (lane, value) in rest.iter().enumerate() {
        max[lane] = if *value > max[lane] {
            *value
        } else {
            max[lane]
        };
        nan[lane] |= u32::from(value.is_nan());
    }
    let best = max
        .iter()
        .fold(f32::NEG_INFINITY, |best, lane| best.max(*lane));
    (best, nan.iter().any(|lane| *lane != 0))
}

/// `e^x` for `x <= 0`, within 2 units in the last place; 0 where the result would be below the normal numbers.
///
/// Own code because a row has 128,000 of them: this version is a few vector instructions, and returns the same bits on every
/// machine, unlike the platform's.
///
/// # Source
/// The range reduction and polynomial of `expf` in Moshier's Cephes library.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// The logarithm of the smallest normal number.
    const SMALLEST: f32 = -87.336_54;
    let clamped = if x > SMALLEST { x } else { SMALLEST };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut poly = 1.987_569_2e-4;
    for coefficient in [
        1.398_2e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        poly = poly * r + coefficient;
    }
    let mantissa = poly * r * r + r + 1.0;
    let scaled = f32::from_bits(mantissa.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x > SMALLEST { scaled } else { 0.0 }
}

/// The sum of `e^((logit - best) / temperature)`: the softmax's denominator.
pub(crate) fn sum_exp(logits: &[f32], best: f32, temperature: f32) -> f64 {
    logits
        .chunks(BLOCK)
        .map(|block| f64::from(block_sum(block, best, temperature)))
        .sum()
}

fn block_sum(block: &[f32], best: f32, temperature: f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (rows, rest) = block.as_chunks::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            sums[lane] += exp((row[lane] - best) / temperature);
        }
    }
    for (lane, logit) in rest.iter().enumerate() {
        sums[lane] += exp((logit - best) / temperature);
    }
    sums.iter().sum()
}

/// Replaces each logit by its weight `e^((logit - best) / temperature)`; returns the sum.
pub(crate) fn into_weights(logits: &mut [f32], best: f32, temperature: f32) -> f64 {
    let mut total = 0.0;
    for block in logits.chunks_mut(BLOCK) {
        for logit in &mut *block {
            *logit = exp((*logit - best) / temperature);
        }
        total += sum(block);
    }
    total
}

/// The token at which the running sum of `weights`, lowest id first, passes `target`. If rounding keeps the sum below it,
/// the last token with any weight.
pub(crate) fn crossing(weights: &[f32], target: f64) -> Option<TokenId> {
    let mut left = target;
    let mut last = None;
    for (place, block) in weights.chunks(BLOCK).enumerate() {
        let mass = sum(block);
        if mass > left {
            for (offset, weight) in block.iter().enumerate() {
                if *weight > 0.0 {
                    last = Some(place * BLOCK + offset);
                    left -= f64::from(*weight);
                }
                if left < 0.0 {
                    break;
                }
            }
            break;
        }
        if mass > 0.0 {
            let offset = block.iter().rposition(|weight| *weight > 0.0);
            last = offset.map(|offset| place * BLOCK + offset);
        }
        left -= mass;
    }
    last.and_then(|place| TokenId::try_from(place).ok())
}

fn sum(block: &[f32]) -> f64 {
    let mut sums = [0.0_f64; 8];
    let (rows, rest) = block.as_chunks::<8>();
    for row in rows {
        for (sum, weight) in sums.iter_mut().zip(row) {
            *sum += f64::from(*weight);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|weight| f64::from(*weight)).sum::<f64>()
}

#[cfg(test)]
mod tests;
