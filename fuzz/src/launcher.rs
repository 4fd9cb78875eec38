//! What launched servers answer.

use genset_engine_launcher::fuzzing::events;

use crate::input::{cuts, pieces};

/// Lengths of pieces, and a stream of server-sent events: the same events in any pieces.
pub fn sse(input: &[u8]) {
    let (lengths, body) = cuts(input);
    let whole = events(&[body]);
    assert_eq!(events(&pieces(body, lengths)), whole);
    let bytes: Vec<&[u8]> = body.chunks(1).collect();
    assert_eq!(events(&bytes), whole);
}
