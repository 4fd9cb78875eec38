//! The protocol between processes: [frames](Frame) and MessagePack [payloads](encode_payload), the start of a connection
//! ([`Greeting`]), and the queue of frames for a socket: an [`Outbox`], bounded by a [`Memory`]. The request plane and the
//! subprocess engine use it.
//!
//! A frame is a big-endian `u32` length of what follows, a kind byte, a flags byte (0 today, ignored when read), a
//! big-endian `u32` stream id, and the payload. Stream 0 is the connection itself. Payloads are MessagePack maps with named
//! fields. Readers ignore unknown fields and unknown kinds, so versions N and N-1 interoperate.

mod frame;
mod greeting;
mod outbox;
mod payload;

pub use frame::{
    Frame, FrameDecoder, FrameError, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES, encode_frame,
    encode_header,
};
pub use genset_backend_common::memory::{HeldBytes, Memory};
pub use greeting::{Greeting, GreetingError, MAX_GREETING_BYTES};
pub use outbox::{Batch, Outbox};
pub use payload::{
    Auth, Cancel, Credit, GoAway, GoAwayCode, Hello, Leaving, MAX_HEAD_BYTES, MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION, PayloadError, RequestHead, WireError, decode_payload, decode_request,
    encode_payload, encode_request, encode_short_payload,
};
