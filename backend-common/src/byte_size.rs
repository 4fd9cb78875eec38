//! [`ByteSize`]: a number of bytes as people write it. Parses the flags of engines and servers; it does not depend on clap.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written with or without a unit: `4GiB`, `0.5GiB`, `512MiB`, `1000000`. `8G` is `8GiB`, as other engines
/// read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// The first four are shown.
const UNITS: [(&str, u64); 13] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1000),
    ("B", 1),
    ("T", 1 << 40),
    ("G", 1 << 30),
    ("M", 1 << 20),
    ("K", 1 << 10),
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
        let problem = || {
            format!(
                "{text:?} is no size; write a whole number, or one with a unit such as 512MiB or 8G"
            )
        };
        times(number, unit).map(Self).ok_or_else(problem)
    }
}

/// `number` units in whole bytes; `None` if it is none, or too large.
fn times(number: &str, unit: u64) -> Option<u64> {
    let Some((whole, part)) = number.split_once('.') else {
        return number.parse::<u64>().ok()?.checked_mul(unit);
    };
    if unit == 1 || part.is_empty() || !part.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let parts = 10u64.checked_pow(u32::try_from(part.len()).ok()?)?;
    let part = u128::from(part.parse::<u64>().ok()?) * u128::from(unit) / u128::from(parts);
    let whole = whole.parse::<u64>().ok()?.checked_mul(unit)?;
    whole.checked_add(u64::try_from(part).ok()?)
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..4]
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
        assert_eq!(read("512M"), Ok(512 << 20));
        assert_eq!(read("8G"), read("8GiB"));
        assert_eq!(read("1 T"), read("1TiB"));
        assert_eq!(read("0.5GiB"), Ok(512 << 20));
        assert_eq!(read("1.0001K"), Ok(1024));
        let bad = ["", "GiB", "-1", "8Gib", "99999999999GiB"];
        for bad in bad.into_iter().chain(["1.5", "1.G", ".5G", "1.+5G"]) {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_size_is_shown_as_it_is_read() {
        for text in ["0", "3KiB", "512MiB", "1001", "2TiB"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
    }
}
