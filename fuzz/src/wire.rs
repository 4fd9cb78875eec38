//! Data from a peer: frames, payloads, and the handshake.

use bytes::{Bytes, BytesMut};
use genset_backend_common::{GenerateRequest, Output};
use genset_wire::{
    Auth, Cancel, Credit, Frame, FrameDecoder, FrameError, GoAway, Hello, WireError,
    decode_payload, decode_request, encode_frame, encode_payload, encode_request,
};

use crate::input::{cuts, first, pieces};

const LIMIT_BYTES: usize = 1 << 16;

/// A decoder's result: frames, how it ended, and the number of bytes it still holds.
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

/// Lengths of pieces, and bytes: any pieces yield the same frames or refusal, and written frames are read again.
pub fn frames(input: &[u8]) {
    let (lengths, bytes) = cuts(input);
    let whole = decode([bytes]);
    assert_eq!(decode(pieces(bytes, lengths)), whole);

    let (frames, ended, held) = whole;
    assert!(held <= bytes.len());
    let mut encoded = BytesMut::new();
    for frame in &frames {
        assert!(frame.payload.len() <= LIMIT_BYTES);
        encode_frame(frame.kind, frame.stream, &frame.payload, &mut encoded).unwrap();
    }
    assert_eq!(decode([&encoded[..]]), (frames, Ok(()), 0));
    assert!(ended.is_err() || encoded.len() + held == bytes.len());
}

/// Asserts that a decoded value survives writing and reading.
macro_rules! round_trip {
    ($type:ty, $bytes:expr) => {
        if let Ok(value) = decode_payload::<$type>($bytes) {
            let written = encode_payload(&value).unwrap();
            let again: $type = decode_payload(&written).unwrap();
            // Compared as bytes: NaN differs from itself.
            assert_eq!(encode_payload(&again).unwrap(), written);
        }
    };
}

/// The number of a type, and a payload: a value that survives a round trip, or a refusal.
pub fn payloads(input: &[u8]) {
    let (number, bytes) = first(input);
    match number % 9 {
        0 => round_trip!(Hello, bytes),
        1 => round_trip!(Auth, bytes),
        2 => request(bytes),
        3 => round_trip!(WireError, bytes),
        4 => round_trip!(Cancel, bytes),
        5 => round_trip!(Credit, bytes),
        6 => round_trip!(GoAway, bytes),
        7 => round_trip!(GenerateRequest, bytes),
        _ => round_trip!(Output, bytes),
    }
}

fn request(bytes: &[u8]) {
    if let Ok((head, body)) = decode_request(&Bytes::copy_from_slice(bytes)) {
        let written = encode_request(&head, &body).unwrap();
        assert_eq!(decode_request(&written.into()).unwrap(), (head, body));
    }
}

/// Our role, whether we have a secret, and a stranger's bytes: nobody without the secret is accepted.
pub fn handshake(input: &[u8]) {
    let (flags, sent) = first(input);
    let (is_caller, has_secret) = (flags & 1 != 0, flags & 2 != 0);
    let is_greeted = genset_runtime::fuzzing::greet(sent, is_caller, has_secret);
    assert!(
        !(is_greeted && has_secret),
        "a stranger without the secret was let in"
    );
}
