//! GPUs: opens them with one stream and a memory pool that is kept, and synchronizes threads with recordings.
//!
//! While a step is recorded ([`graphs`](super::graphs)), work of other threads on the same stream would be recorded too, and
//! calls that wait for the whole GPU fail. So a recording needs exclusive access to the GPUs, and any thread other than an
//! engine's own uses [`beside_recordings`] for its work.

/// Opens the GPU of this number. All work on the device, of any thread, runs in order.
///
/// # Errors
/// There is no such GPU or driver, or the build lacks the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn open(number: usize) -> candle_core::Result<candle_core::Device> {
    candle_core::Device::new_cuda_with_stream(number)
}

/// Runs `work`, which uses a GPU outside its engine's thread, while no step is recorded.
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

    /// `None` while another thread uses a GPU.
    pub(crate) fn try_recording() -> Option<Recordings> {
        RECORDING.try_write()
    }

    /// Runs `work`, which uses a GPU outside its engine's thread, while no step is recorded.
    pub(crate) fn beside_recordings<T>(work: impl FnOnce() -> T) -> T {
        let _held = RECORDING.read();
        work()
    }

    /// The devices of this process. They are reused and never closed, because closing waits for the whole GPU.
    static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

    struct Opened {
        number: usize,
        device: CudaDevice,
        /// Owners of its cuBLAS handle while no engine uses it.
        owners: usize,
    }

    impl Opened {
        /// Whether all of its tensors are dropped.
        fn is_free(&self) -> bool {
            owners(&self.device) == self.owners
        }
    }

    /// The device and each of its tensors own the handle. Candle's small state for recordings, per thread, does not.
    fn owners(device: &CudaDevice) -> usize {
        Arc::strong_count(&device.cublas_handle())
    }

    /// Opens the GPU of this number. All work on the device, of any thread, runs in order.
    ///
    /// # Errors
    /// There is no such GPU or driver.
    pub(crate) fn open(number: usize) -> Result<Device> {
        let mut opened = OPENED.lock();
        beside_recordings(|| {
            let is_usable = |it: &&Opened| it.number == number && it.is_free();
            if let Some(free) = opened.iter().find(is_usable) {
                // Waits for the last user's unfinished work, and ignores its errors.
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

    /// Disables two defaults: candle would record two events per tensor, to synchronize streams; and the driver would free unused
    /// memory whenever it is idle, only to allocate it again in the next step.
    fn new(number: usize) -> Result<CudaDevice> {
        let device = CudaDevice::new_with_stream(number)?;
        let mut everything = u64::MAX;
        let pool = memory_pool(number)?;
        let keeps = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        #[expect(unsafe_code, reason = "calls of the driver")]
        // SAFETY: tensors of this device are used only on its one stream. The attribute is a 64-bit number, which the driver
        // copies.
        unsafe {
            device.disable_event_tracking();
            result::mem_pool::set_attribute(pool, keeps, (&raw mut everything).cast()).w()?;
        }
        Ok(device)
    }

    /// Releases unused memory, so that the next engine finds it free.
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
        // SAFETY: the driver returned the device.
        unsafe {
            result::device::get_default_mem_pool(device).w()
        }
    }
}
