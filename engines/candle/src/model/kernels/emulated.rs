//! The kernels' own source, compiled for the host: `kernels/emulation/`. Only for tests, and slow. Each thread chooses between
//! them and the engine's normal operations.

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::from_ref;

use bytemuck::NoUninit;
use candle_core::{CpuStorage, Result};

#[expect(unsafe_code, reason = "C++")]
unsafe extern "C" {
    fn genset_emulate(name: *const c_char, grid: *const u32, arguments: *const c_void) -> c_int;
}

thread_local! {
    static IS_WANTED: Cell<bool> = const { Cell::new(false) };
}

/// From now on, kernels compute on tensors in main memory on this thread.
pub(super) fn want() {
    IS_WANTED.set(true);
}

/// Whether this thread uses kernels.
pub(super) fn is_wanted() -> bool {
    IS_WANTED.get()
}

/// Runs a kernel to its end.
///
/// # Safety
/// As for [`Launch::on`](super::Launch::on).
#[expect(unsafe_code, reason = "kernels write through addresses")]
pub(super) unsafe fn launch<A: NoUninit>(name: &str, grid: [u32; 3], arguments: &A) -> Result<()> {
    let name_in_c = CString::new(name).map_err(candle_core::Error::wrap)?;
    // SAFETY: the caller's promise for the arguments; the name ends with a zero, and the grid has three numbers.
    let code = unsafe {
        genset_emulate(
            name_in_c.as_ptr(),
            grid.as_ptr(),
            from_ref(arguments).cast(),
        )
    };
    match code {
        0 => Ok(()),
        1 => candle_core::bail!("there is no kernel {name}"),
        _ => candle_core::bail!(
            "threads of the kernel {name} wait for each other at different places"
        ),
    }
}

/// The address of the numbers. It comes from the vectors themselves, not from a slice, whose pointer would be read-only.
pub(super) fn address(storage: &CpuStorage) -> Result<u64> {
    let address = if let CpuStorage::BF16(numbers) = storage {
        numbers.as_ptr().expose_provenance()
    } else if let CpuStorage::F16(numbers) = storage {
        numbers.as_ptr().expose_provenance()
    } else if let CpuStorage::F32(numbers) = storage {
        numbers.as_ptr().expose_provenance()
    } else if let CpuStorage::U32(numbers) = storage {
        numbers.as_ptr().expose_provenance()
    } else {
        candle_core::bail!("no kernels for numbers of this type")
    };
    Ok(address as u64)
}
