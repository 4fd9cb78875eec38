//! [`MemoryProbe`]: numbers that all threads read from end to end, to find out how fast they read memory. No step of a model uses
//! it, only measurements.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::memory::Numbers;
use crate::parallel::for_each_range_if_large;
use crate::simd::by_simd;

/// Numbers that are read one after the other, by as many threads as compute.
#[derive(Debug)]
pub struct MemoryProbe(Numbers<u64>);

impl MemoryProbe {
    /// Allocates so many bytes, rounded down to whole numbers, and writes them: all unwritten memory would be one page of zeros.
    ///
    /// # Errors
    /// The system is out of memory.
    pub fn try_new(bytes: usize) -> io::Result<Self> {
        let mut numbers = Numbers::<u64>::zeroed(bytes / size_of::<u64>())?;
        let parts = numbers.par_chunks_mut(1 << 16);
        parts.for_each(|part| part.fill(1));
        Ok(Self(numbers))
    }

    /// Reads all numbers, and adds them up, so that no compiler leaves out a read: returns how many there are.
    #[must_use]
    pub fn read(&self) -> u64 {
        let total = AtomicU64::new(0);
        for_each_range_if_large(self.0.len(), self.0.len(), |range| {
            let mut sum = 0;
            add_up(&self.0[range], &mut sum);
            total.fetch_add(sum, Ordering::Relaxed);
        });
        total.into_inner()
    }
}

by_simd! {
    /// Adds `numbers` to `sum`.
    fn add_up(numbers: &[u64], sum: &mut u64) = add_up_inner
}

#[inline(always)]
fn add_up_inner<const FMA: bool>(numbers: &[u64], sum: &mut u64) {
    // Several registers, so that no addition waits for the one before.
    let mut lanes = [0u64; 32];
    let (chunks, rest) = numbers.as_chunks::<32>();
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*number);
        }
    }
    *sum += lanes.iter().chain(rest).sum::<u64>();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_once() {
        for numbers in [0usize, 1, 100_000] {
            let probe = MemoryProbe::try_new(numbers * 8 + 7).unwrap();
            assert_eq!(usize::try_from(probe.read()), Ok(numbers));
        }
    }
}
