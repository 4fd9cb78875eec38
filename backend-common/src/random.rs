//! Reproducible pseudorandom numbers, the same in every run and with every library version: SplitMix64, whose n-th number needs
//! none of the earlier ones. The caller chooses the start and the use of the numbers. Not for secrets.
//!
//! # Source
//! G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014.

/// The distance between consecutive states: the n-th number is `mix(start + n * STEP)`, wrapping.
pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Mixes a number so that neighbours become unrelated.
#[inline]
#[must_use]
pub fn mix(mut number: u64) -> u64 {
    number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_reference() {
        let numbers = [1, 2, 3].map(|place| mix(STEP.wrapping_mul(place)));
        let expected = [
            0xE220_A839_7B1D_CDAF,
            0x6E78_9E6A_A1B9_65F4,
            0x06C4_5D18_8009_454F,
        ];
        assert_eq!(numbers, expected);
    }
}
