//! [`Greeting`]: the small frames that begin a connection, exchanged one at a time.

use std::fmt::Display;

use bytes::BytesMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::frame::{Frame, FrameDecoder, FrameError, FrameKind, encode_frame};
use crate::payload::{GoAway, decode_payload, encode_payload};

/// The largest payload during the greeting: it bounds the memory an unauthenticated peer can use.
pub const MAX_GREETING_BYTES: usize = 4096;

/// Why a greeting frame could not be received.
#[derive(Debug, thiserror::Error)]
pub enum GreetingError {
    /// The peer closed the connection.
    #[error("the peer closed the connection in the handshake")]
    Closed,
    /// The connection broke.
    #[error("the connection broke in the handshake: {0}")]
    Io(#[from] std::io::Error),
    /// The peer sent bytes that are not frames.
    #[error("{0}")]
    NoFrames(FrameError),
    /// The peer sent a frame out of turn, or one that cannot be decoded.
    #[error("{0}")]
    Unexpected(String),
    /// The peer refuses the connection.
    #[error("the peer refused the connection: {}", .0.reason)]
    Refused(GoAway),
}

impl GreetingError {
    fn unexpected(error: impl Display) -> Self {
        Self::Unexpected(error.to_string())
    }
}

/// The greeting phase of a connection.
#[derive(Debug)]
pub struct Greeting<S> {
    io: S,
    decoder: FrameDecoder,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Greeting<S> {
    /// Creates a greeting over `io`, before its first frame.
    pub fn new(io: S) -> Self {
        let decoder = FrameDecoder::with_limit(MAX_GREETING_BYTES);
        Self { io, decoder }
    }

    /// Sends a frame of `kind` with `value` as its payload, and flushes it.
    ///
    /// # Errors
    /// [`GreetingError::Io`].
    pub async fn send(
        &mut self,
        kind: FrameKind,
        value: &impl Serialize,
    ) -> Result<(), GreetingError> {
        let payload = encode_payload(value).map_err(GreetingError::unexpected)?;
        let mut bytes = BytesMut::new();
        encode_frame(kind, 0, &payload, &mut bytes).map_err(GreetingError::unexpected)?;
        self.io.write_all(&bytes).await?;
        Ok(self.io.flush().await?)
    }

    /// Waits for a frame of kind `wanted`, and decodes its payload. Frames of unknown kinds are skipped.
    ///
    /// # Errors
    /// The connection ends, the peer sends another frame, or it refuses.
    pub async fn receive<T: DeserializeOwned>(
        &mut self,
        wanted: FrameKind,
    ) -> Result<T, GreetingError> {
        let frame = self.frame().await?;
        if frame.kind == FrameKind::GoAway {
            let go_away = decode_payload(&frame.payload).map_err(GreetingError::unexpected)?;
            return Err(GreetingError::Refused(go_away));
        }
        if frame.kind != wanted {
            let problem = format!("{:?} where {wanted:?} was due", frame.kind);
            return Err(GreetingError::Unexpected(problem));
        }
        decode_payload(&frame.payload).map_err(GreetingError::unexpected)
    }

    async fn frame(&mut self) -> Result<Frame, GreetingError> {
        loop {
            match self.decoder.next_frame().map_err(GreetingError::NoFrames)? {
                // Later versions may send more frames in a greeting; skip unknown ones.
                Some(frame) if matches!(frame.kind, FrameKind::Unknown(_)) => {}
                Some(frame) => return Ok(frame),
                None => {
                    if self.io.read_buf(self.decoder.buffer_mut()).await? == 0 {
                        return Err(GreetingError::Closed);
                    }
                }
            }
        }
    }

    /// Returns the bytes that the peer sent and nobody has received yet.
    pub fn unread(&mut self) -> &[u8] {
        self.decoder.buffer_mut()
    }

    /// Returns a decoder for the rest of the connection, with a payload limit of `limit` bytes. It starts with the unread
    /// bytes.
    #[must_use]
    pub fn into_decoder(mut self, limit: usize) -> FrameDecoder {
        self.decoder.set_limit(limit);
        self.decoder
    }
}
