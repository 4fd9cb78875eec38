//! Any bytes as any payload: a value that survives the way back, or a refusal.

#![no_main]

use arbitrary::Arbitrary;
use bytes::Bytes;
use genset_backend_common::wire::{
    Auth, Cancel, Credit, GoAway, Hello, WireError, decode_payload, decode_request, encode_payload,
    encode_request,
};
use genset_backend_common::{GenerateRequest, Output};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Kind {
    Hello,
    Auth,
    Request,
    Error,
    Cancel,
    Credit,
    GoAway,
    Generate,
    Output,
}

/// What was understood is written, read again, and the same.
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

fn request(bytes: &[u8]) {
    if let Ok((head, body)) = decode_request(&Bytes::copy_from_slice(bytes)) {
        let written = encode_request(&head, &body).unwrap();
        assert_eq!(decode_request(&written.into()).unwrap(), (head, body));
    }
}

fuzz_target!(|input: (Kind, &[u8])| {
    let (kind, bytes) = input;
    match kind {
        Kind::Hello => round_trip!(Hello, bytes),
        Kind::Auth => round_trip!(Auth, bytes),
        Kind::Request => request(bytes),
        Kind::Error => round_trip!(WireError, bytes),
        Kind::Cancel => round_trip!(Cancel, bytes),
        Kind::Credit => round_trip!(Credit, bytes),
        Kind::GoAway => round_trip!(GoAway, bytes),
        Kind::Generate => round_trip!(GenerateRequest, bytes),
        Kind::Output => round_trip!(Output, bytes),
    }
});
