//! [`ActivationBits`]: how exactly the inputs of quantized products are kept.

use std::fmt;
use std::str::FromStr;

/// Bits of the numbers that quantized weights are multiplied with on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ActivationBits {
    /// One 8-bit integer a number, with a scale for 32 of them; two where one of these is far larger than most of its row, so that the
    /// others would hardly be told apart.
    #[default]
    Eight,
    /// Two of each: the second is what the first leaves. Products are then as those of floats are, and take twice the work.
    Sixteen,
}

impl ActivationBits {
    const ALL: [Self; 2] = [Self::Eight, Self::Sixteen];

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eight => "8",
            Self::Sixteen => "16",
        }
    }
}

impl FromStr for ActivationBits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|bits| bits.name() == text);
        found.ok_or_else(|| format!("{text:?} is neither 8 nor 16"))
    }
}

impl fmt::Display for ActivationBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
