//! Frames and the incremental decoder.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bytes before a frame's payload: length, kind, flags and stream id.
pub const HEADER_BYTES: usize = 4 + HEADER_REST;

/// Header bytes that the length field counts.
const HEADER_REST: usize = 1 + 1 + 4;

/// The default limit on a frame's payload, in bytes: enough for a prompt of two million tokens.
pub const MAX_FRAME_BYTES: usize = 16 << 20;

/// The type of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// The first frame in each direction: version and limits.
    Hello,
    /// Opens a stream.
    Request,
    /// One item of a stream's response.
    Item,
    /// The response is complete.
    End,
    /// The response ends with an error.
    Error,
    /// The caller needs no more items.
    Cancel,
    /// The caller has room for more items.
    Credit,
    /// Asks whether the peer is alive.
    Ping,
    /// The reply to `Ping`.
    Pong,
    /// The sender accepts no new streams; open ones continue.
    GoAway,
    /// Proves that the sender knows the shared secret.
    Auth,
    /// An instance accepts no new requests; other instances of the process are not affected.
    Leaving,
    /// A kind this version does not know; receivers ignore it.
    Unknown(u8),
}

impl FrameKind {
    const KNOWN: [Self; 12] = [
        Self::Hello,
        Self::Request,
        Self::Item,
        Self::End,
        Self::Error,
        Self::Cancel,
        Self::Credit,
        Self::Ping,
        Self::Pong,
        Self::GoAway,
        Self::Auth,
        Self::Leaving,
    ];

    /// Returns the byte on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Hello => 0,
            Self::Request => 1,
            Self::Item => 2,
            Self::End => 3,
            Self::Error => 4,
            Self::Cancel => 5,
            Self::Credit => 6,
            Self::Ping => 7,
            Self::Pong => 8,
            Self::GoAway => 9,
            Self::Auth => 10,
            Self::Leaving => 11,
            Self::Unknown(code) => code,
        }
    }

    /// Returns the kind for a byte.
    #[must_use]
    pub fn from_code(code: u8) -> Self {
        Self::KNOWN
            .get(usize::from(code))
            .copied()
            .unwrap_or(Self::Unknown(code))
    }
}

/// One decoded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The frame's kind.
    pub kind: FrameKind,
    /// The stream it belongs to; 0 for the connection.
    pub stream: u32,
    /// The undecoded payload.
    pub payload: Bytes,
}

/// Why bytes are not a frame. The connection cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length field is below the header's own size.
    #[error(
        "frame length {length} is below the header's {HEADER_REST} bytes: the peer does not speak this protocol"
    )]
    TooShort {
        /// The length field.
        length: usize,
    },
    /// The payload is over the limit.
    #[error("frame payload of {length} bytes is over the limit of {limit}")]
    TooLong {
        /// Payload bytes.
        length: usize,
        /// The limit in force.
        limit: usize,
    },
}

/// Appends a frame to `out`.
///
/// # Errors
/// [`FrameError::TooLong`] when the payload is over [`MAX_FRAME_BYTES`]; nothing is written.
pub fn encode_frame(
    kind: FrameKind,
    stream: u32,
    payload: &[u8],
    out: &mut BytesMut,
) -> Result<(), FrameError> {
    encode_header(kind, stream, payload.len(), out)?;
    out.put_slice(payload);
    Ok(())
}

/// Appends the header of a payload of `length` bytes, for callers that write the payload without copying it.
///
/// # Errors
/// [`FrameError::TooLong`] when the payload is over [`MAX_FRAME_BYTES`]; nothing is appended.
pub fn encode_header(
    kind: FrameKind,
    stream: u32,
    length: usize,
    out: &mut BytesMut,
) -> Result<(), FrameError> {
    let too_long = FrameError::TooLong {
        length,
        limit: MAX_FRAME_BYTES,
    };
    if length > MAX_FRAME_BYTES {
        return Err(too_long);
    }
    let rest = u32::try_from(length + HEADER_REST).map_err(|_| too_long)?;
    out.put_u32(rest);
    out.put_u8(kind.code());
    out.put_u8(0);
    out.put_u32(stream);
    Ok(())
}

/// Decodes frames from bytes that arrive in chunks of any size.
///
/// # Examples
/// ```
/// use bytes::BytesMut;
/// use genset_wire::{FrameDecoder, FrameKind, encode_frame};
///
/// let mut bytes = BytesMut::new();
/// encode_frame(FrameKind::Ping, 0, b"", &mut bytes).unwrap();
/// let mut decoder = FrameDecoder::new();
/// decoder.extend(&bytes[..3]);
/// assert_eq!(decoder.next_frame().unwrap(), None);
/// decoder.extend(&bytes[3..]);
/// assert_eq!(decoder.next_frame().unwrap().unwrap().kind, FrameKind::Ping);
/// ```
#[derive(Debug)]
pub struct FrameDecoder {
    buffer: BytesMut,
    limit: usize,
    /// Bytes of the skipped frame that have not arrived yet.
    skipping: usize,
}

impl FrameDecoder {
    /// Returns a decoder with the limit [`MAX_FRAME_BYTES`].
    #[must_use]
    pub fn new() -> Self {
        Self::with_limit(MAX_FRAME_BYTES)
    }

