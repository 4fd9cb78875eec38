//! What the tests of all parsers share.

use super::{IdStyle, MarkupParser, Message, Splitter};

/// What a parser makes of a text in pieces; ids of calls only where the model gave them.
pub(crate) fn parse<'a>(
    parser: Box<dyn MarkupParser>,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Message {
    split(Splitter::new(None, Some(parser), IdStyle::Call), pieces)
}

/// What a splitter makes of a text in pieces.
pub(crate) fn split<'a>(
    mut splitter: Splitter,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Message {
    let mut message = Message::default();
    for piece in pieces {
        splitter.push(piece, |delta| message.add(delta));
    }
    splitter.finish(|delta| message.add(delta));
    for call in &mut message.tool_calls {
        if call.id.starts_with("call_") {
            call.id.clear();
        }
    }
    message
}

/// A text cut at these places, as far as they lie between characters.
pub(crate) fn cut<'a>(text: &'a str, at: &[usize]) -> Vec<&'a str> {
    let mut places: Vec<usize> = at.iter().map(|place| place % (text.len() + 1)).collect();
    places.retain(|place| text.is_char_boundary(*place));
    places.sort_unstable();
    let ends = places.iter().copied().chain([text.len()]);
    let begins = [0].into_iter().chain(places.iter().copied());
    begins
        .zip(ends)
        .map(|(begin, end)| &text[begin..end])
        .collect()
}

/// A text cut between any two characters.
pub(crate) fn characters(text: &str) -> Vec<&str> {
    text.split_inclusive(|_: char| true).collect()
}
