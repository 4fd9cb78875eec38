//! Errors to and from Python: the payload of an `Error` frame, which `genset.exceptions` reads and writes.

use genset_backend_common::{EngineError, ErrorKind};
use genset_wire::{PayloadError, WireError, decode_payload, encode_payload};

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

/// Returns what is wrong with a payload from Python. The error's own text only says that something is.
pub(crate) fn detail(error: &PayloadError) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}
