//! What the fuzz targets reach that is nobody else's: the greeting of a connection, and the files of leases.

use bytes::Bytes;

pub use crate::plane::wire::fuzzing::greet;

use crate::discovery::{self, Entry};

/// The entries of a lease's file; `None` where it is refused.
#[must_use]
pub fn lease_entries(file: &[u8]) -> Option<Vec<Entry>> {
    discovery::lease_entries(&Bytes::copy_from_slice(file))
}
