//! Errors to and from Python: the payload of an `Error` frame, which `genset.exceptions` reads and writes.

use genset_backend_common::{EngineError, ErrorKind};
use genset_wire::{WireError, decode_payload, encode_payload};

/// Encodes the error for Python.
pub(crate) fn to_bytes(error: &EngineError) -> Vec<u8> {
    encode_payload(&WireError::from(error)).unwrap_or_default()
}

/// Decodes an error from Python; `Internal` if it is invalid.
pub(crate) fn from_bytes(bytes: &[u8]) -> EngineError {
    match decode_payload::<WireError>(bytes) {
        Ok(error) => error.into(),
        Err(error) => EngineError::new(
            ErrorKind::Internal,
            "the handler failed with an error that cannot be read",
        )
        .with_source(error),
    }
}
