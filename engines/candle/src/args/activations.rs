//! [`ActivationBits`]: the precision of the inputs of quantized products.

genset_backend_common::named! {
    /// Bits of the numbers that quantized weights are multiplied with on the CPU.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ActivationBits: FromStr {
        /// One 8-bit integer a number, with a scale for 32 of them; two where one of these is far larger than most of its row, so that the
        /// others would hardly be told apart.
        #[default]
        Eight = "8",
        /// Two of each: the second is what the first leaves. Products are then as those of floats are, and take twice the work.
        Sixteen = "16",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_read_as_they_are_shown() {
        for bits in ActivationBits::ALL {
            assert_eq!(bits.to_string().parse(), Ok(bits));
        }
        assert!("4".parse::<ActivationBits>().is_err());
    }
}
