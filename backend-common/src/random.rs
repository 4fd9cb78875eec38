//! Numbers that look random and are the same in every run and with every version of a library: those of SplitMix64, any of which
//! can be computed without the ones before it. Where a sequence begins, and what is made of its numbers, is the caller's. For
//! secrets they are not.
//!
//! # Source
//! G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014.

/// How far two states are apart that follow each other: the n-th number is `mix(start + n * STEP)`, wrapping.
pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Mixes a number so that neighbours have nothing in common.
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
