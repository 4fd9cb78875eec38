//! The encoding of the messages of a virtual connection. Does no I/O.
//!
//! Every message except the first two starts with the number of data messages its sender sent before it, and the number it
//! consumed: so any message shows a loss in its own direction, and makes room in the other.

use bytes::{BufMut, Bytes, BytesMut};

/// Bytes before the payload of a data message: kind, `sent`, `taken`.
pub(super) const HEADER_BYTES: usize = 1 + 8 + 8;

const OPEN: u8 = 0;
const ACCEPT: u8 = 1;
const DATA: u8 = 2;
const TAKEN: u8 = 3;
const CLOSE: u8 = 4;
const PROBE: u8 = 5;

/// A sender's counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Position {
    /// Data messages it sent before this message.
    pub(super) sent: u64,
    /// Data messages it consumed from the other end.
    pub(super) taken: u64,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    /// A caller requests a connection; it can receive this many data messages without acknowledging any.
    Open { window: u32 },
    /// The listener accepts it, and can receive this many.
    Accept { window: u32 },
    /// Bytes of the stream.
    Data(Position, Bytes),
    /// Only the sender's position.
    Taken(Position),
    /// The last message: the stream ends here.
    Close(Position),
    /// A listener's message to itself, to check that it receives messages.
    Probe,
}

/// A message of another protocol.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {length} bytes and kind {kind:?} is none of this protocol")]
pub(super) struct NotOurs {
    kind: Option<u8>,
    length: usize,
}

/// A data message.
pub(super) fn encode_data(position: Position, data: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER_BYTES + data.len());
    put_header(&mut bytes, DATA, position);
    bytes.put_slice(data);
    bytes.freeze()
}

fn put_header(bytes: &mut BytesMut, kind: u8, position: Position) {
    bytes.put_u8(kind);
    bytes.put_u64(position.sent);
    bytes.put_u64(position.taken);
}

impl Message {
    /// The bytes to publish.
    pub(super) fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(HEADER_BYTES);
        match self {
            Self::Open { window } => {
                bytes.put_u8(OPEN);
                bytes.put_u32(*window);
            }
            Self::Accept { window } => {
                bytes.put_u8(ACCEPT);
                bytes.put_u32(*window);
            }
            Self::Data(position, data) => return encode_data(*position, data),
            Self::Taken(position) => put_header(&mut bytes, TAKEN, *position),
            Self::Close(position) => put_header(&mut bytes, CLOSE, *position),
            Self::Probe => bytes.put_u8(PROBE),
        }
        bytes.freeze()
    }

    /// Decodes a message. Ignores trailing bytes, which a later version may add.
    pub(super) fn decode(payload: &Bytes) -> Result<Self, NotOurs> {
        let not_ours = || NotOurs {
            kind: payload.first().copied(),
            length: payload.len(),
        };
        let window = || payload.get(1..5)?.try_into().map(u32::from_be_bytes).ok();
        let number = |at: usize| {
            payload
                .get(at..at + 8)?
                .try_into()
                .map(u64::from_be_bytes)
                .ok()
        };
        let position = || {
            Some(Position {
                sent: number(1)?,
                taken: number(9)?,
            })
        };
        let message = match payload.first().copied() {
            Some(OPEN) => window().map(|window| Self::Open { window }),
            Some(ACCEPT) => window().map(|window| Self::Accept { window }),
            Some(DATA) => {
                position().map(|position| Self::Data(position, payload.slice(HEADER_BYTES..)))
            }
            Some(TAKEN) => position().map(Self::Taken),
            Some(CLOSE) => position().map(Self::Close),
            Some(PROBE) => Some(Self::Probe),
            Some(_) | None => None,
        };
        message.ok_or_else(not_ours)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn position() -> impl Strategy<Value = Position> {
        (any::<u64>(), any::<u64>()).prop_map(|(sent, taken)| Position { sent, taken })
    }

    fn message() -> impl Strategy<Value = Message> {
        prop_oneof![
            any::<u32>().prop_map(|window| Message::Open { window }),
            any::<u32>().prop_map(|window| Message::Accept { window }),
            (position(), any::<Vec<u8>>())
                .prop_map(|(position, data)| Message::Data(position, data.into())),
            position().prop_map(Message::Taken),
            position().prop_map(Message::Close),
            Just(Message::Probe),
        ]
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_read_again(message in message()) {
            prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
        }

        #[test]
        fn a_message_cut_short_in_its_header_is_none_of_ours(message in message()) {
            let bytes = message.encode();
            let header = match message {
                Message::Open { .. } | Message::Accept { .. } => 5,
                Message::Data(..) | Message::Taken(_) | Message::Close(_) => HEADER_BYTES,
                Message::Probe => 1,
            };
            for length in 0..header {
                prop_assert!(Message::decode(&bytes.slice(..length)).is_err());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let is_known = bytes.first().is_some_and(|kind| *kind <= PROBE);
            prop_assert!(is_known || Message::decode(&bytes.into()).is_err());
        }
    }
}
