//! [`Counting`]: the system allocator, which counts the memory of all threads of the process, and its peak.

#![expect(
    unsafe_code,
    reason = "an allocator's functions are unsafe; these hand every call on as it came"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);
static PEAK_BYTES: AtomicIsize = AtomicIsize::new(0);

pub(crate) struct Counting;

/// Resets the peak. Returns the current bytes.
pub(crate) fn begin() -> isize {
    let live = LIVE_BYTES.load(Ordering::SeqCst);
    PEAK_BYTES.store(live, Ordering::SeqCst);
    live
}

/// The highest number of bytes since [`begin`].
pub(crate) fn peak() -> isize {
    PEAK_BYTES.load(Ordering::SeqCst)
}

fn add(bytes: isize) {
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK_BYTES.fetch_max(live, Ordering::SeqCst);
}

// SAFETY: every call goes unchanged to the system allocator; counting allocates nothing and cannot unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size().cast_signed());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size().cast_signed());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller upholds the contract.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add(-layout.size().cast_signed());
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(block, layout) }
    }
}
