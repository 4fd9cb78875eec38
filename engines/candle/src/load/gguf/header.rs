//! The header of a GGUF file: metadata, and the place of each tensor. Every length is checked against the file before
//! anything is allocated for it.
//!
//! # Source
//! `docs/gguf.md` of ggml, versions 2 and 3. Candle's own reader trusts the file more than a server may (an alignment of
//! zero, sizes that overflow), and does not name the tensor when a type is unknown.

use std::collections::HashMap;

use candle_core::quantized::GgmlDType;

use crate::load::tensors::bytes_of;
use crate::model::WeightType::{self, Candle};

/// `GGUF`.
const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// More metadata entries, or tensors, than any model has.
const MAX_ENTRIES: u64 = 1 << 17;
/// More elements of an array than any vocabulary or list of merges has.
const MAX_ELEMENTS: u64 = 1 << 22;
/// The limit over all arrays. An element takes up to eight times as many bytes in memory as in the file, before free memory is
/// checked.
const MAX_ALL_ELEMENTS: u64 = 1 << 24;
const MAX_DIMS: u32 = 4;
/// The nesting limit of arrays, beyond practical use.
const MAX_DEPTH: u32 = 3;

/// The content of the header.
#[derive(Debug, Default)]
pub(crate) struct Header {
    pub(crate) metadata: HashMap<String, Value>,
    pub(crate) tensors: HashMap<String, TensorInfo>,
}

/// A metadata value; the widths of numbers are not kept.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Integer(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<f64>),
    /// Nested arrays, which this module does not use.
    Nested,
}

/// The place of a tensor; its bytes are checked to be in the file.
#[derive(Debug, Clone)]
pub(crate) struct TensorInfo {
    /// The type of its numbers, or ggml's number of an unknown one.
    pub(crate) dtype: Result<WeightType, u32>,
    /// Rows first, unlike in the file.
    pub(crate) shape: Vec<usize>,
    /// The index of the model's part that contains it, from 0.
    pub(crate) file: usize,
    /// Offset of the first byte in the file.
    pub(crate) start: usize,
    /// Offset past the last byte; `start` if the type is unknown.
    pub(crate) end: usize,
}

/// Why a header cannot be read.
#[derive(Debug)]
pub(crate) enum HeaderError {
    /// What is invalid, and at which byte.
    Broken(String),
    /// The numbers of the file are big-endian.
    BigEndian,
    /// The file is of this version, which is not read.
    Version(u32),
}

impl From<String> for HeaderError {
    fn from(problem: String) -> Self {
        Self::Broken(problem)
    }
}

impl Header {
    /// Reads the header of a whole file.
    ///
    /// # Errors
    /// It is invalid, or of another kind.
    pub(crate) fn parse(file: &[u8]) -> Result<Self, HeaderError> {
        let mut reader = Reader {
            file,
            at: 0,
            elements_left: MAX_ALL_ELEMENTS,
        };
        if reader.take(4)? != MAGIC {
            return Err(HeaderError::Broken("it does not begin with GGUF".into()));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(if (1..=3).contains(&version.swap_bytes()) {
                HeaderError::BigEndian
            } else {
                HeaderError::Version(version)
            });
        }
        let tensors = reader.count("tensors", MAX_ENTRIES, 24)?;
        let entries = reader.count("metadata entries", MAX_ENTRIES, 13)?;
        let mut header = Self::default();
        for _ in 0..entries {
            let key = reader.text()?;
            let value = reader.value()?;
            header.metadata.insert(key, value);
        }
        let mut infos = Vec::new();
        for _ in 0..tensors {
            infos.push(reader.tensor()?);
        }
        header.place(infos, reader.at, file.len())?;
        Ok(header)
    }

    /// Finds each tensor's bytes after the header, which ends at `header_end`.
    fn place(
        &mut self,
        infos: Vec<Declared>,
        header_end: usize,
        file_len: usize,
    ) -> Result<(), String> {
        let alignment = self.alignment()?;
        let base = header_end.checked_next_multiple_of(alignment);
        for info in infos {
            let placed = base.and_then(|base| info.place(base, alignment));
            let Some(placed) = placed else {
                return Err(format!(
                    "tensor {} of shape {:?} lies at {}, which makes no sense",
                    info.name, info.shape, info.offset
                ));
            };
            if placed.end > file_len {
                return Err(format!(
                    "tensor {} ends at byte {}, but the file at {file_len}",
                    info.name, placed.end
                ));
            }
            if self.tensors.insert(info.name.clone(), placed).is_some() {
                return Err(format!("it has tensor {} twice", info.name));
            }
        }
        Ok(())
    }

