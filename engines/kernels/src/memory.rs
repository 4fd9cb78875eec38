//! Memory for weights and the KV cache, on huge pages if the system has them.
//!
//! Every step reads all weights from end to end. With 4 KiB pages the processor translates an address for each page, in a
//! virtual machine through two levels of tables, which halves the rate of reads. Most matrices are smaller than a huge page
//! or end inside one, so they are placed side by side in a few large maps.

#![expect(
    unsafe_code,
    reason = "disjoint parts of one map, filled one after the other and then only read"
)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::slice;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use memmap2::{MmapMut, MmapOptions, MmapRaw};

/// The alignment of huge pages on the supported processors; also the largest alignment of `T`.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of a map of weights, unless one matrix needs more. Unwritten memory takes no pages.
const MAP_BYTES: usize = 64 << 20;

/// Allocates memory for the weights of one model.
#[derive(Debug, Default)]
pub struct WeightMemory {
    /// The current map, and the bytes of it that are taken.
    open: Option<(Arc<MmapRaw>, usize)>,
}

impl WeightMemory {
    /// Allocates `len` zeroed numbers and lets `fill` write them.
    ///
    /// # Errors
    /// The system is out of memory.
    pub(super) fn store<T: Zeroable + Copy>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [T]),
    ) -> io::Result<Stored<T>> {
        const { assert!(align_of::<T>() <= HUGE_PAGE && size_of::<T>() > 0) };
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let (map, start) = self.take(bytes, align_of::<T>())?;
        // SAFETY: inside the map and aligned, as `take` promises; never handed out before, so nobody else has a reference;
        // a fresh map is zero, which is a value of `T`.
        let numbers = unsafe {
            let first = map.as_mut_ptr().add(start).cast::<T>();
            slice::from_raw_parts_mut(first, len)
        };
        fill(numbers);
        Ok(Stored {
            map,
            start,
            len,
            numbers: PhantomData,
        })
    }

    /// Takes `bytes` in a map at an address that is a multiple of `align`; returns the map and the offset.
    fn take(&mut self, bytes: usize, align: usize) -> io::Result<(Arc<MmapRaw>, usize)> {
        if let Some((map, used)) = &mut self.open {
            let start = aligned(map, *used, align);
            if map
                .len()
                .checked_sub(start)
                .is_some_and(|free| free >= bytes)
            {
                *used = start + bytes;
                return Ok((Arc::clone(map), start));
            }
        }
        let map = Arc::new(MmapRaw::from(map_of(bytes.max(MAP_BYTES))?));
        let start = aligned(&map, 0, HUGE_PAGE);
        self.open = Some((Arc::clone(&map), start + bytes));
        Ok((map, start))
    }
}

/// The first offset at or after `from` in `map` whose address is a multiple of `align`.
fn aligned(map: &MmapRaw, from: usize, align: usize) -> usize {
    next_aligned(map.as_ptr(), from, align)
}

/// As [`aligned`], for a map that begins at `map`.
fn next_aligned(map: *const u8, from: usize, align: usize) -> usize {
    let address = map.addr();
    (address + from).next_multiple_of(align) - address
}

/// A map with room for `bytes` after its first huge-page boundary.
fn map_of(bytes: usize) -> io::Result<MmapMut> {
    let len = bytes
        .checked_next_multiple_of(HUGE_PAGE)
        .and_then(|len| len.checked_add(HUGE_PAGE))
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let map = MmapOptions::new().len(len).map_anon()?;
    #[cfg(target_os = "linux")]
    if let Err(error) = map.advise(memmap2::Advice::HugePage) {
        // A kernel without huge pages is correct, but slower.
        tracing::debug!(%error, "no huge pages");
    }
    Ok(map)
}

/// Immutable weights.
pub(super) struct Stored<T> {
    map: Arc<MmapRaw>,
    start: usize,
    len: usize,
    numbers: PhantomData<T>,
}

impl<T> Deref for Stored<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `WeightMemory::store` wrote values of `T` at this place, which only this value owns.
        unsafe { slice::from_raw_parts(self.map.as_ptr().add(self.start).cast(), self.len) }
    }
}

