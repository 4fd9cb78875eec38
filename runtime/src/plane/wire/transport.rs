//! What carries the bytes of wire connections: TCP, or anything else that moves bytes in order between two processes.

use std::fmt;

use async_trait::async_trait;
use genset_backend_common::EngineError;
use tokio::io::{AsyncRead, AsyncWrite};

/// Both directions of a byte stream to one peer.
pub(crate) struct Io {
    /// Bytes from the peer.
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    /// Bytes to the peer.
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// Who the peer is, for the log.
    pub(crate) peer: String,
}

impl fmt::Debug for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Io")
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

/// What a transport has against a peer, as the inner error of an [`std::io::Error`] of its streams.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub(crate) struct Refusal {
    /// The label in metrics.
    pub(crate) label: &'static str,
    /// What is wrong, and what to change.
    pub(crate) problem: String,
}

/// Makes byte streams between processes.
#[async_trait]
pub(crate) trait Transport: Send + Sync + 'static {
    /// The plane's name in addresses.
    fn name(&self) -> &'static str;

    /// Whether only processes of this machine reach what listens.
    fn is_local(&self) -> bool;

    /// Reaches the process at `location`, as its listener names it.
    ///
    /// # Errors
    /// `CannotConnect` when nobody is there.
    async fn dial(&self, location: &str) -> Result<Io, EngineError>;

    /// Begins to accept callers.
    ///
    /// # Errors
    /// `Unavailable`, or `InvalidArgument` naming the setting at fault.
    async fn listen(&self) -> Result<Box<dyn Listener>, EngineError>;
}

/// Accepts callers until it is dropped.
#[async_trait]
pub(crate) trait Listener: Send + 'static {
    /// What others give [`Transport::dial`] to reach this.
    fn location(&self) -> String;

    /// The next caller; `None` when there will be no more.
    ///
    /// # Cancel safety
    /// If another branch wins, no caller was taken.
    async fn accept(&mut self) -> Option<Io>;
}
