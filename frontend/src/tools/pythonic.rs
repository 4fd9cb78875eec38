//! The parser for dialects that write calls as a list of Python calls: `[get_weather(city="Oslo", days=3)]`.

use std::sync::Arc;

use super::ToolSchemas;
use super::json::{JsonMarks, JsonParser};
use super::literal::arguments_json;
use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan};

/// A dialect of this kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PythonicMarks {
    /// Each begins calls.
    pub(super) starts: &'static [&'static str],
    /// Each ends them.
    pub(super) ends: &'static [&'static str],
    /// Whether a list at the beginning of the answer may contain calls without a marker.
    pub(super) is_bare: bool,
    /// The same markers, if calls between them may also be JSON objects.
    pub(super) json: Option<&'static JsonMarks>,
}

/// Around code. A start that begins with it opens a fence, which a further one closes.
const FENCE: &str = "```";

/// Text longer than this (in bytes) is not a call, because a call is held in memory to its end.
const MAX_CALL_BYTES: usize = 1 << 20;

enum State {
    Outside,
    /// After a start, or between calls.
    Between,
    /// In a call; the held text begins with its name.
    Call(CallScan),
}

pub(super) struct PythonicParser {
    marks: &'static PythonicMarks,
    tools: Arc<ToolSchemas>,
    state: State,
    has_begun: bool,
    /// Whether the current list began without a marker: its bracket ends it.
    is_bare: bool,
    content: Prose,
    held: String,
    /// Bytes at the beginning of an answer that were already scanned: white space, and the bracket of a list.
    passed: usize,
    /// Whether they include that bracket.
    has_bracket: bool,
    /// Reads the rest of an answer whose calls are JSON objects.
    json: Option<Box<JsonParser>>,
    /// Whether the model was cut off.
    is_cut: bool,
}

/// Follows one call to its closing parenthesis.
#[derive(Default)]
struct CallScan {
    /// Bytes already scanned.
    at: usize,
    /// The position of the parenthesis after the name.
    open: Option<usize>,
    depth: usize,
    string: Option<OpenString>,
    is_escaped: bool,
}

/// A string that is not over.
#[derive(Clone, Copy)]
enum OpenString {
    /// After its first quote, or after two, which are an empty string if no third one follows.
    Begun { quote: char, is_second: bool },
    /// Within one quote on each side.
    Short { quote: char },
    /// Within three quotes on each side, after this many of the three that end it.
    Long { quote: char, ending: usize },
}

impl OpenString {
    fn begun(quote: char) -> Self {
        let is_second = false;
        Self::Begun { quote, is_second }
    }

    /// Whether it is an empty string, since `next` follows it.
    fn is_empty_before(self, next: char) -> bool {
        matches!(self, Self::Begun { quote, is_second: true } if next != quote)
    }

    /// The string after a further character; `None` if that ends it.
    fn after(self, c: char) -> Option<Self> {
        match self {
            Self::Begun { quote, is_second } if c == quote => Some(if is_second {
                Self::Long { quote, ending: 0 }
            } else {
                let is_second = true;
                Self::Begun { quote, is_second }
            }),
            Self::Begun { quote, .. } => Some(Self::Short { quote }),
            Self::Short { quote } => (c != quote).then_some(self),
            Self::Long { quote, ending } if c == quote => {
                let ending = ending + 1;
                (ending < 3).then_some(Self::Long { quote, ending })
            }
            Self::Long { quote, .. } => Some(Self::Long { quote, ending: 0 }),
        }
    }
}

/// The outcome of a call.
enum Found {
    Whole {
        open: usize,
        end: usize,
    },
    Unfinished,
    /// It is not a call.
    Nothing,
}

impl CallScan {
    fn scan(&mut self, text: &str) -> Found {
        for (offset, c) in text[self.at..].char_indices() {
            let here = self.at + offset;
            if self.open.is_none() {
                match c {
                    '(' if here > 0 => {
                        self.open = Some(here);
                        self.depth = 1;
                    }
                    _ if is_of_name(c) => {}
                    _ => return Found::Nothing,
                }
            } else {
                self.read(c);
            }
            if here >= MAX_CALL_BYTES {
                return Found::Nothing;
            }
            if let (Some(open), 0) = (self.open, self.depth) {
                return Found::Whole {
                    open,
                    end: here + 1,
                };
            }
        }
        self.at = text.len();
        Found::Unfinished
    }

    /// Reads a character after the opening parenthesis.
    fn read(&mut self, c: char) {
        if std::mem::take(&mut self.is_escaped) {
            return;
        }
        let string = self.string.take();
        match string.filter(|string| !string.is_empty_before(c)) {
            Some(string) => {
                self.is_escaped = c == '\\';
                self.string = string.after(c);
            }
            None => match c {
                '"' | '\'' => self.string = Some(OpenString::begun(c)),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => self.depth -= 1,
                _ => {}
            },
        }
    }
}

/// The call in `print(NAME(...))`, as Gemma 3 writes it; others as they are.
fn unprinted<'a>(name: &'a str, arguments: &'a str) -> (&'a str, &'a str) {
    let call = arguments.trim().strip_suffix(')');
    let call = call.and_then(|call| call.split_once('('));
    let is_name = |name: &str| !name.is_empty() && name.chars().all(is_of_name);
    let call = call.filter(|(printed, _)| name == "print" && is_name(printed));
    call.unwrap_or((name, arguments))
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

impl PythonicParser {
    pub(super) fn new(marks: &'static PythonicMarks, tools: Arc<ToolSchemas>) -> Self {
        Self {
            marks,
            tools,
            state: State::Outside,
            has_begun: false,
            is_bare: false,
            content: Prose::content(),
            held: String::new(),
            passed: 0,
            has_bracket: false,
            json: None,
            is_cut: false,
        }
    }

