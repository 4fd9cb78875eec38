//! Any bytes, in any pieces: frames or a refusal, and the same ones as in one piece.

#![no_main]

use bytes::BytesMut;
use genset_backend_common::wire::{Frame, FrameDecoder, FrameError, encode_frame};
use libfuzzer_sys::fuzz_target;

const LIMIT_BYTES: usize = 1 << 16;

/// What came out of a decoder: frames, how it ended, and the bytes it still holds.
type Decoded = (Vec<Frame>, Result<(), FrameError>, usize);

fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Decoded {
    let mut decoder = FrameDecoder::with_limit(LIMIT_BYTES);
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.extend(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Err(error), 0),
            }
        }
    }
    (frames, Ok(()), decoder.buffered())
}

fn cut<'a>(bytes: &'a [u8], lengths: &[u8]) -> Vec<&'a [u8]> {
    let mut rest = bytes;
    let mut pieces = Vec::new();
    for length in lengths {
        let (piece, after) = rest.split_at(usize::from(*length).min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

fuzz_target!(|input: (Vec<u8>, &[u8])| {
    let (lengths, bytes) = input;
    let whole = decode([bytes]);
    assert_eq!(decode(cut(bytes, &lengths)), whole);

    let (frames, ended, held) = whole;
    assert!(held <= bytes.len());
    let mut encoded = BytesMut::new();
    for frame in &frames {
        assert!(frame.payload.len() <= LIMIT_BYTES);
        encode_frame(frame.kind, frame.stream, &frame.payload, &mut encoded).unwrap();
    }
    assert_eq!(decode([&encoded[..]]), (frames, Ok(()), 0));
    assert!(ended.is_err() || encoded.len() + held == bytes.len());
});
