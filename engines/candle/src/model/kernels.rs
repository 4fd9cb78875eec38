//! Our own GPU kernels, `kernels/genset.cu`, and their calls.
//!
//! A kernel takes one structure of addresses and numbers, the same in C++ and here. `cuda` launches it on a GPU; `emulated`,
//! only for tests, runs the same source on the host. If the build has neither, or the device or type is not supported,
//! [`are_for`] returns `false` and callers use candle's operations.
//!
//! `attention::by_kernels` calls the attention kernels; this module calls the others.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(all(test, kernels_are_emulated))]
mod emulated;
mod products;

use bytemuck::NoUninit;
use candle_core::{DType, Device, Result, Storage, Tensor};

pub(super) use self::products::{can_multiply, gated_product, product};
use super::config::Activation;

/// Kernels that are compiled together; a process loads only those that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Module {
    /// For models that compute in bf16.
    Bf16,
    /// For models that compute in f16.
    F16,
    /// For models that compute in f32.
    F32,
    /// Operations on logits, which are always f32.
    Logits,
}

impl Module {
    /// The module for models that compute with such numbers.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        if dtype == DType::BF16 {
            Some(Self::Bf16)
        } else if dtype == DType::F16 {
            Some(Self::F16)
        } else if dtype == DType::F32 {
            Some(Self::F32)
        } else {
            None
        }
    }

    /// The suffix of its kernels' names.
    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Logits => "logits",
        }
    }
}

/// Whether there are kernels for such numbers on this device. The first call for a device loads them, which can take seconds
/// while the driver translates them.
pub(super) fn are_for(device: &Device, dtype: DType) -> bool {
    Module::of(dtype).is_some_and(|module| is_there(device, module))
}

/// Whether [`best`] supports logits on this device.
pub(crate) fn can_choose(device: &Device) -> bool {
    is_there(device, Module::Logits)
}

#[cfg_attr(
    not(feature = "cuda"),
    expect(unused_variables, reason = "what is emulated is there as a whole")
)]
fn is_there(device: &Device, module: Module) -> bool {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        return cuda::is_there(device, module);
    }
    #[cfg(all(test, kernels_are_emulated))]
    if device.is_cpu() {
        return emulated::is_wanted();
    }
    false
}

/// A kernel's call.
#[derive(Debug)]
pub(super) struct Launch<'a, A> {
    /// Its name without the module's suffix.
    pub(super) kernel: &'a str,
    pub(super) module: Module,
    /// Blocks.
    pub(super) grid: [usize; 3],
    /// Threads per block, as the kernel was compiled for.
    pub(super) threads: u32,
    /// One structure, which the kernel reads byte for byte.
    #[cfg_attr(
        not(any(feature = "cuda", all(test, kernels_are_emulated))),
        expect(dead_code, reason = "nothing is launched in this build")
    )]
    pub(super) arguments: A,
}

/// CUDA's limit for the second and third dimension of a grid.
const MOST_BLOCKS: usize = 65_535;

impl<A: NoUninit> Launch<'_, A> {
    /// Queues the kernel on the device. A grid without blocks queues nothing.
    ///
    /// # Safety
    /// The kernel was written for this structure of arguments. Its addresses are those of tensors of this device that live until
    /// this call returns and have the sizes that the kernel expects; nobody else reads the kernel's output before it is queued.
    ///
    /// # Errors
    /// There are no kernels for the device, it fails, or no GPU supports such a grid.
    #[expect(unsafe_code, reason = "kernels write through addresses")]
    pub(super) unsafe fn on(self, device: &Device) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let name = format!("{}_{}", self.kernel, self.module.name());
        let [_, second, third] = self.grid;
        if second.max(third) > MOST_BLOCKS {
            candle_core::bail!(
                "the kernel {name} was to have {:?} blocks; {MOST_BLOCKS} are the most in the second and the third dimension",
                self.grid
            );
        }
        let mut grid = [0u32; 3];
        for (to, from) in grid.iter_mut().zip(self.grid) {
            *to = u32::try_from(from).map_err(candle_core::Error::wrap)?;
        }
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            let Self {
                module,
                threads,
                arguments,
                ..
            } = self;
            // SAFETY: as required of this function's caller.
            return unsafe { cuda::launch(device, &name, module, grid, threads, arguments) };
        }
        #[cfg(all(test, kernels_are_emulated))]
        if device.is_cpu() {
            // SAFETY: as required of this function's caller.
            return unsafe { emulated::launch(&name, grid, &self.arguments) };
        }
        candle_core::bail!(
            "no kernel {name} of {} threads for {device:?}",
            self.threads
        )
    }
}

