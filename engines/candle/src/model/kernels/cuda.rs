//! Kernels on an NVIDIA GPU.

use bytemuck::NoUninit;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{
    DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDType, DeviceId, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::Module;

/// The cached results of `are_for`, for each GPU and module.
static FOUND: Mutex<Vec<(DeviceId, Module, bool)>> = Mutex::new(Vec::new());

/// The module's PTX from the build script.
fn ptx(module: Module) -> &'static str {
    match module {
        Module::Bf16 => include_str!(concat!(env!("OUT_DIR"), "/genset_BF16.ptx")),
        Module::F16 => include_str!(concat!(env!("OUT_DIR"), "/genset_F16.ptx")),
        Module::F32 => include_str!(concat!(env!("OUT_DIR"), "/genset_F32.ptx")),
        Module::Logits => include_str!(concat!(env!("OUT_DIR"), "/genset_LOGITS.ptx")),
    }
}

/// The module's name in candle.
fn key(module: Module) -> String {
    format!("genset_{}", module.name())
}

/// Loads the module; returns whether that worked. A GPU or driver that is too old fails, which is logged.
pub(super) fn is_there(device: &CudaDevice, module: Module) -> bool {
    let known = |(id, of, _): &&(DeviceId, Module, bool)| *id == device.id() && *of == module;
    if let Some((.., is_there)) = FOUND.lock().iter().find(known) {
        return *is_there;
    }
    // Does not wait while the driver translates for another device.
    let any = if module == Module::Logits {
        "best"
    } else {
        "norm"
    };
    let any = format!("{any}_{}", module.name());
    let loaded = device.get_or_load_custom_func(&any, &key(module), ptx(module));
    if let Err(error) = &loaded {
        tracing::warn!(%error, ?module, "the kernels cannot be loaded on this GPU; plain operations do their work");
    }
    FOUND.lock().push((device.id(), module, loaded.is_ok()));
    loaded.is_ok()
}

/// The structure that the driver copies.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Copied<A>(A);

#[expect(unsafe_code, reason = "how the driver is told that it may copy a type")]
// SAFETY: all of its bytes are initialized, and `launch` requires the structure that the kernel expects.
unsafe impl<A: NoUninit> DeviceRepr for Copied<A> {}

/// Queues a kernel.
///
/// # Safety
/// As for [`Launch::on`](super::Launch::on).
#[expect(unsafe_code, reason = "kernels write through addresses")]
pub(super) unsafe fn launch<A: NoUninit>(
    device: &CudaDevice,
    name: &str,
    module: Module,
    [x, y, z]: [u32; 3],
    threads: u32,
    arguments: A,
) -> Result<()> {
    let function = device.get_or_load_custom_func(name, &key(module), ptx(module))?;
    let arguments = Copied(arguments);
    let mut call = function.builder();
    call.arg(&arguments);
    let config = LaunchConfig {
        grid_dim: (x, y, z),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { call.launch(config) }.w()?;
    Ok(())
}

/// The address of the numbers on the GPU.
pub(super) fn address(storage: &CudaStorage) -> Result<u64> {
    fn of<T: CudaDType>(storage: &CudaStorage) -> Result<u64> {
        let stream = storage.device.cuda_stream();
        // One stream runs everything in order, so there is nothing to wait for.
        Ok(storage.as_cuda_slice::<T>()?.device_ptr(&stream).0)
    }
    let dtype = storage.dtype();
    if dtype == DType::BF16 {
        of::<bf16>(storage)
    } else if dtype == DType::F16 {
        of::<f16>(storage)
    } else if dtype == DType::U32 {
        of::<u32>(storage)
    } else {
        of::<f32>(storage)
    }
}
