//! Large vectors on huge pages, where the system has them.
//!
//! Every step reads all weights from end to end. On pages of 4 KiB the processor looks up an address for each of them, on a
//! virtual machine through two levels of tables.

use std::mem::MaybeUninit;

/// `len` times `value`, on huge pages if it is large.
pub(super) fn filled<T: Clone>(value: T, len: usize) -> Vec<T> {
    let mut numbers = Vec::with_capacity(len);
    ask_for(numbers.spare_capacity_mut());
    numbers.resize(len, value);
    numbers
}

/// Before the first write: pages that are there already stay as they are.
#[cfg(target_os = "linux")]
fn ask_for<T>(room: &mut [MaybeUninit<T>]) {
    use rustix::mm::{Advice, madvise};
    /// What the advice must be aligned to on the processors of our builds.
    const PAGE: usize = 64 << 10;
    /// Smaller vectors share huge pages with others, or would waste the rest of one.
    const WORTH_IT: usize = 4 << 20;
    let bytes = size_of_val(room);
    let start = room.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(PAGE);
    if bytes < WORTH_IT || skipped >= bytes {
        return;
    }
    let len = (bytes - skipped) / PAGE * PAGE;
    #[expect(unsafe_code, reason = "a system call that takes a range of addresses")]
    // SAFETY: the range is inside memory that we own, and the advice changes no content.
    let advised = unsafe { madvise(start.add(skipped).cast(), len, Advice::LinuxHugepage) };
    // A kernel without huge pages is no worse than before.
    if let Err(error) = advised {
        tracing::debug!(%error, "no huge pages for weights");
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for<T>(_room: &mut [MaybeUninit<T>]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_of_every_size_are_filled() {
        for len in [0, 1, 4 << 20, (4 << 20) + 1, 9 << 20] {
            let numbers = filled(7u8, len);
            assert_eq!(numbers.len(), len);
            assert!(numbers.iter().all(|&number| number == 7));
        }
    }
}
