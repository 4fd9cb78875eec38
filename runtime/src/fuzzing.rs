//! Internals that only the fuzz targets reach: the greeting of a connection, and lease files.

use bytes::Bytes;

pub use crate::plane::wire::fuzzing::greet;

use crate::discovery::{self, Entry};

/// The entries of a lease file; `None` if it is invalid.
#[must_use]
pub fn lease_entries(file: &[u8]) -> Option<Vec<Entry>> {
    discovery::lease_entries(&Bytes::copy_from_slice(file))
}
