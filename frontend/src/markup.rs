//! Splits an answer's text into content, reasoning and tool calls.
//!
//! Models write all three into one text, separated by markup. A [`MarkupParser`] takes the text as it arrives and emits
//! [`Deltas`]. The parsers are in [`reasoning`](crate::reasoning) and [`tools`](crate::tools); [`Splitter`] combines one of
//! each. Answers without expected markup bypass this module.
//!
//! Property tests check three invariants of every parser: the deltas add up to the same however the text is cut into pieces;
//! a marker never reaches the content; and text that looked like the beginning of a marker is emitted as soon as it cannot
//! become one, at the latest at the end.

mod deltas;
mod objects;
mod prose;
mod scan;
mod splitter;
mod value;

pub use deltas::{Delta, Deltas};
pub(crate) use prose::Prose;
pub(crate) use scan::{Scan, scan, trim_start_len};
pub use splitter::{IdStyle, Message, Splitter, ToolCall};
pub(crate) use value::{ValueScan, ValueStep};

/// A parser of one answer's text.
///
/// # Contract
/// The deltas of all pushes and the finish add up to the same for any cutting of the text. No pushes follow
/// [`finish`](Self::finish).
pub trait MarkupParser: Send {
    /// Takes the next piece of text and emits what is certain.
    fn push(&mut self, text: &str, out: &mut Deltas);

    /// Like [`push`](Self::push), but stops before the next marker, or after it. Returns whether there is more text to take;
    /// the next call takes it, with an empty `text`. `_is_in_call`: what comes next is a tool's argument, in which this
    /// parser's markers are plain text.
    fn push_to_marker(&mut self, text: &str, _is_in_call: bool, out: &mut Deltas) -> bool {
        self.push(text, out);
        false
    }

    /// Tells the parser that the model was cut off, so that it completes nothing. Called before [`finish`](Self::finish).
    fn cut_short(&mut self) {}

    /// Ends the text: emits what was held back.
    fn finish(&mut self, out: &mut Deltas);

    /// Whether the next text is reasoning, as far as is certain; `None` for a parser that does not look for reasoning.
    fn is_thinking(&self) -> Option<bool> {
        None
    }

    /// Whether the next text belongs to an argument of a call.
    fn is_in_call(&self) -> bool {
        false
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
