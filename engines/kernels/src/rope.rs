//! Rotary position embedding with a position per row.
//!
//! # Source
//! RoFormer (Su et al. 2021) in the layout of `transformers`: dimension `i` rotates with `i + head_dim / 2`.

/// The rotation of each pair of dimensions in each row.
#[derive(Debug, Clone)]
pub struct Turns {
    cos: Vec<f32>,
    sin: Vec<f32>,
    width: usize,
}

impl Turns {
    /// The rotations of rows at `positions`: each pair of dimensions by its frequency times the position. `frequencies` has one
    /// number for each pair of a head, so half of its width. Pairs with a frequency other than 0 are multiplied by `amplitude`.
    ///
    /// # Panics
    /// There are no frequencies, and `amplitude` is not 1.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "positions are computed with in f32, as the reference does"
    )]
    pub fn new(frequencies: &[f32], amplitude: f32, positions: &[u32]) -> Self {
        let angles = positions
            .iter()
            .flat_map(|&position| frequencies.iter().map(move |f| f * position as f32));
        let (mut cos, mut sin): (Vec<f32>, Vec<f32>) =
            angles.map(|angle| (angle.cos(), angle.sin())).unzip();
        if amplitude != 1.0 {
            amplify(&mut cos, frequencies, amplitude);
            amplify(&mut sin, frequencies, amplitude);
        }
        Self {
            cos,
            sin,
            width: frequencies.len(),
        }
    }

    /// The cosines, `[rows, width]`.
    #[must_use]
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// The sines, `[rows, width]`.
    #[must_use]
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// Pairs per row: half of a head's width.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The cosines and sines of a row.
    ///
    /// # Panics
    /// There is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.width..(row + 1) * self.width;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Multiplies the entries of rotated pairs by the amplitude.
fn amplify(rows: &mut [f32], frequencies: &[f32], amplitude: f32) {
    for row in rows.chunks_exact_mut(frequencies.len()) {
        for (value, frequency) in row.iter_mut().zip(frequencies) {
            if *frequency != 0.0 {
                *value *= amplitude;
            }
        }
    }
}

/// Rotates one head in place.
#[inline(always)]
pub(super) fn turn(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(head.len() / 2);
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = x * cos - y * sin;
        *b = y * cos + x * sin;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_by_nothing_changes_nothing_and_lengths_stay() {
        let mut head = [1.0, 2.0, 3.0, 4.0];
        turn(&mut head, &[1.0, 1.0], &[0.0, 0.0]);
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0]);
        let turns = Turns::new(&[1.0, 0.1], 1.0, &[7]);
        let (cos, sin) = turns.row(0);
        turn(&mut head, cos, sin);
        let length: f32 = head.iter().map(|v| v * v).sum();
        assert!((length - 30.0).abs() < 1e-4 && head[0] != 1.0);
    }
}
