//! Decodes token ids from a peer. `SmallVec`'s own decoder allocates for as many ids as the peer announces: sixteen gigabytes for
//! five bytes.

use std::fmt;

use serde::Deserializer;
use serde::de::{SeqAccess, Visitor};

use super::TokenIds;

/// The most ids to allocate for on the announcement alone.
const TRUSTED_LEN: usize = 1024;

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<TokenIds, D::Error> {
    deserializer.deserialize_seq(Ids)
}

struct Ids;

impl<'de> Visitor<'de> for Ids {
    type Value = TokenIds;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TokenIds, A::Error> {
        let announced = seq.size_hint().unwrap_or(0);
        let mut ids = TokenIds::with_capacity(announced.min(TRUSTED_LEN));
        while let Some(id) = seq.next_element()? {
            ids.push(id);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::{Error, SeqDeserializer};

    use super::*;

    /// Three ids that announce more than memory can hold.
    struct Boasting(std::ops::Range<u32>);

    impl Iterator for Boasting {
        type Item = u32;

        fn next(&mut self) -> Option<u32> {
            self.0.next()
        }

        fn size_hint(&self) -> (usize, Option<usize>) {
            (1 << 50, Some(1 << 50))
        }
    }

    #[test]
    fn no_room_is_made_for_ids_that_are_only_announced() {
        let boasting = SeqDeserializer::<_, Error>::new(Boasting(0..3));
        let ids = deserialize(boasting).unwrap();
        assert_eq!(ids[..], [0, 1, 2]);
        assert!(ids.capacity() <= TRUSTED_LEN);
    }
}
