//! [`Counting`], which counts the memory of all threads of the process, and its peak.

#[path = "../counted/allocator.rs"]
mod allocator;

use std::sync::atomic::{AtomicIsize, Ordering};

pub(crate) use allocator::Counting;

static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);
static PEAK_BYTES: AtomicIsize = AtomicIsize::new(0);

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

fn resized(from: usize, to: usize) {
    let bytes = to.cast_signed() - from.cast_signed();
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK_BYTES.fetch_max(live, Ordering::SeqCst);
}
