//! Progress events of a download.

use std::time::Duration;

/// A file to download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its path in the repository.
    pub name: String,
    /// Its length, in bytes.
    pub bytes: u64,
    /// Its bytes already present.
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

/// A progress event. Files are numbered in the order of [`Planned`](Self::Planned).
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// These files are needed; complete ones are not fetched.
    Planned(&'a [PlannedFile]),
    /// A file has this many bytes now.
    Received {
        /// Its number.
        file: usize,
        /// The bytes of the whole file that are present.
        bytes: u64,
    },
    /// A file waits.
    Waits {
        /// Its number.
        file: usize,
        /// Why.
        wait: Wait,
    },
    /// A file is complete, and its hash is correct.
    Done {
        /// Its number.
        file: usize,
    },
}

/// An observer of a download.
pub trait Progress: Send + Sync {
    /// Handles an event. Must not block.
    fn tell(&self, event: Event<'_>);
}

/// Ignores all events.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn tell(&self, _event: Event<'_>) {}
}
