//! An answer's text apart: what is meant for the reader, what is reasoning, and what calls tools.
//!
//! Models write all three into one text, with markup of their own between. A [`MarkupParser`] takes that text as it comes
//! and gives [`Deltas`]; [`reasoning`](crate::reasoning) and [`tools`](crate::tools) hold the parsers, and [`Splitter`]
//! joins one of each. Answers without markup to look for never come here.
//!
//! Three laws hold for every parser, and property tests keep them: however the text is cut into pieces, the deltas add up
//! to the same; a marker never reaches the content; and text that only looked like the beginning of a marker is given out
//! as soon as it cannot become one, at the latest at the end.

mod deltas;
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
/// The deltas of all pushes and the finish add up to the same for any cutting of the text. Nothing is pushed after
/// [`finish`](Self::finish).
pub trait MarkupParser: Send {
    /// Takes the next piece of text and gives out what is certain.
    fn push(&mut self, text: &str, out: &mut Deltas);

    /// As [`push`](Self::push), but no farther than to the next marker, or over one. Whether there is more to take, which the
    /// next call does, without text of its own. `_is_in_call`: what comes next is a tool's argument, where a marker of this
    /// parser's is text.
    fn push_to_marker(&mut self, text: &str, _is_in_call: bool, out: &mut Deltas) -> bool {
        self.push(text, out);
        false
    }

    /// The model was not done where the text ends, so nothing is completed. Comes before [`finish`](Self::finish).
    fn cut_short(&mut self) {}

    /// The text is over: gives out what was held back.
    fn finish(&mut self, out: &mut Deltas);

    /// Whether what comes next is thoughts, as far as is certain; `None` of a parser that finds no thoughts.
    fn is_thinking(&self) -> Option<bool> {
        None
    }

    /// Whether what comes next is text of an argument of a call.
    fn is_in_call(&self) -> bool {
        false
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
