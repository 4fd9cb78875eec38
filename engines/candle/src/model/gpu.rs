//! GPUs: how they are opened, with one stream and memory that is kept, and how threads keep out of each other's way there.
//!
//! While a step is recorded ([`graphs`](super::graphs)), whatever another thread queues on the same stream would be recorded too, and
//! what waits for the whole GPU fails. So a recording has the GPUs for itself, and who works on one beside the thread of its engine
//! says so with [`beside_recordings`].

/// The GPU of this number. All that is queued on the device, by any thread, is done in order.
///
/// # Errors
/// There is no such GPU or driver, or the build is without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn open(number: usize) -> candle_core::Result<candle_core::Device> {
    candle_core::Device::new_cuda_with_stream(number)
}

/// Does what touches a GPU on another thread than that of its engine, while no step is recorded.
#[cfg(not(feature = "cuda"))]
pub(crate) fn beside_recordings<T>(work: impl FnOnce() -> T) -> T {
    work()
}

#[cfg(feature = "cuda")]
pub(crate) use with_cuda::{Recordings, beside_recordings, open, try_recording};

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::sync::Arc;

    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    use candle_core::{CudaDevice, Device, Error, Result};
    use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

    static RECORDING: RwLock<()> = RwLock::new(());

    /// Held while a step is recorded.
    pub(crate) type Recordings = RwLockWriteGuard<'static, ()>;

    /// `None` while anybody else works on a GPU.
    pub(crate) fn try_recording() -> Option<Recordings> {
        RECORDING.try_write()
    }

    /// Does what touches a GPU on another thread than that of its engine, while no step is recorded.
    pub(crate) fn beside_recordings<T>(work: impl FnOnce() -> T) -> T {
        let _held = RECORDING.read();
        work()
    }

    /// Devices of this process. They are never closed, for that waits for the whole GPU, but used again.
    static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

    struct Opened {
        number: usize,
        device: CudaDevice,
        /// Owners of its cuBLAS handle while no engine uses it.
        owners: usize,
    }

    impl Opened {
        /// Whether every tensor of it is gone.
        fn is_free(&self) -> bool {
            owners(&self.device) == self.owners
        }
    }

    /// The device and every tensor of it have the handle; what candle keeps for recordings, a few numbers for each thread, has not.
    fn owners(device: &CudaDevice) -> usize {
        Arc::strong_count(&device.cublas_handle())
    }

    /// The GPU of this number. All that is queued on the device, by any thread, is done in order.
    ///
    /// # Errors
    /// There is no such GPU or driver.
    pub(crate) fn open(number: usize) -> Result<Device> {
        let mut opened = OPENED.lock();
        beside_recordings(|| {
            let is_usable = |it: &&Opened| it.number == number && it.is_free();
            if let Some(free) = opened.iter().find(is_usable) {
                // What its last user left undone, and what went wrong there, is nobody's business any more.
                let stream = free.device.cuda_stream();
                let _ = stream.context().check_err();
                stream.synchronize().w()?;
                give_back_memory(number)?;
                return Ok(Device::Cuda(free.device.clone()));
            }
            let device = new(number)?;
            opened.push(Opened {
                number,
                owners: owners(&device),
                device: device.clone(),
            });
            Ok(Device::Cuda(device))
        })
    }

    /// Candle would record two events for each tensor, for streams that wait for each other, and the driver would give the memory
    /// of tensors back whenever it has nothing to do, to ask for it again in the next step.
    fn new(number: usize) -> Result<CudaDevice> {
        let device = CudaDevice::new_with_stream(number)?;
        let mut everything = u64::MAX;
        let pool = memory_pool(number)?;
        let keeps = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        #[expect(unsafe_code, reason = "calls of the driver")]
        // SAFETY: tensors of this device are used on its one stream alone. The attribute is a number of 64 bits, which the driver
        // copies.
        unsafe {
            device.disable_event_tracking();
            result::mem_pool::set_attribute(pool, keeps, (&raw mut everything).cast()).w()?;
        }
        Ok(device)
    }

    /// Gives back what no tensor has, so that the next engine finds it.
    fn give_back_memory(number: usize) -> Result<()> {
        let pool = memory_pool(number)?;
        #[expect(unsafe_code, reason = "a call of the driver")]
        // SAFETY: the pool is the driver's own.
        unsafe {
            result::mem_pool::trim_to(pool, 0).w()
        }
    }

    fn memory_pool(number: usize) -> Result<sys::CUmemoryPool> {
        let ordinal = i32::try_from(number).map_err(Error::wrap)?;
        let device = result::device::get(ordinal).w()?;
        #[expect(unsafe_code, reason = "a call of the driver")]
        // SAFETY: the device is one that the driver gave.
        unsafe {
            result::device::get_default_mem_pool(device).w()
        }
    }
}
