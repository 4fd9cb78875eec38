//! [`Deltas`]: a reusable list of pieces of an answer, without an allocation a piece.

/// A piece of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delta<'a> {
    /// Text for the reader.
    Content(&'a str),
    /// Text of the model's thoughts.
    Reasoning(&'a str),
    /// A tool call begins.
    ToolCall {
        /// Its place among the answer's calls, from 0.
        index: u32,
        /// The tool's name.
        name: &'a str,
        /// The id that the model gave the call; empty when it gives none.
        id: &'a str,
    },
    /// A piece of a call's arguments, which together are to be one JSON object.
    Arguments {
        /// The call.
        index: u32,
        /// The piece.
        text: &'a str,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Reasoning,
    ToolCall { index: u32, name_len: usize },
    Arguments { index: u32 },
}

/// Pieces of an answer in their order. Neighbours of one kind are joined; cleared, it keeps its memory.
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
/// assert_eq!(read[2], Delta::Arguments { index, text: "{}" });
/// ```
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Deltas {
    text: String,
    parts: Vec<(Kind, usize)>,
    calls: u32,
}

impl Deltas {
    /// Adds text for the reader.
    pub fn content(&mut self, text: &str) {
        self.push(Kind::Content, text);
    }

    /// Adds thoughts.
    pub fn reasoning(&mut self, text: &str) {
        self.push(Kind::Reasoning, text);
    }

    /// Begins a call and says its index. `id` is empty when the model gave none.
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

    /// How many calls have begun since this was made.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Forgets the pieces; calls go on being counted.
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
                Kind::Arguments { index } => Delta::Arguments { index, text },
                Kind::ToolCall { index, name_len } => {
                    let (name, id) = text.split_at(name_len);
                    Delta::ToolCall { index, name, id }
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
