//! What the fuzz targets reach that is nobody else's: an estimate of memory without a device chosen.

use candle_core::{DType, Device};

use crate::load::{MemoryEstimate, OpenModel, Quantization, WeightOptions};

/// What the model would take on the CPU.
#[must_use]
pub fn memory(model: &OpenModel) -> MemoryEstimate {
    model.memory(&WeightOptions {
        device: Device::Cpu,
        dtype: DType::F32,
        quantization: Quantization::Q8_0,
    })
}
