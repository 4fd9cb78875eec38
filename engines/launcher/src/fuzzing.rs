//! What the fuzz targets reach that is nobody else's: the decoder of server-sent events.

use crate::sse::{Decoder, Event};

/// An event's data, and whether it is an error.
pub type FoundEvent = (bool, Vec<u8>);

/// The events of a body in pieces, and whether it ended in the middle of one; `None` where it is refused.
#[must_use]
pub fn events(pieces: &[&[u8]]) -> Option<(Vec<FoundEvent>, bool)> {
    let mut decoder = Decoder::default();
    let mut events = Vec::new();
    for piece in pieces {
        decoder.push(piece).ok()?;
        while let Some(event) = decoder.next() {
            events.push(match event {
                Event::Data(data) => (false, data),
                Event::Error(data) => (true, data),
            });
        }
    }
    Some((events, decoder.is_half()))
}