    fn alignment(&self) -> Result<usize, String> {
        let value = match self.metadata.get("general.alignment") {
            None => return Ok(usize::try_from(DEFAULT_ALIGNMENT).unwrap_or(1)),
            Some(Value::Integer(value)) => *value,
            Some(other) => return Err(format!("general.alignment is {other:?}")),
        };
        usize::try_from(value)
            .ok()
            .filter(|value| value.is_power_of_two() && (8..=1 << 16).contains(value))
            .ok_or_else(|| format!("general.alignment is {value}"))
    }
}

/// A tensor as the header declares it.
struct Declared {
    name: String,
    dtype: Result<WeightType, u32>,
    shape: Vec<usize>,
    /// Relative to the start of the tensor data.
    offset: u64,
}

impl Declared {
    /// `None` if its place or size is impossible.
    fn place(&self, base: usize, alignment: usize) -> Option<TensorInfo> {
        let elements = self
            .shape
            .iter()
            .try_fold(1usize, |all, dim| all.checked_mul(*dim))?;
        let bytes = match self.dtype {
            Ok(dtype) => {
                let row = self.shape.last().copied().unwrap_or(1);
                if !row.is_multiple_of(dtype.block_size()) {
                    return None;
                }
                bytes_of(dtype, elements)?
            }
            Err(_) => 0,
        };
        let offset = usize::try_from(self.offset).ok()?;
        if !offset.is_multiple_of(alignment) {
            return None;
        }
        let start = base.checked_add(offset)?;
        Some(TensorInfo {
            dtype: self.dtype,
            shape: self.shape.clone(),
            file: 0,
            start,
            end: start.checked_add(bytes)?,
        })
    }
}

struct Reader<'a> {
    file: &'a [u8],
    at: usize,
    /// The number of elements that arrays may still have.
    elements_left: u64,
}

impl<'a> Reader<'a> {
    fn remaining(&self) -> usize {
        self.file.len().saturating_sub(self.at)
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(bytes);
        let taken = end.and_then(|end| self.file.get(self.at..end));
        let taken = taken.ok_or_else(|| {
            format!(
                "it ends at byte {} within its header: {bytes} bytes were to follow byte {}",
                self.file.len(),
                self.at
            )
        })?;
        self.at += bytes;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let taken = self.take(N)?;
        taken
            .try_into()
            .map_err(|_| "a slice of another length".to_owned())
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a count of items of at least `each` bytes, and checks that they can fit in the rest of the file.
    fn count(&mut self, things: &str, most: u64, each: u64) -> Result<u64, String> {
        let count = self.u64()?;
        let fits = u64::try_from(self.remaining()).unwrap_or(u64::MAX) / each.max(1);
        if count <= most.min(fits) {
            return Ok(count);
        }
        Err(format!(
            "it says that {count} {things} follow byte {}, more than can be",
            self.at
        ))
    }

    /// Reads the number of an array's elements, of at least `each` bytes each.
    fn elements(&mut self, things: &str, each: u64) -> Result<u64, String> {
        let most = self.elements_left.min(MAX_ELEMENTS);
        let count = self.count(things, most, each)?;
        self.elements_left -= count;
        Ok(count)
    }

    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = self.take(length)?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    fn value(&mut self) -> Result<Value, String> {
        let kind = self.u32()?;
        match kind {
            8 => Ok(Value::Text(self.text()?)),
            9 => self.list(0),
            7 => Ok(Value::Bool(self.array::<1>()? != [0])),
            6 | 12 => Ok(Value::Float(self.number(kind)?.as_f64())),
            _ => Ok(match self.number(kind)? {
                Number::Integer(value) => Value::Integer(value),
                Number::Float(value) => Value::Float(value),
            }),
        }
    }

    fn list(&mut self, depth: u32) -> Result<Value, String> {
        let kind = self.u32()?;
        match kind {
            8 => {
                let count = self.elements("texts", 8)?;
                let texts = (0..count).map(|_| self.text()).collect::<Result<_, _>>()?;
                Ok(Value::Texts(texts))
            }
            9 if depth < MAX_DEPTH => {
                for _ in 0..self.elements("arrays", 12)? {
                    self.list(depth + 1)?;
                }
                Ok(Value::Nested)
            }
            9 => Err(format!("arrays within arrays at byte {}", self.at)),
            _ => {
                let count = self.elements("numbers", 1)?;
                let numbers = (0..count)
                    .map(|_| Ok(self.number(kind)?.as_f64()))
                    .collect::<Result<_, String>>()?;
                Ok(Value::Numbers(numbers))
            }
        }
    }

    fn number(&mut self, kind: u32) -> Result<Number, String> {
        Ok(match kind {
            0 | 7 => Number::Integer(u8::from_le_bytes(self.array()?).into()),
            1 => Number::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Number::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Number::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Number::Integer(self.u32()?.into()),
            5 => Number::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Number::Float(f32::from_le_bytes(self.array()?).into()),
            10 => Number::Integer(i64::try_from(self.u64()?).unwrap_or(i64::MAX)),
            11 => Number::Integer(i64::from_le_bytes(self.array()?)),
            12 => Number::Float(f64::from_le_bytes(self.array()?)),
            other => {
                return Err(format!(
                    "it has a value of the unknown type {other} at byte {}",
                    self.at
                ));
            }
        })
    }

    fn tensor(&mut self) -> Result<Declared, String> {
        let name = self.text()?;
        let dims = self.u32()?;
        if dims > MAX_DIMS {
            return Err(format!("tensor {name} has {dims} dimensions"));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let dim = usize::try_from(self.u64()?).unwrap_or(usize::MAX);
            shape.push(dim);
        }
        shape.reverse();
        let kind = self.u32()?;
        let known = KINDS.iter().find(|(id, ..)| *id == kind);
        let dtype = known.and_then(|(_, _, dtype)| *dtype).ok_or(kind);
        let offset = self.u64()?;
        Ok(Declared {
            name,
            dtype,
            shape,
            offset,
        })
    }
}

enum Number {
    Integer(i64),
    Float(f64),
}

impl Number {
    #[expect(
        clippy::cast_precision_loss,
        reason = "arrays of numbers are token types, scores and small counts"
    )]
    fn as_f64(&self) -> f64 {
        match self {
            Self::Integer(value) => *value as f64,
            Self::Float(value) => *value,
        }
    }
}

