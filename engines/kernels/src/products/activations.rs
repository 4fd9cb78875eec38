//! A product's input as the kernels read it: rows in groups of up to [`GROUP_ROWS`], with their numbers interleaved, so that one
//! pointer traverses a whole group.

use std::sync::OnceLock;

genset_backend_common::named! {
    /// Bits of the numbers that quantized weights are multiplied with on the CPU.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ActivationBits: FromStr {
        /// One 8-bit integer a number, with a scale for 32 of them; two where one of these is far larger than most of its row, so that the
        /// others would hardly be told apart.
        #[default]
        Eight = "8",
        /// Two of each: the second is what the first leaves. Products are then as those of floats are, and take twice the work.
        Sixteen = "16",
    }
}

static BITS: OnceLock<ActivationBits> = OnceLock::new();

/// The bits of the process's quantized products: 8, unless [`choose_activation_bits`] was called first.
pub(super) fn bits() -> ActivationBits {
    *BITS.get_or_init(ActivationBits::default)
}

/// Sets the bits of this process's quantized products; returns `false` if other bits are in use already.
pub fn choose_activation_bits(bits: ActivationBits) -> bool {
    *BITS.get_or_init(|| bits) == bits
}

/// Rows that a kernel multiplies with one load of the weights.
pub(super) const GROUP_ROWS: usize = 8;

/// The groups of `rows` rows: first row and number of rows.
pub(super) fn groups(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows)
        .step_by(GROUP_ROWS)
        .map(move |first| (first, (rows - first).min(GROUP_ROWS)))
}

/// Rows in f32: in a group of `m` rows that starts at row `r`, one number of each row in turn, from `r * columns` on.
pub(super) fn interleave(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0f32; x.len()];
    for (first, group_rows) in groups(rows) {
        let range = first * columns..(first + group_rows) * columns;
        let to = &mut out[range.clone()];
        for (row, x) in x[range].chunks_exact(columns).enumerate() {
            for (column, &v) in x.iter().enumerate() {
                to[column * group_rows + row] = v;
            }
        }
    }
    out
}
