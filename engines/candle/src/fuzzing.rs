//! Entry points for the fuzz targets alone: a memory estimate without a chosen device.

use candle_core::{DType, Device};

use crate::load::{MemoryEstimate, OpenModel, Quantization, WeightOptions};

/// The memory that the model would take on the CPU.
#[must_use]
pub fn memory(model: &OpenModel) -> MemoryEstimate {
    let options = WeightOptions {
        device: Device::Cpu,
        dtype: DType::F32,
        quantization: Quantization::Q8_0,
    };
    model.memory(&options, 512)
}
