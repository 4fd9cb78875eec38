//! What the fuzz targets reach that is nobody else's: reading a GGUF file without its tensors, and an estimate of memory
//! without a device chosen.

use std::path::Path;

use candle_core::{DType, Device};

use crate::error::LoadError;
use crate::load::{MemoryEstimate, ModelFile, OpenModel, Quantization, WeightOptions};

/// What the model would take on the CPU.
#[must_use]
pub fn memory(model: &OpenModel) -> MemoryEstimate {
    model.memory(&WeightOptions {
        device: Device::Cpu,
        dtype: DType::F32,
        quantization: Quantization::Q8_0,
    })
}

/// The files that are made of a GGUF file's metadata, whether or not its tensors are there.
///
/// # Errors
/// As [`OpenModel::open`](crate::load::OpenModel::open), but for tensors that are missing.
pub fn gguf_files(path: &Path) -> Result<Vec<ModelFile>, LoadError> {
    crate::load::gguf_files(path)
}
