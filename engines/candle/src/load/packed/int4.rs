//! Four-bit matrices with a scale and a zero point for each group of columns of a row: `scale * (value - zero)`.
//!
//! If groups are whole blocks of 32 columns, such a matrix converts exactly to GGUF's blocks, for which there are fast
//! kernels: `Q4_0` if every zero point is 8, else `Q5_0`, whose fifth bit holds the difference to the zero point. (`Q4_1`
//! would be smaller, but its minimum, a product of scale and zero point, is rounded.) Otherwise the rows become f32.
//!
//! # Source
//! GPTQ: the `pack` of AutoGPTQ's and GPTQModel's linear layers; a zero point is stored minus 1, in four bits (format `gptq`), or
//! unchanged (`gptq_v2`). AWQ: AutoAWQ's `packing_utils.py`, version `gemm`. compressed-tensors: its `pack_quantized`
//! compressor.

mod matrix;

use self::matrix::{Int4, Layout, Zeros};
use super::stored::{Floats, Words, check_shape, required};
use crate::error::LoadError;
use crate::load::TensorFiles;
use crate::load::safetensors::{SafetensorsFolder, Stored};
use crate::load::tensors::RawTensor;

/// The packing format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Eight columns per word.
    Gptq {
        /// The number to add to a stored zero point.
        zero_offset: u8,
        /// Whether the groups of columns (`g_idx`) are required; otherwise they are optional.
        has_order: bool,
    },
    /// Eight rows per word, in AWQ's own order.
    Awq,
    /// Eight columns per word, row by row.
    Compressed {
        /// Whether there are zero points; otherwise all are the middle.
        has_zeros: bool,
    },
}

/// The matrix that would be called `name`, if it is packed.
///
/// # Errors
/// A required tensor is missing, has another type or shape, or has invalid content.
pub(super) fn tensor<'a>(
    folder: &'a SafetensorsFolder,
    name: &str,
    packing: Packing,
    group_size: Option<usize>,
) -> Result<Option<RawTensor<'a>>, LoadError> {
    let Some(module) = name.strip_suffix(".weight") else {
        return Ok(None);
    };
    let suffix = match packing {
        Packing::Gptq { .. } | Packing::Awq => "qweight",
        Packing::Compressed { .. } => "weight_packed",
    };
    if folder.stored(name).is_some() {
        return Ok(None);
    }
    let Some(codes) = folder.stored(&format!("{module}.{suffix}")) else {
        return Ok(None);
    };
    let parts = Parts {
        folder,
        module,
        group_size,
    };
    let int4 = parts.matrix(&codes, packing)?;
    Ok(Some(int4.into_tensor(codes.name)))
}

/// The tensors of one matrix in a checkout.
struct Parts<'a, 'b> {
    folder: &'a SafetensorsFolder,
    module: &'b str,
    group_size: Option<usize>,
}

