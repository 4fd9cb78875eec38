//! [`ByteSize`]: a number of bytes as people write it. Parses the flags of engines and servers; it does not depend on clap.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written with or without a unit: `4GiB`, `512MiB`, `1000000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let find = |(name, bytes): &(&str, u64)| {
            text.strip_suffix(name)
                .map(|number| (number.trim(), *bytes))
        };
        let (number, unit) = UNITS.iter().find_map(find).unwrap_or((text, 1));
        let size = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit));
        let problem = || {
            format!("{text:?} is no size; write a whole number, or one with a unit such as 512MiB")
        };
        size.map(Self).ok_or_else(problem)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..3]
            .iter()
            .find(|(_, bytes)| self.0 > 0 && self.0.is_multiple_of(*bytes));
        match unit {
            Some((name, bytes)) => write!(f, "{}{name}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        let read = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        assert_eq!(read("1000"), Ok(1000));
        assert_eq!(read("0"), Ok(0));
        assert_eq!(read("8GiB"), Ok(8 << 30));
        assert_eq!(read(" 512 MiB"), Ok(512 << 20));
        assert_eq!(read("2GB"), Ok(2_000_000_000));
        for bad in ["", "GiB", "-1", "1.5GiB", "8Gib", "99999999999GiB"] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_size_is_shown_as_it_is_read() {
        for text in ["0", "3KiB", "512MiB", "1001"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
    }
}
