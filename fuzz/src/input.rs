//! Splits an input: what to do, and the text to do it to.

/// The first byte, and the rest; 0 for an empty input.
pub(crate) fn first(input: &[u8]) -> (u8, &[u8]) {
    match input.split_first() {
        Some((first, rest)) => (*first, rest),
        None => (0, input),
    }
}

/// The lengths of the pieces, and the data to cut. The first byte is the number of lengths.
pub(crate) fn cuts(input: &[u8]) -> (&[u8], &[u8]) {
    let (count, rest) = first(input);
    rest.split_at(usize::from(count).min(rest.len()))
}

/// The text before the first byte `at`, and the bytes after it; all of it if there is none.
pub(crate) fn split_at_byte(input: &[u8], at: u8) -> (&[u8], &[u8]) {
    match input.iter().position(|byte| *byte == at) {
        Some(place) => (&input[..place], &input[place + 1..]),
        None => (&[], input),
    }
}

/// Pieces of these lengths, and the rest.
pub(crate) fn pieces<'a>(whole: &'a [u8], lengths: &[u8]) -> Vec<&'a [u8]> {
    let mut rest = whole;
    let mut pieces = Vec::with_capacity(lengths.len() + 1);
    for length in lengths {
        let (piece, after) = rest.split_at(usize::from(*length).min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// Pieces of about these lengths, in bytes, without cutting characters.
pub(crate) fn text_pieces<'a>(whole: &'a str, lengths: &[u8]) -> Vec<&'a str> {
    let mut rest = whole;
    let mut pieces = Vec::with_capacity(lengths.len() + 1);
    for length in lengths {
        let at = rest.floor_char_boundary(usize::from(*length));
        let (piece, after) = rest.split_at(at);
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}
