//! [`Counting`], with counters for the current thread. Tests run side by side, each on its own thread.

#[path = "../counted/allocator.rs"]
mod allocator;

use std::cell::Cell;

pub(crate) use allocator::Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static ASKED_BYTES: Cell<u64> = const { Cell::new(0) };
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<isize> = const { Cell::new(0) };
}

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

fn resized(from: usize, to: usize) {
    // A thread that is ending has no counters.
    if to > 0 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        add_asked(from);
        add_asked(to);
    }
    add_live(to.cast_signed() - from.cast_signed());
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