/// The address of a contiguous tensor's numbers, for a kernel.
///
/// # Errors
/// The tensor is not contiguous, or its device has no kernels.
pub(super) fn address(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, _)) = layout.contiguous_offsets() else {
        candle_core::bail!("expected a contiguous tensor, got {layout:?}");
    };
    let first = first_address(&storage)?;
    Ok(first + (start * tensor.dtype().size_in_bytes()) as u64)
}

fn first_address(storage: &Storage) -> Result<u64> {
    #[cfg(feature = "cuda")]
    if let Storage::Cuda(storage) = storage {
        return cuda::address(storage);
    }
    #[cfg(all(test, kernels_are_emulated))]
    if let Storage::Cpu(storage) = storage {
        return emulated::address(storage);
    }
    candle_core::bail!("no kernels for tensors on {:?}", storage.device())
}

/// A tensor for a kernel to write, with uninitialized content.
pub(super) fn to_write(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    #[expect(
        unsafe_code,
        reason = "what would be written here is written by the kernel"
    )]
    // SAFETY: any bits are valid numbers of these types, and callers pass the tensor to a kernel that writes all of it.
    unsafe {
        Tensor::empty(shape, dtype, device)
    }
}

/// The module for a tensor's numbers.
pub(super) fn module_of(tensor: &Tensor) -> Result<Module> {
    match Module::of(tensor.dtype()) {
        Some(module) => Ok(module),
        None => candle_core::bail!("no kernels for numbers of type {:?}", tensor.dtype()),
    }
}

/// Converts counts and offsets to the kernels' type.
pub(super) fn narrow(value: usize) -> Result<u32> {
    u32::try_from(value).map_err(candle_core::Error::wrap)
}

/// Threads of a block that handles one row; `ROW_THREADS` in `rows.cuh`.
const ROW_THREADS: u32 = 256;

/// As in `rows.cuh`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct NormArguments {
    sum: u64,
    normed: u64,
    x: u64,
    delta: u64,
    weight: u64,
    width: u32,
    eps: f32,
}

const _: () = assert!(size_of::<NormArguments>() == 48);

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
pub(super) fn norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    let normed = to_write(x.dims(), x.dtype(), x.device())?;
    launch_norm(x, None, weight, eps, &normed)?;
    Ok(normed)
}

/// `x + delta`, and that sum normalized.
pub(super) fn add_norm(
    x: &Tensor,
    delta: &Tensor,
    weight: &Tensor,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    if delta.shape() != x.shape() || delta.dtype() != x.dtype() {
        candle_core::bail!("cannot add {delta:?} to {x:?}");
    }
    let sum = to_write(x.dims(), x.dtype(), x.device())?;
    let normed = to_write(x.dims(), x.dtype(), x.device())?;
    launch_norm(x, Some((delta, &sum)), weight, eps, &normed)?;
    Ok((sum, normed))
}

fn launch_norm(
    x: &Tensor,
    delta_and_sum: Option<(&Tensor, &Tensor)>,
    weight: &Tensor,
    eps: f32,
    normed: &Tensor,
) -> Result<()> {
    let width = weight.elem_count();
    if x.dims().last() != Some(&width) || weight.dtype() != x.dtype() {
        candle_core::bail!("a norm with weights {weight:?} of {x:?}");
    }
    let (delta, sum) = match delta_and_sum {
        Some((delta, sum)) => (address(delta)?, address(sum)?),
        None => (0, 0),
    };
    let launch = Launch {
        kernel: "norm",
        module: module_of(x)?,
        grid: [x.elem_count() / width, 1, 1],
        threads: ROW_THREADS,
        arguments: NormArguments {
            sum,
            normed: address(normed)?,
            x: address(x)?,
            delta,
            weight: address(weight)?,
            width: narrow(width)?,
            eps,
        },
    };
    #[expect(unsafe_code, reason = "kernels write through addresses")]
    // SAFETY: the shapes were compared; `sum` and `normed` are new tensors of the shape of `x`.
    unsafe {
        launch.on(x.device())
    }
}

