//! The tensors of a packed matrix: found by name, checked for type and shape, and read number by number.

use safetensors::Dtype;

use crate::error::LoadError;
use crate::load::TensorFiles;
use crate::load::safetensors::{SafetensorsFolder, Stored};

/// The tensor of that name, which must exist.
///
/// # Errors
/// It does not exist.
pub(super) fn required<'a>(
    folder: &'a SafetensorsFolder,
    name: &str,
) -> Result<Stored<'a>, LoadError> {
    folder.stored(name).ok_or_else(|| LoadError::MissingTensor {
        path: folder.path().to_owned(),
        name: name.to_owned(),
    })
}

/// Checks that a tensor has that shape.
///
/// # Errors
/// It has another shape.
pub(super) fn check_shape(
    folder: &SafetensorsFolder,
    stored: &Stored<'_>,
    shape: &[usize],
) -> Result<(), LoadError> {
    if stored.shape == shape {
        return Ok(());
    }
    Err(folder.wrong_shape(stored.name, stored.shape.to_vec(), shape.to_vec()))
}

/// 32-bit integers, each of which may hold several numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a>(&'a [[u8; 4]]);

impl<'a> Words<'a> {
    /// # Errors
    /// The tensor has another type or shape.
    pub(super) fn try_new(
        folder: &SafetensorsFolder,
        stored: &Stored<'a>,
        shape: &[usize],
    ) -> Result<Self, LoadError> {
        if ![Dtype::I32, Dtype::U32].contains(&stored.dtype) {
            return Err(folder.wrong_dtype(stored, "I32 where numbers are packed"));
        }
        check_shape(folder, stored, shape)?;
        Ok(Self(stored.data.as_chunks().0))
    }

    pub(super) fn get(self, index: usize) -> u32 {
        u32::from_le_bytes(self.0.get(index).copied().unwrap_or_default())
    }

    /// The four bits at position `place` of a word.
    #[expect(clippy::cast_possible_truncation, reason = "four bits are kept")]
    pub(super) fn nibble(self, index: usize, place: usize) -> u8 {
        (self.get(index) >> (4 * place)) as u8 & 15
    }

    pub(super) fn all(self, value: u32) -> bool {
        self.0.iter().all(|word| u32::from_le_bytes(*word) == value)
    }

    pub(super) fn iter(self) -> impl Iterator<Item = u32> + 'a {
        self.0.iter().map(|word| u32::from_le_bytes(*word))
    }
}

/// Floats of any type that scales may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Floats<'a> {
    kind: Kind,
    data: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    F32,
    F16,
    Bf16,
    /// Only an exponent.
    E8m0,
}

impl<'a> Floats<'a> {
    /// # Errors
    /// The tensor has another type.
    pub(super) fn try_new(
        folder: &SafetensorsFolder,
        stored: &Stored<'a>,
    ) -> Result<Self, LoadError> {
        // Foreign and non-exhaustive: any other type is not one of these.
        let kind = if stored.dtype == Dtype::F32 {
            Kind::F32
        } else if stored.dtype == Dtype::F16 {
            Kind::F16
        } else if stored.dtype == Dtype::BF16 {
            Kind::Bf16
        } else if stored.dtype == Dtype::F8_E8M0 {
            Kind::E8m0
        } else {
            return Err(
                folder.wrong_dtype(stored, "F32, F16, BF16 or F8_E8M0 where they are scales")
            );
        };
        Ok(Self {
            kind,
            data: stored.data,
        })
    }

    pub(super) fn get(self, index: usize) -> f32 {
        match self.kind {
            Kind::F32 => f32::from_le_bytes(self.bytes(index)),
            Kind::F16 => half::f16::from_le_bytes(self.bytes(index)).to_f32(),
            Kind::Bf16 => half::bf16::from_le_bytes(self.bytes(index)).to_f32(),
            Kind::E8m0 => {
                let [exponent] = self.bytes(index);
                // The smallest one is subnormal in f32.
                f32::from_bits(if exponent == 0 {
                    1 << 22
                } else {
                    u32::from(exponent) << 23
                })
            }
        }
    }

    /// A number as f16.
    pub(super) fn half(self, index: usize) -> half::f16 {
        match self.kind {
            Kind::F16 => half::f16::from_le_bytes(self.bytes(index)),
            Kind::F32 | Kind::Bf16 | Kind::E8m0 => half::f16::from_f32(self.get(index)),
        }
    }

    /// Whether f16 holds every number exactly.
    pub(super) fn are_halves(self) -> bool {
        let bytes = match self.kind {
            Kind::F16 => return true,
            Kind::F32 => 4,
            Kind::Bf16 => 2,
            Kind::E8m0 => 1,
        };
        (0..self.data.len() / bytes).all(|index| self.get(index) == self.half(index).to_f32())
    }

    fn bytes<const N: usize>(self, index: usize) -> [u8; N] {
        let (all, _) = self.data.as_chunks::<N>();
        all.get(index).copied().unwrap_or([0; N])
    }
}
