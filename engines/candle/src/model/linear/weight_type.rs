//! [`WeightType`]: the type of a tensor's numbers in its file.

use std::fmt;

use candle_core::quantized::GgmlDType;
use genset_kernels::BlockType;

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

    /// The type of its blocks, if there are kernels for them.
    pub(super) fn block_type(self) -> Option<BlockType> {
        match self {
            Self::Candle(GgmlDType::Q2K) => Some(BlockType::Q2K),
            Self::Candle(GgmlDType::Q3K) => Some(BlockType::Q3K),
            Self::Candle(GgmlDType::Q4_0) => Some(BlockType::Q4_0),
            Self::Candle(GgmlDType::Q4_1) => Some(BlockType::Q4_1),
            Self::Candle(GgmlDType::Q4K) => Some(BlockType::Q4K),
            Self::Candle(GgmlDType::Q5_0) => Some(BlockType::Q5_0),
            Self::Candle(GgmlDType::Q5_1) => Some(BlockType::Q5_1),
            Self::Candle(GgmlDType::Q5K) => Some(BlockType::Q5K),
            Self::Candle(GgmlDType::Q6K) => Some(BlockType::Q6K),
            Self::Candle(GgmlDType::Q8_0) => Some(BlockType::Q8_0),
            Self::Iq4Nl => Some(BlockType::Iq4Nl),
            Self::Iq4Xs => Some(BlockType::Iq4Xs),
            Self::Mxfp4 => Some(BlockType::Mxfp4),
            Self::Candle(
                GgmlDType::F32
                | GgmlDType::F16
                | GgmlDType::BF16
                | GgmlDType::Q8_1
                | GgmlDType::Q8K,
            ) => None,
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
            Self::Candle(dtype) => {
                let name = format!("{dtype:?}");
                // Candle leaves out a line: ggml's name is Q4_K.
                match name.strip_suffix('K') {
                    Some(bits) => write!(f, "{bits}_K"),
                    None => f.write_str(&name),
                }
            }
            Self::Iq4Nl => f.write_str("IQ4_NL"),
            Self::Iq4Xs => f.write_str("IQ4_XS"),
            Self::Mxfp4 => f.write_str("MXFP4"),
        }
    }
}

impl From<BlockType> for WeightType {
    fn from(block_type: BlockType) -> Self {
        match block_type {
            BlockType::Q2K => Self::Candle(GgmlDType::Q2K),
            BlockType::Q3K => Self::Candle(GgmlDType::Q3K),
            BlockType::Q4_0 => Self::Candle(GgmlDType::Q4_0),
            BlockType::Q4_1 => Self::Candle(GgmlDType::Q4_1),
            BlockType::Q4K => Self::Candle(GgmlDType::Q4K),
            BlockType::Q5_0 => Self::Candle(GgmlDType::Q5_0),
            BlockType::Q5_1 => Self::Candle(GgmlDType::Q5_1),
            BlockType::Q5K => Self::Candle(GgmlDType::Q5K),
            BlockType::Q6K => Self::Candle(GgmlDType::Q6K),
            BlockType::Q8_0 => Self::Candle(GgmlDType::Q8_0),
            BlockType::Iq4Nl => Self::Iq4Nl,
            BlockType::Iq4Xs => Self::Iq4Xs,
            BlockType::Mxfp4 => Self::Mxfp4,
        }
    }
}

impl From<GgmlDType> for WeightType {
    fn from(dtype: GgmlDType) -> Self {
        Self::Candle(dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_with_kernels_are_those_of_their_blocks_and_have_the_names_of_ggml() {
        for (dtype, name) in [
            (WeightType::from(GgmlDType::Q4K), "Q4_K"),
            (WeightType::from(GgmlDType::Q6K), "Q6_K"),
            (WeightType::from(GgmlDType::Q8_0), "Q8_0"),
            (WeightType::Iq4Xs, "IQ4_XS"),
        ] {
            assert_eq!(dtype.block_type().map(WeightType::from), Some(dtype));
            assert_eq!(dtype.to_string(), name);
        }
    }
}
