//! [`Counting`]: the system allocator. It calls `resized` of the module above with the sizes of every block before and after a
//! call, in bytes; a block that is not there has 0.

#![expect(
    unsafe_code,
    reason = "an allocator's functions are unsafe; these hand every call on as it came"
)]

use std::alloc::{GlobalAlloc, Layout, System};

use super::resized;

pub(crate) struct Counting;

// SAFETY: every call goes unchanged to the system allocator; `resized` allocates nothing and cannot unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        resized(0, layout.size());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        resized(0, layout.size());
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        resized(layout.size(), size);
        // SAFETY: the caller upholds the contract.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        resized(layout.size(), 0);
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(block, layout) }
    }
}
