//! Tensors in main memory as slices, for kernels of our own.

use candle_core::{Result, Storage, Tensor};

/// Calls `f` with the numbers of a contiguous f32 tensor on the CPU.
///
/// # Errors
/// The tensor is elsewhere, of another type or not contiguous.
pub(super) fn read<T>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("expected a contiguous tensor, got {layout:?}");
    };
    match &*storage {
        Storage::Cpu(storage) => Ok(f(&storage.as_slice::<f32>()?[start..end])),
        Storage::Cuda(_) | Storage::Metal(_) => candle_core::bail!("expected a tensor on the CPU"),
    }
}
