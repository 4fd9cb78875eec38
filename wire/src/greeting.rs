//! [`Greeting`]: the frames with which a connection begins, one at a time: small, and each awaited.

use std::fmt::Display;

use bytes::BytesMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::frame::{Frame, FrameDecoder, FrameError, FrameKind, encode_frame};
use crate::payload::{GoAway, decode_payload, encode_payload};

/// The largest payload while greeting: a stranger makes us hold no more.
pub const MAX_GREETING_BYTES: usize = 4096;

/// Why there is no frame of a greeting.
#[derive(Debug, thiserror::Error)]
pub enum GreetingError {
    /// The peer closed the connection.
    #[error("the peer closed the connection in the handshake")]
    Closed,
    /// The connection broke.
    #[error("the connection broke in the handshake: {0}")]
    Io(#[from] std::io::Error),
    /// What the peer sent are no frames.
    #[error("{0}")]
    NoFrames(FrameError),
    /// The peer sent another frame than was due, or one that cannot be read.
    #[error("{0}")]
    Unexpected(String),
    /// The peer wants no connection.
    #[error("the peer refused the connection: {}", .0.reason)]
    Refused(GoAway),
}

impl GreetingError {
    fn unexpected(error: impl Display) -> Self {
        Self::Unexpected(error.to_string())
    }
}

/// The beginning of a connection.
#[derive(Debug)]
pub struct Greeting<S> {
    io: S,
    decoder: FrameDecoder,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Greeting<S> {
    /// A greeting over `io`, before its first frame.
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
    /// The connection ends, or the peer sends another frame or refuses.
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
                // Later versions may greet with more; what we do not know, we leave.
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

    /// What the peer sent that was not received yet.
    pub fn unread(&mut self) -> &[u8] {
        self.decoder.buffer_mut()
    }

    /// Decodes what follows, which begins with what was not received yet, and may have payloads of `limit` bytes.
    #[must_use]
    pub fn into_decoder(mut self, limit: usize) -> FrameDecoder {
        self.decoder.set_limit(limit);
        self.decoder
    }
}
