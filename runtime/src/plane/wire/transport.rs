//! The transport of wire connections: TCP, or anything else that moves bytes in order between two processes.

use async_trait::async_trait;
use genset_backend_common::EngineError;
use tokio::io::{AsyncRead, AsyncWrite};

/// Both directions of a byte stream to one peer.
pub(crate) struct Io {
    /// Bytes from the peer.
    pub(crate) reader: Box<dyn AsyncRead + Send + Unpin>,
    /// Bytes to the peer.
    pub(crate) writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// The peer's name for the log.
    pub(crate) peer: String,
}

impl Io {
    /// Both directions of `stream`.
    pub(crate) fn split(
        stream: impl AsyncRead + AsyncWrite + Send + 'static,
        peer: String,
    ) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self {
            reader: Box::new(reader),
            writer: Box::new(writer),
            peer,
        }
    }
}

/// A transport's objection to a peer, as the inner error of an [`std::io::Error`] of its streams.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
pub(crate) struct Refusal {
    /// The label in metrics.
    pub(crate) label: &'static str,
    /// The problem, and what to change.
    pub(crate) problem: String,
}

/// Makes byte streams between processes.
#[async_trait]
pub(crate) trait Transport: Send + Sync + 'static {
    /// The plane's name in addresses.
    fn name(&self) -> &'static str;

    /// Whether only processes of this machine can reach its listener.
    fn is_local(&self) -> bool;

    /// Whether the server between the processes is connected, as far as is known; always `true` if there is none.
    fn is_connected(&self) -> bool {
        true
    }

    /// Connects to the server between the processes, if there is one and this has not been done. It has its own time limit.
    ///
    /// # Errors
    /// `CannotConnect` if no server can be used.
    async fn ready(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// Connects to the process at `location`, as its listener names it.
    ///
    /// # Errors
    /// `CannotConnect` if there is no listener.
    async fn dial(&self, location: &str) -> Result<Io, EngineError>;

    /// Starts to accept callers.
    ///
    /// # Errors
    /// `Unavailable`, or `InvalidArgument` naming the invalid setting.
    async fn listen(&self) -> Result<Box<dyn Listener>, EngineError>;
}

/// Accepts callers until it is dropped.
#[async_trait]
pub(crate) trait Listener: Send + 'static {
    /// The location for [`Transport::dial`].
    fn location(&self) -> String;

    /// The next caller; `None` if there will be no more.
    ///
    /// # Cancel safety
    /// If another branch of `select!` completes first, no caller was accepted.
    async fn accept(&mut self) -> Option<Io>;
}