/// ggml's name of a type.
pub(crate) fn type_name(number: u32) -> String {
    match KINDS.iter().find(|(id, ..)| *id == number) {
        Some((_, name, _)) => (*name).to_owned(),
        None => format!("of ggml's type {number}"),
    }
}

/// ggml's types: number, name, and our type if it is supported.
const KINDS: [(u32, &str, Option<WeightType>); 33] = [
    (0, "F32", Some(Candle(GgmlDType::F32))),
    (1, "F16", Some(Candle(GgmlDType::F16))),
    (2, "Q4_0", Some(Candle(GgmlDType::Q4_0))),
    (3, "Q4_1", Some(Candle(GgmlDType::Q4_1))),
    (6, "Q5_0", Some(Candle(GgmlDType::Q5_0))),
    (7, "Q5_1", Some(Candle(GgmlDType::Q5_1))),
    (8, "Q8_0", Some(Candle(GgmlDType::Q8_0))),
    (9, "Q8_1", None),
    (10, "Q2_K", Some(Candle(GgmlDType::Q2K))),
    (11, "Q3_K", Some(Candle(GgmlDType::Q3K))),
    (12, "Q4_K", Some(Candle(GgmlDType::Q4K))),
    (13, "Q5_K", Some(Candle(GgmlDType::Q5K))),
    (14, "Q6_K", Some(Candle(GgmlDType::Q6K))),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", Some(WeightType::Iq4Nl)),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", Some(WeightType::Iq4Xs)),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", None),
    (30, "BF16", Some(Candle(GgmlDType::BF16))),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", Some(WeightType::Mxfp4)),
    (40, "NVFP4", None),
];

/// The supported types of tensors.
pub(crate) const SUPPORTED: &str = "F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q4_K, Q3_K, Q2_K, Q5_0, Q5_1, Q4_0, Q4_1, IQ4_NL, IQ4_XS or MXFP4";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_that_files_have_are_called_by_name() {
        for (number, name) in [(29, "IQ1_M"), (39, "MXFP4"), (40, "NVFP4")] {
            assert_eq!(type_name(number), name);
        }
        assert_eq!(type_name(4), "of ggml's type 4");
    }
}
