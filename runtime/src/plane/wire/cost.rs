//! Estimates a request's memory after decoding from its MessagePack alone, for [`Callee`](super::callee::Callee), which must
//! know it before decoding. A nil is one byte on the wire, but in a list of JSON values as large as any of them.

use serde_json::Value;

/// Decoded size of a value in bytes: a JSON value in a list that has just doubled its capacity.
const VALUE_BYTES: usize = 2 * size_of::<Value>();

/// The same of a list with any value, besides its values: it begins with room for four.
const LIST_BYTES: usize = 4 * size_of::<Value>();

/// The same of a map with any entry, besides its entries: a tree begins with a node of eleven, an ordered map with room for three
/// and a table of their hashes.
const MAP_BYTES: usize = 656;

/// The same of a text, besides its bytes: the smallest allocation.
const TEXT_BYTES: usize = 32;

/// Decoded size of a token id in bytes, with the spare capacity of its list.
const TOKEN_ID_BYTES: usize = 8;

/// The maximum decoded size of a request's values. If the request is not MessagePack, counts the values before the error:
/// decoding stops there.
pub(super) fn decoded_bytes(request: &[u8]) -> usize {
    let mut scan = Scan {
        rest: request,
        bytes: 0,
    };
    // `None` means that the request is truncated.
    let _ = scan.request();
    scan.bytes
}

/// A token: a scalar value as a whole, or the header of a list or map without its values.
enum Token<'a> {
    Integer,
    /// Nil, a boolean or a float.
    Plain,
    /// A string, or bytes.
    Text(&'a [u8]),
    /// A list of this many values.
    List(usize),
    /// A map of this many keys and as many values.
    Map(usize),
}

struct Scan<'a> {
    rest: &'a [u8],
    bytes: usize,
}

impl<'a> Scan<'a> {
    /// Only these two fields of a [`GenerateRequest`](genset_backend_common::GenerateRequest) are decoded as token ids; integers
    /// elsewhere may become JSON values.
    fn request(&mut self) -> Option<()> {
        let start = self.rest;
        let Some(Token::Map(fields)) = self.token() else {
            self.rest = start;
            return self.values(1, VALUE_BYTES);
        };
        for _ in 0..fields {
            match self.key()? {
                b"input" => self.input()?,
                b"stop" => self.values(1, TOKEN_ID_BYTES)?,
                _ => self.values(1, VALUE_BYTES)?,
            }
        }
        Some(())
    }

    /// An enum with data is a map with one key.
    fn input(&mut self) -> Option<()> {
        let start = self.rest;
        if let Some(Token::Map(1)) = self.token()
            && let Some(b"tokens" | b"embed" | b"score") = self.key()
        {
            return self.values(1, TOKEN_ID_BYTES);
        }
        self.rest = start;
        self.values(1, VALUE_BYTES)
    }

