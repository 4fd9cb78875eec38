//! How a GPU is opened: with one stream, and memory that is kept.

use candle_core::{Device, Result};

/// The GPU of this number. All that is queued on it, by any thread, is done in order.
///
/// # Errors
/// There is no such GPU or driver, or the build is without the feature `cuda`.
pub(crate) fn open(number: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(number)?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = &device {
        of_one_stream(gpu)?;
    }
    Ok(device)
}

/// Candle would record two events for each tensor, for streams that wait for each other, and the driver would give the memory of
/// tensors back whenever it has nothing to do, to ask for it again in the next step.
#[cfg(feature = "cuda")]
fn of_one_stream(gpu: &candle_core::CudaDevice) -> Result<()> {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};

    let stream = gpu.cuda_stream();
    let ordinal = i32::try_from(stream.context().ordinal()).map_err(candle_core::Error::wrap)?;
    let mut everything = u64::MAX;
    #[expect(unsafe_code, reason = "calls of the driver")]
    // SAFETY: tensors of this device are used on its one stream alone. The device is one that the driver gave, the pool is that
    // device's, and the attribute is a number of 64 bits, which the driver copies.
    unsafe {
        gpu.disable_event_tracking();
        let pool = result::device::get_default_mem_pool(result::device::get(ordinal).w()?).w()?;
        let keeps = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, keeps, (&raw mut everything).cast()).w()
    }
}