    /// Returns a decoder that refuses payloads over `limit` bytes.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            limit,
            skipping: 0,
        }
    }

    /// Appends bytes from the peer.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Refuses payloads over `limit` bytes from now on: a handshake may have a lower limit than the frames after it.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Returns the buffer, to read into it without a copy.
    pub fn buffer_mut(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Returns the next complete frame, or `None` until more bytes arrive.
    ///
    /// # Errors
    /// [`FrameError`] when the bytes are not a frame; the decoder keeps its position and the connection must be closed.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let skipped = self.skipping.min(self.buffer.len());
        self.buffer.advance(skipped);
        self.skipping -= skipped;
        if self.skipping > 0 {
            return Ok(None);
        }
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else {
            return self.check_length().map(|()| None);
        };
        let [_, _, _, _, kind, _flags, stream @ ..] = *header;
        self.check_length()?;
        let payload_len = self.length_field() - HEADER_REST;
        if self.buffer.len() < HEADER_BYTES + payload_len {
            return Ok(None);
        }
        self.buffer.advance(HEADER_BYTES);
        let payload = self.buffer.split_to(payload_len).freeze();
        Ok(Some(Frame {
            kind: FrameKind::from_code(kind),
            stream: u32::from_be_bytes(stream),
            payload,
        }))
    }

    /// Returns kind, stream and payload length of the next frame, once its header has arrived. Callers use it to decide whether
    /// there is memory for the payload.
    #[must_use]
    pub fn announced(&self) -> Option<(FrameKind, u32, usize)> {
        if self.skipping > 0 {
            return None;
        }
        let [_, _, _, _, kind, _flags, stream @ ..] = *self.buffer.first_chunk::<HEADER_BYTES>()?;
        let payload = self.length_field().saturating_sub(HEADER_REST);
        Some((
            FrameKind::from_code(kind),
            u32::from_be_bytes(stream),
            payload,
        ))
    }

    /// Drops the next frame, whose header has arrived, without buffering the rest of it.
    pub fn skip_announced(&mut self) {
        if let Some((_, _, payload)) = self.announced() {
            self.skipping = HEADER_BYTES + payload;
        }
    }

    /// Returns the number of buffered bytes that are not yet a frame.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.buffer.len()
    }

    fn length_field(&self) -> usize {
        let field = self
            .buffer
            .first_chunk::<4>()
            .map_or(0, |bytes| u32::from_be_bytes(*bytes));
        usize::try_from(field).unwrap_or(usize::MAX)
    }

    /// Refuses a bad length as soon as its four bytes have arrived, before buffering more.
    fn check_length(&self) -> Result<(), FrameError> {
        if self.buffer.len() < 4 {
            return Ok(());
        }
        let length = self.length_field();
        if length < HEADER_REST {
            return Err(FrameError::TooShort { length });
        }
        let payload = length - HEADER_REST;
        if payload > self.limit {
            return Err(FrameError::TooLong {
                length: payload,
                limit: self.limit,
            });
        }
        Ok(())
    }
}

impl Default for FrameDecoder {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let payload = proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from);
        let frame =
            (any::<u8>(), any::<u32>(), payload).prop_map(|(kind, stream, payload)| Frame {
                kind: FrameKind::from_code(kind),
                stream,
                payload,
            });
        proptest::collection::vec(frame, 0..8)
    }

    proptest! {
        /// Any chunking of the bytes yields the same frames.
        #[test]
        fn any_chunking_gives_the_same_frames(frames in frames(), chunk in 1usize..50) {
            let mut bytes = BytesMut::new();
            for frame in &frames {
                encode_frame(frame.kind, frame.stream, &frame.payload, &mut bytes).unwrap();
            }
            let mut decoder = FrameDecoder::new();
            let mut decoded = Vec::new();
            for piece in bytes.chunks(chunk) {
                decoder.extend(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    decoded.push(frame);
                }
            }
            prop_assert_eq!(decoded, frames);
            prop_assert_eq!(decoder.buffered(), 0);
        }

        /// Garbage is refused or decoded and never panics; the decoder never holds more bytes than it received.
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = FrameDecoder::with_limit(64);
            decoder.extend(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
            prop_assert!(decoder.buffered() <= bytes.len());
        }
    }

    #[test]
    fn a_bad_length_is_refused_at_its_fourth_byte() {
        let mut decoder = FrameDecoder::with_limit(10);
        decoder.extend(&100u32.to_be_bytes());
        assert_eq!(
            decoder.next_frame(),
            Err(FrameError::TooLong {
                length: 94,
                limit: 10
            })
        );
        let mut decoder = FrameDecoder::new();
        decoder.extend(&[0, 0, 0, 1]);
        assert_eq!(
            decoder.next_frame(),
            Err(FrameError::TooShort { length: 1 })
        );
    }

    #[test]
    fn a_frame_that_is_skipped_is_held_by_nobody_and_the_next_one_comes_whole() {
        let mut bytes = BytesMut::new();
        encode_frame(FrameKind::Request, 7, &[1; 1000], &mut bytes).unwrap();
        encode_frame(FrameKind::Ping, 0, b"x", &mut bytes).unwrap();
        let mut decoder = FrameDecoder::new();
        decoder.extend(&bytes[..20]);
        assert_eq!(decoder.next_frame(), Ok(None));
        assert_eq!(decoder.announced(), Some((FrameKind::Request, 7, 1000)));
        decoder.skip_announced();
        for piece in bytes[20..].chunks(100) {
            decoder.extend(piece);
            if let Some(frame) = decoder.next_frame().unwrap() {
                assert_eq!(
                    (frame.kind, &frame.payload[..]),
                    (FrameKind::Ping, &b"x"[..])
                );
                return;
            }
            assert!(decoder.buffered() < 20);
        }
        panic!("the next frame never came");
    }

    #[test]
    fn every_known_kind_keeps_its_code() {
        for (code, kind) in FrameKind::KNOWN.into_iter().enumerate() {
            assert_eq!(usize::from(kind.code()), code);
            assert_eq!(FrameKind::from_code(kind.code()), kind);
        }
    }
}
