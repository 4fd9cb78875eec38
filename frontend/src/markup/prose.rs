//! [`Prose`]: running text beside markup. White space next to markup belongs to the markup.

use super::{Deltas, Scan, scan, trim_start_len};

/// One kind of running text. White space at its end is held back until more text comes, or markup, which drops it.
#[derive(Debug)]
pub(crate) struct Prose {
    emit: fn(&mut Deltas, &str),
    gap: String,
    is_after_markup: bool,
}

impl Prose {
    /// Text for the reader, from the answer's beginning.
    pub(crate) fn content() -> Self {
        Self {
            emit: Deltas::content,
            gap: String::new(),
            is_after_markup: false,
        }
    }

    /// Thoughts, behind the marker that begins them.
    pub(crate) fn reasoning() -> Self {
        Self {
            emit: Deltas::reasoning,
            gap: String::new(),
            is_after_markup: true,
        }
    }

    /// Takes a piece of the text.
    pub(crate) fn push(&mut self, text: &str, out: &mut Deltas) {
        let from = if self.is_after_markup {
            trim_start_len(text)
        } else {
            0
        };
        let text = text.get(from..).unwrap_or_default();
        let words = text.trim_end();
        if !words.is_empty() {
            self.is_after_markup = false;
            (self.emit)(out, &self.gap);
            (self.emit)(out, words);
            self.gap.clear();
        }
        self.gap
            .push_str(text.get(words.len()..).unwrap_or_default());
    }

    /// Takes text that is to be read again, without the markers in it.
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

    /// Markup comes here.
    pub(crate) fn markup(&mut self) {
        self.gap.clear();
        self.is_after_markup = true;
    }

    /// The text is over.
    pub(crate) fn finish(&mut self, out: &mut Deltas) {
        (self.emit)(out, &self.gap);
        self.gap.clear();
    }
}
