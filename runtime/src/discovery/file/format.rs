//! The bytes of a lease file.
//!
//! Three parts: a fixed-width line with the format and the file's version; a line of JSON that lists the entries in
//! key order; their values, concatenated. The version counts the writes, so that a reader that already has
//! the version can stop there.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

const MAGIC: &str = "genset-lease 1 ";

/// Digits of the largest version.
const VERSION_DIGITS: usize = 20;

/// Bytes of the first line: enough to tell whether the reader already knows the rest.
pub(super) const HEAD_BYTES: usize = MAGIC.len() + VERSION_DIGITS + 1;

/// A value under a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) value: Bytes,
    /// Orders the puts of one key by several leases: the larger is later.
    pub(super) stamp: u64,
}

/// All of a lease's values, by key.
pub(super) type Entries = BTreeMap<String, Held>;

#[derive(Serialize, Deserialize)]
struct Listed {
    key: String,
    stamp: u64,
    length: usize,
}

/// Why a lease file cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormatError {
    #[error("it does not begin as a lease of this version of the store")]
    Head,
    #[error("its list of entries has no end")]
    Cut,
    #[error("its list of entries cannot be read")]
    List(#[source] serde_json::Error),
    #[error("its values are {found} bytes long, not the {listed} that are listed")]
    Length { found: usize, listed: usize },
}

/// Encodes the whole file.
pub(super) fn encode(version: u64, entries: &Entries) -> Result<Vec<u8>, serde_json::Error> {
    let list: Vec<Listed> = entries
        .iter()
        .map(|(key, held)| Listed {
            key: key.clone(),
            stamp: held.stamp,
            length: held.value.len(),
        })
        .collect();
    let mut file = format!("{MAGIC}{version:0VERSION_DIGITS$}\n").into_bytes();
    serde_json::to_writer(&mut file, &list)?;
    file.push(b'\n');
    for held in entries.values() {
        file.extend_from_slice(&held.value);
    }
    Ok(file)
}

/// The version in the first [`HEAD_BYTES`] of a file.
pub(super) fn version(head: &[u8]) -> Result<u64, FormatError> {
    let line = head.get(..HEAD_BYTES).ok_or(FormatError::Head)?;
    let digits = line
        .strip_prefix(MAGIC.as_bytes())
        .and_then(|rest| rest.strip_suffix(b"\n"))
        .and_then(|digits| std::str::from_utf8(digits).ok());
    digits
        .and_then(|digits| digits.parse().ok())
        .ok_or(FormatError::Head)
}

/// The version and the entries of a whole file.
pub(super) fn decode(file: &Bytes) -> Result<(u64, Entries), FormatError> {
    let version = version(file)?;
    let rest = file.slice(HEAD_BYTES..);
    let line_end = rest.iter().position(|byte| *byte == b'\n');
    let line_end = line_end.ok_or(FormatError::Cut)?;
    let list: Vec<Listed> = serde_json::from_slice(&rest[..line_end]).map_err(FormatError::List)?;
    let mut values = rest.slice(line_end + 1..);
    let listed = list
        .iter()
        .fold(0_usize, |sum, entry| sum.saturating_add(entry.length));
    let found = values.len();
    if listed != found {
        return Err(FormatError::Length { found, listed });
    }
    let take = |entry: Listed| {
        let value = values.split_to(entry.length);
        let stamp = entry.stamp;
        (entry.key, Held { value, stamp })
    };
    Ok((version, list.into_iter().map(take).collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries() -> impl Strategy<Value = Entries> {
        let held = (any::<Vec<u8>>(), any::<u64>()).prop_map(|(value, stamp)| Held {
            value: value.into(),
            stamp,
        });
        proptest::collection::btree_map(any::<String>(), held, 0..5)
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(version in any::<u64>(), entries in entries()) {
            let file = Bytes::from(encode(version, &entries).unwrap());
            prop_assert_eq!(super::version(&file).unwrap(), version);
            prop_assert_eq!(decode(&file).unwrap(), (version, entries));
        }

        #[test]
        fn a_file_cut_short_is_refused(entries in entries(), cut in any::<prop::sample::Index>()) {
            let file = Bytes::from(encode(1, &entries).unwrap());
            let cut = cut.index(file.len());
            prop_assert!(decode(&file.slice(..cut)).is_err());
        }

        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes in any::<Vec<u8>>()) {
            let mut file = format!("{MAGIC}{:0VERSION_DIGITS$}\n", 1).into_bytes();
            prop_assert!(decode(&Bytes::from(bytes.clone())).is_err());
            file.extend(bytes);
            drop(decode(&file.into()));
        }
    }
}
