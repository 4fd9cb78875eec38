//! One parallel loop on the CPU, and the threads that run it.
//!
//! Regions are short (tens of microseconds) and many, so threads spin between them, and sleep only after some time without
//! work. A region does not wait for threads that have not joined it: beside other programs that would take milliseconds, and a
//! token has hundreds of regions. The number of threads, including the caller, is that of rayon's global pool when the first
//! region runs, so one setting bounds both. On a processor without kernels for quantized weights another library computes their
//! products, with threads that spin too. There rayon's threads, which sleep, run our regions: two spinning pools would compete for
//! the processors.

mod pool;

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use self::pool::Pool;
use crate::simd::quantized_kernels;

/// Our threads; `None` if rayon's are used.
fn pool() -> Option<&'static Pool> {
    static POOL: OnceLock<Option<Pool>> = OnceLock::new();
    let start = || Pool::new(rayon::current_num_threads().saturating_sub(1));
    POOL.get_or_init(|| quantized_kernels().map(|_| start()))
        .as_ref()
}

/// The number of threads of [`for_each_range_if_large`].
#[must_use]
pub fn num_threads() -> usize {
    pool().map_or_else(rayon::current_num_threads, |pool| pool.num_workers() + 1)
}

/// Calls `work` with ranges that together are `0..items` and do not overlap: on all threads, or only on this one if waking others
/// would cost more than the `operations`.
///
/// # Panics
/// `work` panics on any thread.
pub fn for_each_range_if_large(
    items: usize,
    operations: usize,
    work: impl Fn(Range<usize>) + Sync,
) {
    /// Vector operations that take about as long as starting and ending a region.
    const WORTH_SHARING: usize = 16 * 1024;
    /// Ranges per thread, so that no thread waits long for the slowest.
    const RANGES: usize = 8;
    if items == 0 {
        return;
    }
    if items == 1 || operations < WORTH_SHARING || num_threads() == 1 {
        return work(0..items);
    }
    let len = items.div_ceil(num_threads() * RANGES);
    let Some(pool) = pool() else {
        let starts = (0..items).into_par_iter().step_by(len);
        return starts.for_each(|start| work(start..(start + len).min(items)));
    };
    let next = AtomicUsize::new(0);
    pool.run(&|| {
        loop {
            let start = next.fetch_add(len, Ordering::Relaxed);
            if start >= items {
                break;
            }
            work(start..(start + len).min(items));
        }
    });
}

/// Allocates `len` numbers that `fill` writes. They are not zeroed first: with many rows, zeroing is a large part of the time of
/// a small operation.
///
/// # Safety
/// `fill` must write every number.
#[expect(unsafe_code, reason = "numbers that are written once")]
pub(super) unsafe fn written<T: Copy>(
    len: usize,
    fill: impl FnOnce(&SharedMut<'_, MaybeUninit<T>>),
) -> Vec<T> {
    let mut numbers = Vec::with_capacity(len);
    fill(&SharedMut::new(&mut numbers.spare_capacity_mut()[..len]));
    // SAFETY: the capacity is `len`, and the caller promised that all are written.
    unsafe { numbers.set_len(len) };
    numbers
}

/// A mutable slice whose disjoint parts are written by several threads.
#[derive(Debug)]
pub struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

#[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
mod shared {
    use super::{PhantomData, Range, SharedMut};

    // SAFETY: only `part` gives access, and its callers promise that parts do not overlap.
    unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
    // SAFETY: as above.
    unsafe impl<T: Send> Send for SharedMut<'_, T> {}

    impl<'a, T> SharedMut<'a, T> {
        /// Shares a slice for as long as it is borrowed.
        #[must_use]
        pub fn new(slice: &'a mut [T]) -> Self {
            Self {
                start: slice.as_mut_ptr(),
                len: slice.len(),
                slice: PhantomData,
            }
        }

        /// Part of the slice.
        ///
        /// # Safety
        /// No two parts that exist at the same time may overlap.
        ///
        /// # Panics
        /// `range` is outside the slice.
        #[expect(
            clippy::mut_from_ref,
            reason = "that is what this type is for; the caller keeps parts apart"
        )]
        pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
            assert!(
                range.start <= range.end && range.end <= self.len,
                "part outside the slice"
            );
            // SAFETY: inside the slice by the line above, unaliased by the caller's promise.
            unsafe {
                std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start)
            }
        }
    }
}
