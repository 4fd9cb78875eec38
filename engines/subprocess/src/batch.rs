//! A batch: an `Item` frame on stream 0 whose payload is a list of `[stream, item]` pairs. So one frame carries what one step
//! of the engine produced for all requests. `nil` in place of an item ends the stream.

use bytes::{Buf, Bytes};
use serde::Deserialize as _;
use serde::de::IgnoredAny;

use genset_wire::decode_payload;

/// One pair: the stream and its undecoded item; `None` ends the stream.
pub(crate) type Pair = (u32, Option<Bytes>);

const NIL: u8 = 0xc0;
const PAIR: u8 = 0x92;

/// The pairs of a batch, in order. A malformed rest yields one `Err` and ends the iterator.
pub(crate) struct Batch {
    rest: Bytes,
    left: u32,
}

/// The bytes are not a batch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

impl Batch {
    pub(crate) fn try_new(mut payload: Bytes) -> Result<Self, Malformed> {
        let left = match take_u8(&mut payload)? {
            fix @ 0x90..=0x9f => u32::from(fix & 0x0f),
            0xdc => u32::from(payload.try_get_u16().map_err(|_| Malformed)?),
            0xdd => payload.try_get_u32().map_err(|_| Malformed)?,
            _ => return Err(Malformed),
        };
        Ok(Self {
            rest: payload,
            left,
        })
    }

    fn pair(&mut self) -> Result<Pair, Malformed> {
        if take_u8(&mut self.rest)? != PAIR {
            return Err(Malformed);
        }
        let stream = self.value()?;
        let stream = decode_payload(&stream).map_err(|_| Malformed)?;
        if self.rest.first() == Some(&NIL) {
            self.rest.advance(1);
            return Ok((stream, None));
        }
        Ok((stream, Some(self.value()?)))
    }

    /// Splits off one MessagePack value, undecoded.
    fn value(&mut self) -> Result<Bytes, Malformed> {
        let mut rest = &self.rest[..];
        skip_value(&mut rest)?;
        let len = self.rest.len() - rest.len();
        Ok(self.rest.split_to(len))
    }
}

impl Iterator for Batch {
    type Item = Result<Pair, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            let extra = !std::mem::take(&mut self.rest).is_empty();
            return extra.then_some(Err(Malformed));
        }
        self.left -= 1;
        let pair = self.pair();
        if pair.is_err() {
            (self.left, self.rest) = (0, Bytes::new());
        }
        Some(pair)
    }
}

fn take_u8(bytes: &mut Bytes) -> Result<u8, Malformed> {
    bytes.try_get_u8().map_err(|_| Malformed)
}

fn skip_value(rest: &mut &[u8]) -> Result<(), Malformed> {
    let mut reader = rmp_serde::Deserializer::new(rest);
    IgnoredAny::deserialize(&mut reader)
        .map(drop)
        .map_err(|_| Malformed)
}

#[cfg(test)]
mod tests {
    use genset_backend_common::Output;
    use genset_wire::encode_payload;

    use super::*;

    fn batch(bytes: &[u8]) -> Result<Vec<Pair>, Malformed> {
        Batch::try_new(Bytes::copy_from_slice(bytes))?.collect()
    }

    #[test]
    fn every_pair_comes_out_undecoded_and_nil_ends_a_stream() {
        let pairs = vec![
            (7u32, Some(Output::from(3))),
            (70_000, None),
            (7, Some(Output::from(900))),
        ];
        let decoded = batch(&encode_payload(&pairs).unwrap()).unwrap();
        let decoded: Vec<(u32, Option<Output>)> = decoded
            .into_iter()
            .map(|(stream, item)| (stream, item.map(|item| decode_payload(&item).unwrap())))
            .collect();
        assert_eq!(decoded, pairs);
    }

    #[test]
    fn long_batches_have_longer_headers() {
        for len in [0usize, 15, 16, 70_000] {
            let pairs = vec![(1u32, 5u8); len];
            assert_eq!(batch(&encode_payload(&pairs).unwrap()).unwrap().len(), len);
        }
    }

    #[test]
    fn whatever_is_cut_off_or_too_much_is_malformed() {
        let whole = encode_payload(&vec![(1u32, Some(Output::from(5))), (2, None)]).unwrap();
        for cut in 0..whole.len() {
            assert_eq!(batch(&whole[..cut]), Err(Malformed), "cut at {cut}");
        }
        let mut more = whole;
        more.push(0);
        assert_eq!(batch(&more), Err(Malformed));
        assert_eq!(batch(&[0xdd, 0xff, 0xff, 0xff, 0xff]), Err(Malformed));
        assert_eq!(
            batch(&encode_payload(&("text", 1)).unwrap()),
            Err(Malformed)
        );
    }
}