    fn run(&mut self, is_end: bool, out: &mut Deltas) {
        while self.json.is_none() && self.step(is_end, out) {}
        if let Some(json) = &mut self.json {
            json.push(&std::mem::take(&mut self.held), out);
        }
    }

    /// Calls are JSON objects from here on.
    fn become_json(&mut self, marks: &'static JsonMarks) {
        let content = std::mem::replace(&mut self.content, Prose::content());
        let mut json = JsonParser::behind_start(marks, Arc::clone(&self.tools), content);
        if self.is_cut {
            json.cut_short();
        }
        self.json = Some(Box::new(json));
    }

    fn give(&mut self, len: usize, out: &mut Deltas) {
        self.content.push(&self.held[..len], out);
        self.held.drain(..len);
    }

    fn step(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        match self.state {
            State::Outside => self.outside(is_end, out),
            State::Between => self.between(is_end),
            State::Call(_) => self.call(is_end, out),
        }
    }

    fn outside(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        if !self.has_begun && self.marks.is_bare {
            match self.opens_a_call() {
                Some(true) => {
                    self.has_begun = true;
                    self.is_bare = true;
                    self.state = State::Between;
                    return true;
                }
                None if !is_end => return false,
                Some(false) | None => {}
            }
        }
        self.has_begun = true;
        let markers = self.marks.starts.iter().chain(self.marks.ends).copied();
        match scan(&self.held, markers) {
            Scan::Marker { which, start, end } => {
                self.give(start, out);
                self.held.drain(..end - start);
                self.content.markup();
                if which < self.marks.starts.len() {
                    self.is_bare = false;
                    self.state = State::Between;
                }
                true
            }
            Scan::Text { sure } => {
                self.give(if is_end { self.held.len() } else { sure }, out);
                false
            }
        }
    }

    /// Whether the answer begins with a bracket and a call of an existing tool; `None` while that is open.
    fn opens_a_call(&mut self) -> Option<bool> {
        let mut inner = self.held[self.passed..].trim_start();
        if !self.has_bracket && !inner.is_empty() {
            match inner.strip_prefix('[') {
                Some(rest) => inner = rest.trim_start(),
                None => return Some(false),
            }
            self.has_bracket = true;
        }
        self.passed = self.held.len() - inner.len();
        if !self.has_bracket {
            return None;
        }
        let name_len = inner.find(|c| !is_of_name(c));
        match name_len {
            None if inner.is_empty() => None,
            None => {
                let may_be = self.tools.names().any(|name| name.starts_with(inner));
                if may_be { None } else { Some(false) }
            }
            Some(len) => Some(inner[len..].starts_with('(') && self.tools.has(&inner[..len])),
        }
    }

    fn between(&mut self, is_end: bool) -> bool {
        let blank = |c: char| c.is_whitespace() || matches!(c, '[' | ',' | ';');
        let skipped = self.held.len() - self.held.trim_start_matches(blank).len();
        self.held.drain(..skipped);
        let Some(first) = self.held.chars().next() else {
            return false;
        };
        let (starts, ends) = (self.marks.starts, self.marks.ends);
        let is_fenced = !self.is_bare && starts.iter().any(|start| start.starts_with(FENCE));
        let fence = is_fenced.then_some(&FENCE);
        let markers = starts.iter().chain(ends).chain(fence);
        for (which, marker) in markers.enumerate() {
            if self.held.starts_with(marker) {
                self.held.drain(..marker.len());
                self.is_bare = false;
                if which >= starts.len() {
                    self.state = State::Outside;
                }
                self.content.markup();
                return true;
            }
            if !is_end && marker.starts_with(self.held.as_str()) {
                return false;
            }
        }
        match (first, self.marks.json) {
            ('{', Some(marks)) => self.become_json(marks),
            (']', _) => {
                self.held.drain(..1);
                self.content.markup();
                if self.is_bare {
                    self.state = State::Outside;
                }
            }
            _ if first.is_alphabetic() || first == '_' => {
                self.state = State::Call(CallScan::default());
            }
            _ => self.state = State::Outside,
        }
        true
    }

    fn call(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        let State::Call(scan) = &mut self.state else {
            return false;
        };
        match scan.scan(&self.held) {
            Found::Whole { open, end } => {
                let (name, arguments) =
                    unprinted(&self.held[..open], &self.held[open + 1..end - 1]);
                if let Some(json) = arguments_json(arguments) {
                    self.content.markup();
                    out.tool_call(name, "");
                    out.arguments(&json);
                    self.held.drain(..end);
                    self.state = State::Between;
                } else {
                    self.give(end, out);
                    self.state = State::Outside;
                }
                true
            }
            Found::Unfinished if !is_end => false,
            Found::Unfinished | Found::Nothing => {
                self.state = State::Outside;
                true
            }
        }
    }
}

impl MarkupParser for PythonicParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        self.held.push_str(text);
        self.run(false, out);
    }

    fn cut_short(&mut self) {
        self.is_cut = true;
        if let Some(json) = &mut self.json {
            json.cut_short();
        }
    }

    fn finish(&mut self, out: &mut Deltas) {
        self.run(true, out);
        match &mut self.json {
            Some(json) => json.finish(out),
            None => self.content.finish(out),
        }
    }

    fn is_in_call(&self) -> bool {
        if let Some(json) = &self.json {
            return json.is_in_call();
        }
        matches!(&self.state, State::Call(scan) if scan.string.is_some())
    }
}
