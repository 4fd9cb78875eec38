//! [`WeightType`]: the type of a tensor's numbers in its file.

use std::fmt;

use candle_core::quantized::GgmlDType;

/// The type of a tensor's numbers: one of candle's, or one that only our own kernels read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// One of candle's.
    Candle(GgmlDType),
    /// Four-bit indices into a table of sixteen numbers, in blocks of 32.
    Iq4Nl,
    /// The same in blocks of 256, with six-bit scales.
    Iq4Xs,
    /// Four-bit floats, in blocks of 32 whose scale is a power of two.
    Mxfp4,
}

impl WeightType {
    /// Unquantized 32-bit floats.
    pub const F32: Self = Self::Candle(GgmlDType::F32);
    /// Unquantized 16-bit floats.
    pub const F16: Self = Self::Candle(GgmlDType::F16);
    /// Unquantized 16-bit floats with the range of f32.
    pub const BF16: Self = Self::Candle(GgmlDType::BF16);

    /// Numbers per block.
    #[must_use]
    pub fn block_size(self) -> usize {
        match self {
            Self::Candle(dtype) => dtype.block_size(),
            Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Iq4Xs => 256,
        }
    }

    /// Bytes per block.
    #[must_use]
    pub fn type_size(self) -> usize {
        match self {
            Self::Candle(dtype) => dtype.type_size(),
            Self::Iq4Nl => 18,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
        }
    }

    /// Whether numbers are unquantized.
    #[must_use]
    pub fn is_float(self) -> bool {
        [Self::F32, Self::F16, Self::BF16].contains(&self)
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Candle(dtype) => write!(f, "{dtype:?}"),
            Self::Iq4Nl => f.write_str("IQ4_NL"),
            Self::Iq4Xs => f.write_str("IQ4_XS"),
            Self::Mxfp4 => f.write_str("MXFP4"),
        }
    }
}

impl From<GgmlDType> for WeightType {
    fn from(dtype: GgmlDType) -> Self {
        Self::Candle(dtype)
    }
}