    /// A key of a map; empty if it is not a string. Nothing decoded here has lists or maps as keys.
    fn key(&mut self) -> Option<&'a [u8]> {
        let key = match self.token()? {
            Token::Text(text) => text,
            Token::Integer | Token::Plain => &[],
            Token::List(_) | Token::Map(_) => return None,
        };
        self.add(VALUE_BYTES + key.len());
        Some(key)
    }

    /// Counts `count` values and everything in them.
    fn values(&mut self, count: usize, integer_bytes: usize) -> Option<()> {
        let mut left = count;
        while left > 0 {
            left -= 1;
            let bytes = match self.token()? {
                Token::Integer => integer_bytes,
                Token::Plain => VALUE_BYTES,
                Token::Text(text) => VALUE_BYTES + TEXT_BYTES + text.len(),
                Token::List(0) | Token::Map(0) => VALUE_BYTES,
                Token::List(values) => {
                    left = left.saturating_add(values);
                    VALUE_BYTES + LIST_BYTES
                }
                Token::Map(entries) => {
                    left = left.saturating_add(entries.saturating_mul(2));
                    VALUE_BYTES + MAP_BYTES
                }
            };
            self.add(bytes);
        }
        Some(())
    }

    fn add(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// # Source
    /// <https://github.com/msgpack/msgpack/blob/master/spec.md#formats>
    fn token(&mut self) -> Option<Token<'a>> {
        let (marker, rest) = self.rest.split_first()?;
        self.rest = rest;
        let marker = *marker;
        let token = match marker {
            0x00..=0x7f | 0xe0..=0xff => Token::Integer,
            0x80..=0x8f => Token::Map(usize::from(marker & 0x0f)),
            0x90..=0x9f => Token::List(usize::from(marker & 0x0f)),
            0xa0..=0xbf => Token::Text(self.take(usize::from(marker & 0x1f))?),
            0xc0 | 0xc2 | 0xc3 => Token::Plain,
            // Never used.
            0xc1 => return None,
            0xc4 | 0xd9 => self.text(1)?,
            0xc5 | 0xda => self.text(2)?,
            0xc6 | 0xdb => self.text(4)?,
            // Extensions: a type byte precedes their bytes.
            0xc7 => self.extension(1)?,
            0xc8 => self.extension(2)?,
            0xc9 => self.extension(4)?,
            0xd4..=0xd8 => Token::Text(self.take(1 + (1_usize << (marker - 0xd4)))?),
            0xca..=0xcb => {
                self.take(4_usize << (marker - 0xca))?;
                Token::Plain
            }
            0xcc..=0xcf => {
                self.take(1_usize << (marker - 0xcc))?;
                Token::Integer
            }
            0xd0..=0xd3 => {
                self.take(1_usize << (marker - 0xd0))?;
                Token::Integer
            }
            0xdc => Token::List(self.length(2)?),
            0xdd => Token::List(self.length(4)?),
            0xde => Token::Map(self.length(2)?),
            0xdf => Token::Map(self.length(4)?),
        };
        Some(token)
    }

    fn text(&mut self, length_bytes: usize) -> Option<Token<'a>> {
        let length = self.length(length_bytes)?;
        Some(Token::Text(self.take(length)?))
    }

    fn extension(&mut self, length_bytes: usize) -> Option<Token<'a>> {
        let length = self.length(length_bytes)?;
        Some(Token::Text(self.take(length.saturating_add(1))?))
    }

    fn length(&mut self, bytes: usize) -> Option<usize> {
        let digits = self.take(bytes)?.iter();
        Some(digits.fold(0, |length, digit| (length << 8) | usize::from(*digit)))
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use genset_backend_common::GenerateRequest;
    use genset_wire::{decode_payload, encode_payload};
    use serde::Serialize;
    use serde_json::json;

    use super::*;

    fn cost(request: &impl Serialize) -> usize {
        decoded_bytes(&encode_payload(request).unwrap())
    }

    /// Whether `bytes` is within the cost of `many` token ids and a request's other fields.
    fn is_cheap(bytes: usize, many: usize) -> bool {
        bytes < many * TOKEN_ID_BYTES + 30_000
    }

    #[test]
    fn token_ids_cost_less_than_values_of_any_type() {
        let mut request = GenerateRequest::from_tokens("m", (0..100_000).collect());
        assert!(is_cheap(cost(&request), 100_000));
        request.annotations = BTreeMap::from([("x".to_owned(), json!(vec![1; 100_000]))]).into();
        assert!(cost(&request) > 100_000 * VALUE_BYTES);
        request.annotations = BTreeMap::from([("x".to_owned(), json!(vec![(); 100_000]))]).into();
        assert!(cost(&request) > 100_000 * VALUE_BYTES);
    }

    #[test]
    fn only_the_fields_of_token_ids_have_token_ids() {
        let ids = vec![1; 1000];
        for cheap in [
            json!({"input": {"tokens": ids}}),
            json!({"input": {"embed": [ids]}}),
            json!({"input": {"score": [{"token_ids": ids, "first_tokens": 1}]}}),
            json!({"stop": {"stop_token_ids": ids}}),
        ] {
            assert!(is_cheap(cost(&cheap), 1000), "{cheap}");
        }
        for dear in [
            json!({"input": {"chat": {"messages": ids}}}),
            json!({"input": {"tokens": [], "chat": ids}}),
            json!({"annotations": {"input": {"tokens": ids}}}),
            json!({"guided": {"json_schema": ids}}),
            json!([ids]),
        ] {
            assert!(cost(&dear) > 1000 * VALUE_BYTES, "{dear}");
        }
    }

    /// The memory of a decoded value, without what its allocations need besides their bytes.
    fn memory(value: &Value) -> usize {
        let inside = match value {
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
            Value::String(text) => text.capacity(),
            Value::Array(values) => {
                let spare = values.capacity() - values.len();
                spare * size_of::<Value>() + values.iter().map(memory).sum::<usize>()
            }
            Value::Object(entries) => {
                // The first entry brings room for at least three.
                let spare = match entries.len() {
                    0 => 0,
                    more => 3_usize.saturating_sub(more),
                };
                let entry = |(name, value): (&String, &Value)| {
                    size_of::<String>() + name.capacity() + memory(value)
                };
                spare * (size_of::<String>() + size_of::<Value>())
                    + entries.iter().map(entry).sum::<usize>()
            }
        };
        size_of::<Value>() + inside
    }

    #[test]
    fn values_cost_at_least_what_they_take_with_the_spare_room_around_them() {
        for (name, sent) in [
            ("a list that has just grown", json!(vec![(); 1025])),
            ("short texts", json!(vec!["a"; 1025])),
            ("lists of one value", json!(vec![json!([null]); 1000])),
            ("maps of one entry", json!(vec![json!({"": null}); 1000])),
            ("empty lists and maps", json!(vec![json!([[], {}]); 1000])),
        ] {
            let payload = encode_payload(&sent).unwrap();
            let decoded: Value = decode_payload(&payload).unwrap();
            let (cost, taken) = (decoded_bytes(&payload), memory(&decoded));
            assert!(cost >= taken, "{name}: {cost} of {taken}");
            assert!(cost < 5 * taken, "{name}: {cost} of {taken}");
        }
    }

    /// One value of each format, as in the specification.
    #[test]
    fn every_format_is_read_to_its_end() {
        let sized = |marker: u8, length: &[u8], bytes: usize| {
            let head = [&[marker][..], length].concat();
            [head, vec![1; bytes]].concat()
        };
        let mut formats: Vec<Vec<u8>> = vec![
            vec![0x7f],
            vec![0xe0],
            vec![0xc0],
            vec![0xc2],
            vec![0xc3],
            vec![0x81, 1, 1],
            vec![0x92, 1, 1],
            vec![0xa2, b'a', b'b'],
            sized(0xc4, &[3], 3),
            sized(0xc5, &[1, 0], 256),
            sized(0xc6, &[0, 1, 0, 0], 65536),
            sized(0xc7, &[3], 4),
            sized(0xc8, &[1, 0], 257),
            sized(0xc9, &[0, 1, 0, 0], 65537),
            sized(0xd9, &[3], 3),
            sized(0xda, &[1, 0], 256),
            sized(0xdb, &[0, 1, 0, 0], 65536),
            sized(0xdc, &[1, 0], 256),
            sized(0xdd, &[0, 1, 0, 0], 65536),
            sized(0xde, &[1, 0], 512),
            sized(0xdf, &[0, 1, 0, 0], 131_072),
        ];
        let fixed = [
            (0xca, 4),
            (0xcb, 8),
            (0xcc, 1),
            (0xcd, 2),
            (0xce, 4),
            (0xcf, 8),
            (0xd0, 1),
            (0xd1, 2),
            (0xd2, 4),
            (0xd3, 8),
            (0xd4, 2),
            (0xd5, 3),
            (0xd6, 5),
            (0xd7, 9),
            (0xd8, 17),
        ];
        formats.extend(fixed.map(|(marker, bytes)| sized(marker, &[], bytes)));
        for format in formats {
            let mut scan = Scan {
                rest: &format,
                bytes: 0,
            };
            assert_eq!(scan.values(1, TOKEN_ID_BYTES), Some(()), "{:x}", format[0]);
            assert!(scan.rest.is_empty(), "{:x}", format[0]);
            let mut short = Scan {
                rest: &format[..format.len() - 1],
                bytes: 0,
            };
            assert_eq!(short.values(1, TOKEN_ID_BYTES), None, "{:x}", format[0]);
        }
    }

    #[test]
    fn what_is_announced_and_not_there_costs_nothing() {
        let announced = [0xdd, 0xff, 0xff, 0xff, 0xff, 0xc0];
        assert_eq!(decoded_bytes(&announced), 2 * VALUE_BYTES + LIST_BYTES);
        assert_eq!(decoded_bytes(&[]), 0);
        assert_eq!(decoded_bytes(&[0xc1]), 0);
    }
}
