//! Tensors in main memory as slices, for our own kernels.

use candle_core::{Result, Storage, Tensor};
use genset_kernels::{SharedMut, for_each_range_if_large};

/// Calls `f` with the numbers of a contiguous f32 tensor on the CPU.
///
/// # Errors
/// The tensor is on another device, of another type, or not contiguous.
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

/// Maps each row of a contiguous f32 matrix on the CPU with `f`, which gets the row's index, on several threads.
///
/// # Errors
/// As [`read`], or the tensor does not have two dimensions.
pub(crate) fn map_rows<T: Send>(
    matrix: &Tensor,
    f: impl Fn(usize, &[f32]) -> T + Sync,
) -> Result<Vec<T>> {
    let (rows, width) = matrix.dims2()?;
    let mut results: Vec<Option<T>> = std::iter::repeat_with(|| None).take(rows).collect();
    read(matrix, |numbers| {
        let results = SharedMut::new(&mut results);
        for_each_range_if_large(rows, rows * width / 16, |range| {
            for row in range {
                #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                // SAFETY: each row is in only one range.
                let result = unsafe { results.part(row..row + 1) };
                result[0] = Some(f(row, &numbers[row * width..(row + 1) * width]));
            }
        });
    })?;
    Ok(results.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn every_row_is_mapped_in_its_order() {
        let matrix = Tensor::arange(0f32, 300_000.0, &Device::Cpu).unwrap();
        let matrix = matrix.reshape((3, 100_000)).unwrap();
        let mapped = map_rows(&matrix, |row, numbers| (row, numbers[0], numbers.len())).unwrap();
        let want = [
            (0, 0.0, 100_000),
            (1, 100_000.0, 100_000),
            (2, 200_000.0, 100_000),
        ];
        assert_eq!(mapped, want);
    }

    #[test]
    fn what_is_no_matrix_of_f32_in_main_memory_is_refused() {
        let matrix = Tensor::arange(0f32, 6.0, &Device::Cpu).unwrap();
        assert!(map_rows(&matrix, |_, _| ()).is_err());
        let matrix = matrix.reshape((2, 3)).unwrap();
        assert!(map_rows(&matrix.t().unwrap(), |_, _| ()).is_err());
        let halves = matrix.to_dtype(candle_core::DType::F16).unwrap();
        assert!(map_rows(&halves, |_, _| ()).is_err());
    }
}
