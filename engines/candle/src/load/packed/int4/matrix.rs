//! [`Int4`]: a checked four-bit matrix, and the conversion of its rows.

use std::sync::Arc;

use candle_core::quantized::GgmlDType;

use crate::load::packed::stored::{Floats, Words};
use crate::load::tensors::{Data, MadeRows, RawTensor, RowOrder};
use crate::model::WeightType;

/// Columns per block.
const BLOCK: usize = 32;
/// The middle of four bits.
const MIDDLE: u8 = 8;
/// [`MIDDLE`] eight times.
const MIDDLES: u32 = 0x8888_8888;
/// The positions in a word of AWQ's eight values.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A four-bit matrix as stored in its checkout. Its tensors have the sizes of the layout.
#[derive(Debug)]
pub(super) struct Int4<'a> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) groups: usize,
    /// Columns per group; the last group may have fewer.
    pub(super) group_size: usize,
    pub(super) layout: Layout,
    pub(super) codes: Words<'a>,
    /// `None` if all are the middle.
    pub(super) zeros: Option<Zeros<'a>>,
    pub(super) scales: Floats<'a>,
    /// The group of each column; `None` if groups are consecutive.
    pub(super) order: Option<Words<'a>>,
}

/// The layout of the numbers of a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) enum Layout {
    /// Values `[columns / 8, rows]`, zeros `[groups, rows / 8]`, scales `[groups, rows]`.
    Gptq,
    /// Values `[columns, rows / 8]`, zeros `[groups, rows / 8]`, scales `[groups, rows]`.
    Awq,
    /// Values `[rows, words]`, zeros `[rows / 8, groups]`, scales `[rows, groups]`.
    Rows { words: usize },
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Zeros<'a> {
    pub(super) words: Words<'a>,
    /// The number to add to each, in four bits.
    pub(super) offset: u8,
}

impl Zeros<'_> {
    fn are_middles(self) -> bool {
        let offsets = 0x1111_1111 * u32::from(self.offset);
        self.words.all(MIDDLES.wrapping_sub(offsets))
    }
}

/// The type that a matrix is converted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Q4_0,
    Q5_0,
    /// f32, with the reason.
    F32(&'static str),
}

impl Target {
    fn dtype(self) -> WeightType {
        match self {
            Self::Q4_0 => GgmlDType::Q4_0.into(),
            Self::Q5_0 => GgmlDType::Q5_0.into(),
            Self::F32(_) => WeightType::F32,
        }
    }
}

impl<'a> Int4<'a> {
    /// The tensor, which the file calls `name`.
    pub(super) fn into_tensor(self, name: &'a str) -> RawTensor<'a> {
        let target = self.target();
        RawTensor {
            name,
            dtype: target.dtype(),
            shape: vec![self.rows, self.columns],
            data: Data::Made {
                rows: Arc::new(Rows { int4: self, target }),
                first: 0,
            },
            rows: RowOrder::Halves,
        }
    }
}

impl Int4<'_> {
    /// The smallest type that holds every number exactly.
    fn target(&self) -> Target {
        let are_blocks = self.columns.is_multiple_of(BLOCK)
            && (self.group_size.is_multiple_of(BLOCK) || self.groups == 1);
        if self.order.is_some() {
            Target::F32("int4, columns in another order than their groups (desc_act)")
        } else if !are_blocks {
            Target::F32("int4, groups that are no multiples of 32 columns")
        } else if !self.scales.are_halves() {
            Target::F32("int4, scales that f16 does not hold")
        } else if self.zeros.is_none_or(Zeros::are_middles) {
            Target::Q4_0
        } else {
            Target::Q5_0
        }
    }

