//! The parser for dialects that write a call as a name and an object whose keys are bare and whose strings are between marks:
//! `call:get_weather{city:<escape>Oslo<escape>,days:3}`.
//!
//! Quantized models deviate from it in ways that are read, too: round brackets around the arguments, `=` after a key, strings in
//! quotes, and a name without `call`.

use serde::de::IgnoredAny;
use serde_json::Value;

use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan};

/// A dialect of this kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeyedMarks {
    /// Before and after each string.
    pub(super) quote: &'static str,
    /// Begins a call.
    pub(super) start: &'static str,
    /// Ends it.
    pub(super) end: &'static str,
}

const QUOTE: usize = 0;
const START: usize = 1;

impl KeyedMarks {
    /// Every marker.
    pub(super) fn all(&self) -> [&'static str; 3] {
        [self.quote, self.start, self.end]
    }
}

/// What precedes the name.
const KINDS: [&str; 2] = ["call:", ":"];

/// A name longer than this (in bytes) is not a name but content.
const MAX_NAME_BYTES: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Outside,
    /// After a start, up to the bracket that opens the arguments.
    Name,
    Arguments,
}

pub(super) struct KeyedParser {
    marks: &'static KeyedMarks,
    state: State,
    arguments: Arguments,
    content: Prose,
    held: String,
}

impl KeyedParser {
    pub(super) fn new(marks: &'static KeyedMarks) -> Self {
        Self {
            marks,
            state: State::Outside,
            arguments: Arguments::default(),
            content: Prose::content(),
            held: String::new(),
        }
    }

    /// Consumes text up to and including a marker; false if it must wait for more.
    fn step(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        match self.state {
            State::Outside => self.outside(is_end, out),
            State::Name => self.name(is_end, out),
            State::Arguments => self.arguments(is_end, out),
        }
    }

    fn outside(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        match scan(&self.held, self.marks.all()) {
            Scan::Marker { which, start, end } => {
                self.content.push(&self.held[..start], out);
                self.content.markup();
                self.held.drain(..end);
                if which == START {
                    self.state = State::Name;
                }
                true
            }
            Scan::Text { sure } => {
                let len = if is_end { self.held.len() } else { sure };
                self.content.push(&self.held[..len], out);
                self.held.drain(..len);
                false
            }
        }
    }

    /// Text before the bracket that is not a name is content.
    fn name(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        let [quote, start, end] = self.marks.all();
        let (len, is_opened) = match scan(&self.held, ["{", "(", quote, start, end]) {
            Scan::Marker { which, start, .. } => (start, which < 2),
            // Independent of how the text is cut: the certain part grows up to the marker.
            Scan::Text { sure } if sure <= MAX_NAME_BYTES && !is_end => return false,
            Scan::Text { sure } => (sure, false),
        };
        let text = self.held[..len].trim();
        let name = KINDS.iter().find_map(|kind| text.strip_prefix(kind));
        let name = name.unwrap_or(text).trim();
        let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
        if !is_opened || len > MAX_NAME_BYTES || !is_name {
            self.state = State::Outside;
            return true;
        }
        out.tool_call(name, "");
        self.held.drain(..len);
        self.arguments = Arguments::default();
        self.state = State::Arguments;
        true
    }

    fn arguments(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        let found = if self.arguments.is_in_text {
            scan(&self.held, [self.marks.quote])
        } else {
            scan(&self.held, self.marks.all())
        };
        let (len, marker) = match found {
            Scan::Marker { which, start, end } => (start, Some((which, end))),
            Scan::Text { .. } if is_end => (self.held.len(), None),
            Scan::Text { sure } => (sure, None),
        };
        let last = self.arguments.take_all(&self.held[..len], out);
        if let Some(last) = last {
            self.held.drain(..last);
            self.content.markup();
            self.state = State::Outside;
            return true;
        }
        self.held.drain(..marker.map_or(len, |(_, end)| end));
        match marker {
            None => return false,
            Some((QUOTE, _)) => self.arguments.quote(out),
            // The call ends without its last bracket.
            Some((which, _)) => {
                self.arguments.end_word(out);
                self.content.markup();
                self.state = if which == START {
                    State::Name
                } else {
                    State::Outside
                };
            }
        }
        true
    }
}

impl MarkupParser for KeyedParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        self.held.push_str(text);
        while self.step(false, out) {}
    }

    fn finish(&mut self, out: &mut Deltas) {
        while self.step(true, out) {}
        if self.state == State::Arguments {
            self.arguments.end_word(out);
        }
        self.content.finish(out);
    }

    fn is_in_call(&self) -> bool {
        self.state == State::Arguments && self.arguments.is_in_string()
    }
}