impl<T> fmt::Debug for Stored<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stored")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Numbers in their own map, initially zero. Unwritten memory takes no pages.
pub(super) struct Numbers<T> {
    map: MmapMut,
    bytes: Range<usize>,
    numbers: PhantomData<T>,
}

impl<T: Pod> Numbers<T> {
    /// Allocates `len` numbers.
    ///
    /// # Errors
    /// The system is out of memory.
    pub(super) fn zeroed(len: usize) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= HUGE_PAGE) };
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let map = map_of(bytes)?;
        let start = next_aligned(map.as_ptr(), 0, HUGE_PAGE);
        Ok(Self {
            map,
            bytes: start..start + bytes,
            numbers: PhantomData,
        })
    }
}

impl<T: Pod> Deref for Numbers<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.map[self.bytes.clone()])
    }
}

impl<T: Pod> DerefMut for Numbers<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.map[self.bytes.clone()])
    }
}

impl<T> fmt::Debug for Numbers<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbers")
            .field("bytes", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zero_at_first_and_keep_what_they_are_given() {
        let mut memory = WeightMemory::default();
        let bytes = memory.store(5, |bytes: &mut [u8]| bytes.fill(7)).unwrap();
        // The second of the large ones needs its own map.
        let sizes = [1, 1000, MAP_BYTES / 16, MAP_BYTES / 16, 3];
        let words = sizes.map(|len| {
            memory
                .store(len, |words: &mut [usize]| {
                    assert!(words.iter().all(|&word| word == 0));
                    words.fill(len);
                })
                .unwrap()
        });
        assert_eq!(*bytes, [7; 5]);
        for (len, words) in sizes.into_iter().zip(&words) {
            assert_eq!(words.len(), len);
            assert!(words.iter().all(|&word| word == len));
        }
    }

    #[test]
    fn parts_are_aligned_and_small_ones_share_a_map() {
        #[derive(Clone, Copy, Zeroable)]
        #[repr(C, align(64))]
        struct Line([u8; 64]);

        let mut memory = WeightMemory::default();
        let odd = memory.store(3, |_: &mut [u8]| ()).unwrap();
        let lines = memory
            .store(2, |lines: &mut [Line]| lines[1].0[63] = 1)
            .unwrap();
        assert!(lines.as_ptr().addr().is_multiple_of(64));
        assert_eq!(lines[1].0[63], 1);
        assert!(Arc::ptr_eq(&odd.map, &lines.map));
    }

    #[test]
    fn parts_outlive_what_handed_them_out() {
        let mut memory = WeightMemory::default();
        let none = memory.store(0, |_: &mut [f32]| ()).unwrap();
        let one = memory.store(1, |one: &mut [f32]| one[0] = 0.5).unwrap();
        drop(memory);
        assert!(none.is_empty());
        assert_eq!(*one, [0.5]);
    }

    #[test]
    fn numbers_are_zero_at_first_and_keep_what_they_are_given() {
        let mut numbers = Numbers::<f32>::zeroed(70_000).unwrap();
        assert_eq!(numbers.len(), 70_000);
        assert!(numbers.iter().all(|&number| number == 0.0));
        numbers[69_999] = 2.5;
        assert_eq!(numbers[69_999], 2.5);
        assert!(Numbers::<f32>::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn more_than_there_are_addresses_is_an_error() {
        let mut memory = WeightMemory::default();
        for len in [usize::MAX / 4, usize::MAX / 8 - 1] {
            let refused = memory.store(len, |_: &mut [u64]| ());
            assert_eq!(
                refused.map(|_| ()).unwrap_err().kind(),
                io::ErrorKind::OutOfMemory,
                "{len}"
            );
            let refused = Numbers::<u64>::zeroed(len).map(|_| ());
            assert_eq!(
                refused.unwrap_err().kind(),
                io::ErrorKind::OutOfMemory,
                "{len}"
            );
        }
    }
}