    /// The values of a row.
    fn codes(&self, row: usize) -> Vec<u8> {
        let mut codes = vec![0; self.columns];
        let (first, step) = match self.layout {
            Layout::Gptq => (row, self.rows),
            Layout::Rows { words } => (row * words, 1),
            Layout::Awq => {
                let (words, place) = (self.rows / 8, AWQ_PLACES[row % 8]);
                for (column, code) in codes.iter_mut().enumerate() {
                    *code = self.codes.nibble(column * words + row / 8, place);
                }
                return codes;
            }
        };
        for (eighth, codes) in codes.chunks_mut(8).enumerate() {
            let word = self.codes.get(first + eighth * step).to_le_bytes();
            for (place, code) in codes.iter_mut().enumerate() {
                *code = (word[place / 2] >> (place % 2 * 4)) & 15;
            }
        }
        codes
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        let Some(zeros) = self.zeros else {
            return MIDDLE;
        };
        let nibble = match self.layout {
            Layout::Gptq => zeros
                .words
                .nibble(group * (self.rows / 8) + row / 8, row % 8),
            Layout::Awq => {
                let word = group * (self.rows / 8) + row / 8;
                zeros.words.nibble(word, AWQ_PLACES[row % 8])
            }
            Layout::Rows { .. } => zeros.words.nibble(row / 8 * self.groups + group, row % 8),
        };
        nibble.wrapping_add(zeros.offset) & 15
    }

    /// The index of a scale.
    fn scale(&self, row: usize, group: usize) -> usize {
        match self.layout {
            Layout::Gptq | Layout::Awq => group * self.rows + row,
            Layout::Rows { .. } => row * self.groups + group,
        }
    }

    fn group(&self, column: usize) -> usize {
        match self.order {
            // Checked to be a valid group.
            Some(order) => order.get(column) as usize,
            None => column / self.group_size,
        }
    }

    fn number(&self, row: usize, column: usize, code: u8) -> f32 {
        let group = self.group(column);
        let value = i16::from(code) - i16::from(self.zero(row, group));
        f32::from(value) * self.scales.get(self.scale(row, group))
    }

    /// The f16 scale of a block of columns, all of one group, and its values shifted so that `middle` is zero.
    fn block(
        &self,
        row: usize,
        (block, codes): (usize, &[u8; BLOCK]),
        middle: u8,
    ) -> ([u8; 2], [u8; BLOCK]) {
        let group = self.group(block * BLOCK);
        let to_middle = middle.wrapping_sub(self.zero(row, group));
        let scale = self.scales.half(self.scale(row, group));
        (
            scale.to_le_bytes(),
            codes.map(|code| code.wrapping_add(to_middle)),
        )
    }
}

/// The rows of a matrix, converted.
#[derive(Debug)]
struct Rows<'a> {
    int4: Int4<'a>,
    target: Target,
}

impl MadeRows for Rows<'_> {
    fn file_bytes_per_row(&self) -> usize {
        self.int4.columns / 2
    }

    fn make(&self, row: usize, into: &mut [u8]) {
        let codes = self.int4.codes(row);
        let blocks = codes.as_chunks().0.iter().enumerate();
        match self.target {
            Target::F32(_) => {
                let numbers = into.as_chunks_mut::<4>().0.iter_mut();
                for ((column, code), into) in codes.iter().enumerate().zip(numbers) {
                    *into = self.int4.number(row, column, *code).to_le_bytes();
                }
            }
            Target::Q4_0 => {
                for (block, into) in blocks.zip(into.as_chunks_mut::<18>().0) {
                    let (scale, values) = self.int4.block(row, block, MIDDLE);
                    let [first, second, nibbles @ ..] = into;
                    [*first, *second] = scale;
                    pack_nibbles(&values, nibbles);
                }
            }
            Target::Q5_0 => {
                for (block, into) in blocks.zip(into.as_chunks_mut::<22>().0) {
                    let (scale, values) = self.int4.block(row, block, 2 * MIDDLE);
                    let [first, second, a, b, c, d, nibbles @ ..] = into;
                    [*first, *second] = scale;
                    let bits = values.iter().enumerate();
                    let bits = bits.map(|(place, value)| u32::from(value >> 4) << place);
                    [*a, *b, *c, *d] = bits.fold(0, |all, bit| all | bit).to_le_bytes();
                    pack_nibbles(&values, nibbles);
                }
            }
        }
    }

    fn form(&self) -> &'static str {
        match self.target {
            Target::Q4_0 => "int4",
            Target::Q5_0 => "int4 with zeros",
            Target::F32(reason) => reason,
        }
    }
}

/// Packs the low four bits: the first half of a block below the second half.
fn pack_nibbles(values: &[u8; BLOCK], into: &mut [u8; BLOCK / 2]) {
    let (first, second) = values.split_at(BLOCK / 2);
    for ((into, first), second) in into.iter_mut().zip(first).zip(second) {
        *into = (first & 15) | second << 4;
    }
}
