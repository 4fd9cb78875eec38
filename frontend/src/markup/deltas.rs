//! [`Deltas`]: a reusable list of an answer's pieces, without an allocation per piece.

/// A piece of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delta<'a> {
    /// Content for the reader.
    Content(&'a str),
    /// The model's reasoning.
    Reasoning(&'a str),
    /// A tool call begins.
    ToolCall {
        /// Its index among the answer's calls, from 0.
        index: u32,
        /// The tool's name.
        name: &'a str,
        /// The id that the model gave the call; empty if it gave none.
        id: &'a str,
        /// Whether it is a custom tool, whose input is text.
        is_custom: bool,
    },
    /// A piece of a call's arguments; the pieces together should be one JSON object. Of a custom tool, its input.
    Arguments {
        /// The call's index.
        index: u32,
        /// The piece.
        text: &'a str,
        /// Whether it is a custom tool's input.
        is_custom: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Reasoning,
    ToolCall { index: u32, name_len: usize },
    Arguments { index: u32 },
}

/// Pieces of an answer in order. Adjacent pieces of one kind are joined; `clear` keeps the memory.
///
/// # Examples
/// ```
/// use genset_frontend::markup::{Delta, Deltas};
///
/// let mut deltas = Deltas::default();
/// deltas.content("Hel");
/// deltas.content("lo");
/// let index = deltas.tool_call("get_time", "");
/// deltas.arguments("{}");
/// let read: Vec<_> = deltas.iter().collect();
/// assert_eq!(read[0], Delta::Content("Hello"));
/// assert_eq!(read[2], Delta::Arguments { index, text: "{}", is_custom: false });
/// ```
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Deltas {
    text: String,
    parts: Vec<(Kind, usize)>,
    calls: u32,
}

impl Deltas {
    /// Adds content.
    pub fn content(&mut self, text: &str) {
        self.push(Kind::Content, text);
    }

    /// Adds reasoning.
    pub fn reasoning(&mut self, text: &str) {
        self.push(Kind::Reasoning, text);
    }

    /// Begins a call and returns its index. `id` is empty if the model gave none.
    pub fn tool_call(&mut self, name: &str, id: &str) -> u32 {
        let index = self.calls;
        self.calls += 1;
        self.text.push_str(name);
        self.text.push_str(id);
        let name_len = name.len();
        self.parts
            .push((Kind::ToolCall { index, name_len }, name_len + id.len()));
        index
    }

    /// Adds to the arguments of the latest call.
    pub fn arguments(&mut self, text: &str) {
        let index = self.calls.saturating_sub(1);
        self.push(Kind::Arguments { index }, text);
    }

    /// The number of calls begun so far.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// The bytes of text in all pieces.
    pub(crate) fn bytes(&self) -> usize {
        self.text.len()
    }

    /// Whether there are no pieces.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Removes the pieces; the count of calls continues.
    pub fn clear(&mut self) {
        self.text.clear();
        self.parts.clear();
    }

    /// The pieces, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Delta<'_>> {
        let mut rest = self.text.as_str();
        self.parts.iter().map(move |(kind, len)| {
            let (text, after) = rest.split_at(*len);
            rest = after;
            match *kind {
                Kind::Content => Delta::Content(text),
                Kind::Reasoning => Delta::Reasoning(text),
                Kind::Arguments { index } => Delta::Arguments {
                    index,
                    text,
                    is_custom: false,
                },
                Kind::ToolCall { index, name_len } => {
                    let (name, id) = text.split_at(name_len);
                    Delta::ToolCall {
                        index,
                        name,
                        id,
                        is_custom: false,
                    }
                }
            }
        })
    }

    fn push(&mut self, kind: Kind, text: &str) {
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        match self.parts.last_mut() {
            Some((last, len)) if *last == kind => *len += text.len(),
            _ => self.parts.push((kind, text.len())),
        }
    }
}
