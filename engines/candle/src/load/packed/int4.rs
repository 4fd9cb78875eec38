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
    let int4 = match packing {
        Packing::Gptq {
            zero_offset,
            has_order,
        } => parts.gptq(&codes, zero_offset, has_order)?,
        Packing::Awq => parts.awq(&codes)?,
        Packing::Compressed { has_zeros } => parts.compressed(&codes, has_zeros)?,
    };
    Ok(Some(int4.into_tensor(codes.name)))
}

/// The tensors of one matrix in a checkout.
struct Parts<'a, 'b> {
    folder: &'a SafetensorsFolder,
    module: &'b str,
    group_size: Option<usize>,
}

impl<'a> Parts<'a, '_> {
    /// `qweight` is `[columns / 8, rows]`, `qzeros` `[groups, rows / 8]`, `scales` `[groups, rows]`, `g_idx` `[columns]`.
    fn gptq(
        &self,
        codes: &Stored<'a>,
        zero_offset: u8,
        has_order: bool,
    ) -> Result<Int4<'a>, LoadError> {
        let (words, rows) = self.two(codes)?;
        let columns = self.eight(codes, words)?;
        self.whole_words(codes, rows)?;
        let order = self.order("g_idx", columns, has_order, false)?;
        let groups = self.groups(columns);
        let (scales, zeros) = (self.part("scales")?, self.part("qzeros")?);
        check_shape(self.folder, &scales, &[groups, rows])?;
        let zeros = Zeros {
            words: Words::try_new(self.folder, &zeros, &[groups, rows / 8])?,
            offset: zero_offset,
        };
        Ok(Int4 {
            rows,
            columns,
            groups,
            group_size: self.group_size.unwrap_or(columns),
            layout: Layout::Gptq,
            codes: Words::try_new(self.folder, codes, &[words, rows])?,
            zeros: Some(zeros),
            scales: Floats::try_new(self.folder, &scales)?,
            order,
        })
    }

    /// `qweight` is `[columns, rows / 8]`, `qzeros` `[groups, rows / 8]`, `scales` `[groups, rows]`.
    fn awq(&self, codes: &Stored<'a>) -> Result<Int4<'a>, LoadError> {
        let (columns, words) = self.two(codes)?;
        let rows = self.eight(codes, words)?;
        let groups = self.groups(columns);
        let (scales, zeros) = (self.part("scales")?, self.part("qzeros")?);
        check_shape(self.folder, &scales, &[groups, rows])?;
        let zeros = Zeros {
            words: Words::try_new(self.folder, &zeros, &[groups, words])?,
            offset: 0,
        };
        Ok(Int4 {
            rows,
            columns,
            groups,
            group_size: self.group_size.unwrap_or(columns),
            layout: Layout::Awq,
            codes: Words::try_new(self.folder, codes, &[columns, words])?,
            zeros: Some(zeros),
            scales: Floats::try_new(self.folder, &scales)?,
            order: None,
        })
    }

    /// `weight_packed` is `[rows, columns / 8]`, rounded up; `weight_scale` `[rows, groups]`, `weight_zero_point`
    /// `[rows / 8, groups]`, `weight_shape` the two sizes.
    fn compressed(&self, codes: &Stored<'a>, has_zeros: bool) -> Result<Int4<'a>, LoadError> {
        let (rows, words) = self.two(codes)?;
        let columns = self.columns_of_shape(rows, words)?;
        let order = self.order("weight_g_idx", columns, false, true)?;
        let groups = self.groups(columns);
        let scales = self.part("weight_scale")?;
        check_shape(self.folder, &scales, &[rows, groups])?;
        let zeros = if has_zeros {
            let zeros = self.part("weight_zero_point")?;
            Some(Zeros {
                words: Words::try_new(self.folder, &zeros, &[rows.div_ceil(8), groups])?,
                offset: 0,
            })
        } else {
            None
        };
        Ok(Int4 {
            rows,
            columns,
            groups,
            group_size: self.group_size.unwrap_or(columns),
            layout: Layout::Rows { words },
            codes: Words::try_new(self.folder, codes, &[rows, words])?,
            zeros,
            scales: Floats::try_new(self.folder, &scales)?,
            order,
        })
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
