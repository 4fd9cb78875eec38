//! [`Pooling`]: combines a sequence's vectors into one.

/// How a sequence's vectors are combined into one.
///
/// # Source
/// The modes of `sentence-transformers`' module `Pooling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The first token's vector.
    Cls,
    /// The maximum in each dimension.
    Max,
    /// The mean.
    Mean,
    /// The sum, divided by the square root of their number.
    MeanSqrtLen,
    /// The mean weighted by the position, from 1.
    WeightedMean,
    /// The last token's vector.
    LastToken,
}

impl Pooling {
    /// Every mode, in the order in which several results are concatenated.
    pub const ALL: [Self; 6] = [
        Self::Cls,
        Self::Max,
        Self::Mean,
        Self::MeanSqrtLen,
        Self::WeightedMean,
        Self::LastToken,
    ];

    /// Appends the pooled vector of `rows`, each `width` wide and at least one, to `pooled`.
    pub(super) fn pool(self, rows: &[f32], width: usize, pooled: &mut Vec<f32>) {
        let num_rows = rows.len() / width.max(1);
        let start = pooled.len();
        let first = |rows: &[f32]| rows.iter().take(width).copied().collect::<Vec<f32>>();
        match self {
            Self::Cls => pooled.extend(first(rows)),
            Self::LastToken => pooled.extend(&rows[(num_rows - 1) * width..]),
            Self::Max => {
                pooled.extend(first(rows));
                for row in rows.chunks_exact(width).skip(1) {
                    for (most, number) in pooled[start..].iter_mut().zip(row) {
                        // `f32::max` would silently ignore a NaN.
                        if number.is_nan() || *number > *most {
                            *most = *number;
                        }
                    }
                }
            }
            Self::Mean | Self::MeanSqrtLen | Self::WeightedMean => {
                pooled.resize(start + width, 0.0);
                let mut weights = 0.0;
                for (place, row) in rows.chunks_exact(width).enumerate() {
                    let weight = self.weight(place);
                    weights += weight;
                    for (sum, number) in pooled[start..].iter_mut().zip(row) {
                        *sum += weight * number;
                    }
                }
                let scale = match self {
                    Self::MeanSqrtLen => weights.sqrt().recip(),
                    Self::Cls | Self::Max | Self::Mean | Self::WeightedMean | Self::LastToken => {
                        weights.recip()
                    }
                };
                for number in &mut pooled[start..] {
                    *number *= scale;
                }
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a position, far below 2^24")]
    fn weight(self, place: usize) -> f32 {
        match self {
            Self::WeightedMean => (place + 1) as f32,
            Self::Cls | Self::Max | Self::Mean | Self::MeanSqrtLen | Self::LastToken => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_makes_one_vector_of_many() {
        let rows = [1.0, -2.0, 3.0, 0.0, 5.0, 2.0, 7.0, 4.0];
        let expected = [
            (Pooling::Cls, [1.0, -2.0]),
            (Pooling::Max, [7.0, 4.0]),
            (Pooling::Mean, [4.0, 1.0]),
            (Pooling::MeanSqrtLen, [8.0, 2.0]),
            (Pooling::WeightedMean, [5.0, 2.0]),
            (Pooling::LastToken, [7.0, 4.0]),
        ];
        for (mode, want) in expected {
            let mut pooled = vec![9.0];
            mode.pool(&rows, 2, &mut pooled);
            assert_eq!(pooled, [[9.0].as_slice(), &want].concat(), "{mode:?}");
            let mut alone = Vec::new();
            mode.pool(&rows[..2], 2, &mut alone);
            assert_eq!(alone, [1.0, -2.0], "{mode:?} of one");
        }
        assert_eq!(expected.map(|(mode, _)| mode), Pooling::ALL);
    }

    #[test]
    fn the_largest_number_hides_none_that_is_not_one() {
        for place in 0..3 {
            let mut rows = [1.0, 2.0, 3.0];
            rows[place] = f32::NAN;
            let mut pooled = Vec::new();
            Pooling::Max.pool(&rows, 1, &mut pooled);
            assert!(pooled[0].is_nan(), "{place}: {pooled:?}");
        }
    }
}