/// Converts a call's arguments to JSON as they arrive.
#[derive(Debug, Default)]
struct Arguments {
    /// Whether each open bracket is of an object, the innermost last.
    open: Vec<bool>,
    /// Whether the outermost bracket is round.
    is_round: bool,
    /// Whether a key comes next.
    is_key: bool,
    /// Whether the innermost object or list is still empty.
    is_empty: bool,
    /// Whether a comma came, which is written before the next element.
    has_comma: bool,
    /// Bare text: a key, or a value that is not a string.
    word: String,
    /// Whether the next text is in a string between marks.
    is_in_text: bool,
    /// The quote that ends the current string, which is not between marks.
    quoted: Option<char>,
    /// Whether a backslash came in it.
    is_escaped: bool,
}

impl Arguments {
    fn is_in_string(&self) -> bool {
        self.is_in_text || self.quoted.is_some()
    }

    /// Takes text without markers. Returns the length up to the last bracket, if that came.
    fn take_all(&mut self, text: &str, out: &mut Deltas) -> Option<usize> {
        if self.is_in_text {
            write_text(text, out);
            return None;
        }
        let mut characters = text.char_indices();
        let last = characters.find(|(_, c)| self.take(*c, out));
        last.map(|(at, c)| at + c.len_utf8())
    }

    /// Takes a character outside of strings between marks. Returns whether it is the last bracket.
    fn take(&mut self, c: char, out: &mut Deltas) -> bool {
        if let Some(quote) = self.quoted {
            self.take_quoted(c, quote, out);
            return false;
        }
        let is_outermost = self.open.len() == 1;
        match c {
            '(' if self.open.is_empty() => {
                self.is_round = true;
                self.open("{", out);
            }
            ')' if self.is_round && is_outermost => return self.close("}", out),
            '{' => self.open("{", out),
            '[' => self.open("[", out),
            '}' => return self.close("}", out),
            ']' => return self.close("]", out),
            ',' => {
                self.end_word(out);
                self.has_comma = !self.is_empty;
                self.is_key = self.open.last() == Some(&true);
            }
            ':' | '=' if self.is_key => {
                self.end_word(out);
                out.arguments(": ");
                self.is_key = false;
            }
            '"' | '\'' if self.word.trim().is_empty() => {
                self.begin(out);
                out.arguments("\"");
                self.quoted = Some(c);
            }
            _ => self.word.push(c),
        }
        false
    }

    fn open(&mut self, bracket: &str, out: &mut Deltas) {
        self.end_word(out);
        self.begin(out);
        out.arguments(bracket);
        self.is_key = bracket == "{";
        self.is_empty = true;
        self.open.push(self.is_key);
    }

    /// Returns whether it was the last bracket.
    fn close(&mut self, bracket: &str, out: &mut Deltas) -> bool {
        self.end_word(out);
        out.arguments(bracket);
        self.open.pop();
        (self.is_key, self.is_empty, self.has_comma) = (false, false, false);
        self.open.is_empty()
    }

    /// Takes a character of a string in quotes, with escapes as in JSON.
    fn take_quoted(&mut self, c: char, quote: char, out: &mut Deltas) {
        let mut bytes = [0; 4];
        let text = c.encode_utf8(&mut bytes);
        if std::mem::take(&mut self.is_escaped) {
            if c != '\'' {
                out.arguments("\\");
            }
            out.arguments(text);
        } else if c == '\\' {
            self.is_escaped = true;
        } else if c == quote {
            out.arguments("\"");
            self.quoted = None;
        } else {
            write_text(text, out);
        }
    }

    /// Takes a mark: a string begins or ends.
    fn quote(&mut self, out: &mut Deltas) {
        if !self.is_in_text {
            self.end_word(out);
            self.begin(out);
        }
        out.arguments("\"");
        self.is_in_text = !self.is_in_text;
    }

    /// Writes what precedes a key or a value.
    fn begin(&mut self, out: &mut Deltas) {
        if std::mem::take(&mut self.has_comma) {
            out.arguments(", ");
        }
        self.is_empty = false;
    }

    /// Writes the bare text, if there is any: numbers, true, false and null as they are, Python's words as JSON's, anything else
    /// as a string.
    fn end_word(&mut self, out: &mut Deltas) {
        let word = std::mem::take(&mut self.word);
        let word = word.trim();
        if word.is_empty() {
            return;
        }
        self.begin(out);
        let is_value = !self.is_key;
        let json = match word {
            "None" if is_value => "null".to_owned(),
            "True" | "False" if is_value => word.to_lowercase(),
            _ if is_value && serde_json::from_str::<IgnoredAny>(word).is_ok() => word.to_owned(),
            _ => Value::from(word).to_string(),
        };
        out.arguments(&json);
    }
}

/// Writes a part of a string.
fn write_text(text: &str, out: &mut Deltas) {
    let json = Value::from(text).to_string();
    out.arguments(&json[1..json.len() - 1]);
}
