//! [`Counting`]: the system allocator, with counters for the current thread. Tests run side by side, each on its own thread.

#![expect(
    unsafe_code,
    reason = "an allocator's functions are unsafe; these hand every call on as it came"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static ASKED_BYTES: Cell<u64> = const { Cell::new(0) };
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

pub(crate) struct Counting;

/// How often this thread has asked for memory: new blocks, and blocks to grow or shrink.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// The bytes that this thread has asked for, freed or not.
pub(crate) fn asked_bytes() -> u64 {
    ASKED_BYTES.get()
}

/// The bytes that this thread has asked for and not freed.
pub(crate) fn live_bytes() -> isize {
    LIVE_BYTES.get()
}

/// The highest value of [`live_bytes`] since [`reset_peak`].
pub(crate) fn peak_bytes() -> isize {
    PEAK_BYTES.get()
}

pub(crate) fn reset_peak() {
    PEAK_BYTES.set(live_bytes());
}

fn asked(layout: Layout) {
    // A thread that is ending has no counters.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    add_asked(layout.size());
    add_live(layout.size().cast_signed());
}

fn add_asked(bytes: usize) {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    let _ = ASKED_BYTES.try_with(|asked| asked.set(asked.get().saturating_add(bytes)));
}

fn add_live(bytes: isize) {
    let now = LIVE_BYTES.try_with(|live| {
        live.set(live.get() + bytes);
        live.get()
    });
    if let Ok(now) = now {
        let _ = PEAK_BYTES.try_with(|peak| peak.set(peak.get().max(now)));
    }
}

// SAFETY: every call goes unchanged to the system allocator; counting allocates nothing and cannot unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        asked(layout);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        asked(layout);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add_asked(layout.size());
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        add_asked(size);
        add_live(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller upholds the contract.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add_live(-layout.size().cast_signed());

        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(block, layout) }
    }
}
