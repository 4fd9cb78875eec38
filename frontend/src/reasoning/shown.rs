//! The parser for answers whose reasoning stays in the content, between its markers.

use crate::markup::{Deltas, MarkupParser};

/// Adds the first marker, which the prompt has, to the answer.
pub(super) struct ShownParser {
    /// The marker, until it is added.
    start: Option<&'static str>,
}

impl ShownParser {
    /// `start` is the marker if the answer begins behind it.
    pub(super) fn new(start: Option<&'static str>) -> Self {
        Self { start }
    }
}

impl MarkupParser for ShownParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        if text.is_empty() {
            return;
        }
        out.content(self.start.take().unwrap_or_default());
        out.content(text);
    }

    fn finish(&mut self, _out: &mut Deltas) {}
}
