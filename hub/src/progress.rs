//! What a download tells whoever watches it.

use std::time::Duration;

/// A file that is to be there in the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its path in the repository.
    pub name: String,
    /// Its length, in bytes.
    pub bytes: u64,
    /// What of it is there already, in bytes.
    pub present_bytes: u64,
}

/// Why a file makes no progress at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Another process fetches it.
    OtherProcess,
    /// The hub failed or asked for a pause; it is asked again after this time.
    Retry(Duration),
}

/// What happens. Files are numbered as they were planned.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// These files are needed; those that are present in full are not fetched.
    Planned(&'a [PlannedFile]),
    /// So much of a file is there, in bytes.
    Received {
        /// Its number.
        file: usize,
        /// Of the whole file.
        bytes: u64,
    },
    /// A file waits.
    Waits {
        /// Its number.
        file: usize,
        /// For what.
        wait: Wait,
    },
    /// A file is there, and its hash is right.
    Done {
        /// Its number.
        file: usize,
    },
}

/// Who watches.
pub trait Progress: Send + Sync {
    /// Takes notice, and returns at once.
    fn tell(&self, event: Event<'_>);
}

/// Nobody watches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn tell(&self, _event: Event<'_>) {}
}