impl<'a> Parts<'a, '_> {
    /// The matrix with these values. Eight packed numbers are a word; compressed-tensors rounds up, and has both sizes in
    /// `weight_shape`.
    ///
    /// | packing | values | zero points | scales | groups of columns |
    /// | --- | --- | --- | --- | --- |
    /// | GPTQ | `[columns / 8, rows]` | `[groups, rows / 8]` | `[groups, rows]` | `[columns]` |
    /// | AWQ | `[columns, rows / 8]` | `[groups, rows / 8]` | `[groups, rows]` | |
    /// | compressed-tensors | `[rows, columns / 8]` | `[rows / 8, groups]` | `[rows, groups]` | `[columns]` |
    fn matrix(&self, codes: &Stored<'a>, packing: Packing) -> Result<Int4<'a>, LoadError> {
        let (first, second) = self.two(codes)?;
        let (rows, columns, layout, order) = match packing {
            Packing::Gptq { has_order, .. } => {
                let columns = self.eight(codes, first)?;
                self.whole_words(codes, second)?;
                let order = self.order("g_idx", columns, has_order, false)?;
                (second, columns, Layout::Gptq, order)
            }
            Packing::Awq => (self.eight(codes, second)?, first, Layout::Awq, None),
            Packing::Compressed { .. } => {
                let columns = self.columns_of_shape(first, second)?;
                let order = self.order("weight_g_idx", columns, false, true)?;
                (first, columns, Layout::Rows { words: second }, order)
            }
        };
        let groups = self.groups(columns);
        let (scales, shape) = match layout {
            Layout::Gptq | Layout::Awq => ("scales", [groups, rows]),
            Layout::Rows { .. } => ("weight_scale", [rows, groups]),
        };
        let scales = self.part(scales)?;
        check_shape(self.folder, &scales, &shape)?;
        let zeros = match packing {
            Packing::Gptq { zero_offset, .. } => {
                Some(self.zeros("qzeros", [groups, rows / 8], zero_offset)?)
            }
            Packing::Awq => Some(self.zeros("qzeros", [groups, rows / 8], 0)?),
            Packing::Compressed { has_zeros: true } => {
                Some(self.zeros("weight_zero_point", [rows.div_ceil(8), groups], 0)?)
            }
            Packing::Compressed { has_zeros: false } => None,
        };
        Ok(Int4 {
            rows,
            columns,
            groups,
            group_size: self.group_size.unwrap_or(columns),
            layout,
            codes: Words::try_new(self.folder, codes, &[first, second])?,
            zeros,
            scales: Floats::try_new(self.folder, &scales)?,
            order,
        })
    }

    fn zeros(&self, suffix: &str, shape: [usize; 2], offset: u8) -> Result<Zeros<'a>, LoadError> {
        let words = Words::try_new(self.folder, &self.part(suffix)?, &shape)?;
        Ok(Zeros { words, offset })
    }

    fn part(&self, suffix: &str) -> Result<Stored<'a>, LoadError> {
        required(self.folder, &format!("{}.{suffix}", self.module))
    }

    fn broken<T>(&self, name: &str, problem: &str) -> Result<T, LoadError> {
        let problem = format!("tensor {name} {problem}");
        Err(LoadError::broken(self.folder.path(), problem))
    }

    fn two(&self, stored: &Stored<'_>) -> Result<(usize, usize), LoadError> {
        match *stored.shape {
            [first, second] if first > 0 && second > 0 => Ok((first, second)),
            _ => self.broken(stored.name, &format!("is {:?}, no matrix", stored.shape)),
        }
    }

    /// The count of numbers in this many words.
    fn eight(&self, stored: &Stored<'_>, words: usize) -> Result<usize, LoadError> {
        match words.checked_mul(8) {
            Some(numbers) => Ok(numbers),
            None => self.broken(stored.name, "is larger than memory"),
        }
    }

    fn whole_words(&self, stored: &Stored<'_>, rows: usize) -> Result<(), LoadError> {
        if rows.is_multiple_of(8) {
            return Ok(());
        }
        self.broken(
            stored.name,
            &format!("has {rows} columns, which are no multiple of 8"),
        )
    }

    fn groups(&self, columns: usize) -> usize {
        self.group_size.map_or(1, |size| columns.div_ceil(size))
    }

    /// The group of each column; `None` if groups are consecutive. With `has_unset`, a value of -1 means that they are.
    fn order(
        &self,
        suffix: &str,
        columns: usize,
        is_required: bool,
        has_unset: bool,
    ) -> Result<Option<Words<'a>>, LoadError> {
        let name = format!("{}.{suffix}", self.module);
        let stored = match self.folder.stored(&name) {
            Some(stored) => stored,
            None if is_required => required(self.folder, &name)?,
            None => return Ok(None),
        };
        let order = Words::try_new(self.folder, &stored, &[columns])?;
        if has_unset && order.iter().any(|group| group == u32::MAX) {
            return Ok(None);
        }
        let groups = self.groups(columns);
        let group_size = self.group_size.unwrap_or(columns);
        let mut follows = true;
        for (column, group) in order.iter().enumerate() {
            match usize::try_from(group).ok().filter(|group| *group < groups) {
                Some(group) => follows &= group == column / group_size,
                None => {
                    let group = group.cast_signed();
                    let problem = format!(
                        "says that column {column} is of group {group}; there are {groups}"
                    );
                    return self.broken(stored.name, &problem);
                }
            }
        }
        Ok((!follows).then_some(order))
    }

    /// The number of columns from `weight_shape`, which must match the number of words.
    fn columns_of_shape(&self, rows: usize, words: usize) -> Result<usize, LoadError> {
        let stored = self.part("weight_shape")?;
        let whole = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => usize::try_from(i32::from_le_bytes([a, b, c, d])).ok(),
            [a, b, c, d, e, f, g, h] => {
                usize::try_from(i64::from_le_bytes([a, b, c, d, e, f, g, h])).ok()
            }
            _ => None,
        };
        let half = stored.data.len() / 2;
        let sizes = stored.data.split_at_checked(half);
        let sizes = sizes.map(|(first, second)| (whole(first), whole(second)));
        match sizes {
            Some((Some(first), Some(columns)))
                if first == rows && columns > 0 && columns.div_ceil(8) == words =>
            {
                Ok(columns)
            }
            Some(_) | None => {
                let problem = format!("is not the shape of {rows} rows of {words} words");
                self.broken(stored.name, &problem)
            }
        }
    }
}