/// As in `rows.cuh`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct GateArguments {
    out: u64,
    gate_up: u64,
    width: u32,
    activation: u32,
    limit: f32,
    unused: u32,
}

const _: () = assert!(size_of::<GateArguments>() == 32);

/// The kernels' number of an activation, and its limit.
fn numbers_of(activation: Activation) -> (u32, f32) {
    match activation {
        Activation::Silu => (0, 0.0),
        Activation::GeluTanh => (1, 0.0),
        Activation::ClampedSwish { limit } => (2, limit),
    }
}

/// `activation(first half) * second half` of every row.
pub(super) fn gate(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let (rows, both) = gate_up.dims2()?;
    let width = both / 2;
    let out = to_write(&[rows, width], gate_up.dtype(), gate_up.device())?;
    let (number, limit) = numbers_of(activation);
    let launch = Launch {
        kernel: "gate",
        module: module_of(gate_up)?,
        grid: [rows, width.div_ceil(ROW_THREADS as usize), 1],
        threads: ROW_THREADS,
        arguments: GateArguments {
            out: address(&out)?,
            gate_up: address(gate_up)?,
            width: narrow(width)?,
            activation: number,
            limit,
            unused: 0,
        },
    };
    #[expect(unsafe_code, reason = "kernels write through addresses")]
    // SAFETY: `out` is new and has the size that the grid writes; `gate_up` has twice its columns.
    unsafe {
        launch.on(gate_up.device())?;
    }
    Ok(out)
}

/// As in `rows.cuh`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct BestArguments {
    out: u64,
    logits: u64,
    width: u32,
    unused: u32,
}

const _: () = assert!(size_of::<BestArguments>() == 24);

/// The index of each row's largest logit, the first among equal ones; `None` for a row with a logit that is NaN or plus
/// infinity, or whose logits are all minus infinity. `logits: [rows, vocab_size]` in f32.
///
/// # Errors
/// There are no kernels for the device, or it fails.
pub(crate) fn best(logits: &Tensor) -> Result<Vec<Option<u32>>> {
    let (rows, width) = logits.dims2()?;
    if logits.dtype() != DType::F32 {
        candle_core::bail!("logits are in f32, not {:?}", logits.dtype());
    }
    let out = to_write(&[rows], DType::U32, logits.device())?;
    let launch = Launch {
        kernel: "best",
        module: Module::Logits,
        grid: [rows, 1, 1],
        threads: ROW_THREADS,
        arguments: BestArguments {
            out: address(&out)?,
            logits: address(logits)?,
            width: narrow(width)?,
            unused: 0,
        },
    };
    #[expect(unsafe_code, reason = "kernels write through addresses")]
    // SAFETY: `out` is new and has one entry per row.
    unsafe {
        launch.on(logits.device())?;
    }
    let places = out.to_vec1::<u32>()?;
    Ok(places
        .into_iter()
        .map(|place| (place != u32::MAX).then_some(place))
        .collect())
}

/// The device for tests of kernels: the GPU that `GENSET_TEST_DEVICE` names, else the CPU, emulated on this thread from now on.
#[cfg(test)]
#[cfg(any(feature = "cuda", kernels_are_emulated))]
pub(crate) fn test_device() -> Device {
    match std::env::var("GENSET_TEST_DEVICE").as_deref() {
        #[cfg(kernels_are_emulated)]
        Ok("cpu") | Err(_) => {
            emulated::want();
            Device::Cpu
        }
        Ok(name) => {
            let number = name.strip_prefix("cuda:").unwrap().parse().unwrap();
            super::gpu::open(number).unwrap()
        }
        #[cfg(not(kernels_are_emulated))]
        Err(_) => panic!(
            "GENSET_TEST_DEVICE names no GPU, such as cuda:0; `cargo xtask gpu-test` sets it"
        ),
    }
}

#[cfg(test)]
#[cfg(any(feature = "cuda", kernels_are_emulated))]
mod tests;
