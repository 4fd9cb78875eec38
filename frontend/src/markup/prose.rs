//! [`Prose`]: running text next to markup. White space next to markup belongs to the markup.

use super::{Deltas, Scan, scan, trim_start_len};

/// One kind of running text. White space next to markup is dropped, except between two runs of text: of the white space
/// before and after the markup, the first is kept, and emitted when text follows.
#[derive(Debug)]
pub(crate) struct Prose {
    emit: fn(&mut Deltas, &str),
    /// White space that was not emitted.
    gap: String,
    has_text: bool,
    /// Whether only white space has come since the latest markup.
    is_after_markup: bool,
    /// Whether white space is dropped now.
    skips: bool,
}

impl Prose {
    /// Content, from the answer's beginning.
    pub(crate) fn content() -> Self {
        Self {
            emit: Deltas::content,
            gap: String::new(),
            has_text: false,
            is_after_markup: false,
            skips: false,
        }
    }

    /// Reasoning, after the marker that begins it.
    pub(crate) fn reasoning() -> Self {
        Self {
            emit: Deltas::reasoning,
            is_after_markup: true,
            skips: true,
            ..Self::content()
        }
    }

    /// Takes a piece of the text.
    pub(crate) fn push(&mut self, text: &str, out: &mut Deltas) {
        let from = if self.skips { trim_start_len(text) } else { 0 };
        let text = &text[from..];
        let words = text.trim_end();
        if !words.is_empty() {
            (self.emit)(out, &self.gap);
            (self.emit)(out, words);
            self.gap.clear();
            self.has_text = true;
            self.is_after_markup = false;
            self.skips = false;
        }
        self.gap.push_str(&text[words.len()..]);
    }

    /// Takes text that is read again, without the markers in it.
    pub(crate) fn push_without<'m>(
        &mut self,
        markers: impl IntoIterator<Item = &'m str> + Clone,
        mut text: &str,
        out: &mut Deltas,
    ) {
        while let Scan::Marker { start, end, .. } = scan(text, markers.clone()) {
            self.push(&text[..start], out);
            text = &text[end..];
        }
        self.push(text, out);
    }

    /// Notes markup at this position.
    pub(crate) fn markup(&mut self) {
        if !self.has_text {
            self.gap.clear();
        }
        self.is_after_markup = true;
        self.skips = !self.has_text || !self.gap.is_empty();
    }

    /// Notes markup that separates messages: the text after it begins a new line.
    pub(crate) fn message_end(&mut self) {
        self.markup();
        if !self.skips {
            self.gap.push('\n');
            self.skips = true;
        }
    }

    /// Ends the text.
    pub(crate) fn finish(&mut self, out: &mut Deltas) {
        if !self.is_after_markup {
            (self.emit)(out, &self.gap);
        }
        self.gap.clear();
    }
}
