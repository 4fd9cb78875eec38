//! The parser for dialects that write a call as a JSON object, or as a name followed by its arguments as an object.

mod object;

use std::sync::Arc;

use object::{CallObject, ObjectStep};

use super::ToolSchemas;
use crate::markup::{Deltas, MarkupParser, Prose, Scan, ValueScan, ValueStep, scan};

/// A dialect of this kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct JsonMarks {
    /// Each begins a call, or a list of calls.
    pub(super) starts: &'static [&'static str],
    /// Each ends it. If there are none, the end of the JSON does.
    pub(super) ends: &'static [&'static str],
    /// Markers around calls, which are dropped.
    pub(super) ignored: &'static [&'static str],
    /// The form of the text after the start.
    pub(super) shape: Shape,
    /// Whether an object at the beginning of the answer, or a list of them, may be calls without a marker.
    pub(super) is_bare: bool,
}

impl JsonMarks {
    /// Every marker: first the starts, then the ends, then the others.
    fn all(&self) -> impl Iterator<Item = &'static str> + Clone + use<> {
        let (starts, ends) = (self.starts.iter(), self.ends);
        starts.chain(ends).chain(self.ignored).copied()
    }
}

/// The form of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// `{"name": ..., "arguments": {...}}`, or a list of them.
    Object,
    /// `{NAME: {...}}`, or a list of them.
    Keyed,
    /// A header, a marker, and the arguments.
    Named(Header),
    /// A list or an object as in [`Shape::Object`] if it begins like one, otherwise as in [`Shape::Named`].
    Either(Header),
}

/// The text before a call's arguments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    /// Ends the header; so does the brace that opens the arguments.
    pub(super) end: &'static str,
    /// Returns name and id from the header's text.
    pub(super) read: fn(&str) -> (&str, &str),
}

impl PartialEq for Header {
    fn eq(&self, other: &Self) -> bool {
        self.end == other.end
    }
}

impl Eq for Header {}

enum State {
    /// Running text.
    Outside,
    /// After a start, and between the objects of a list.
    Between,
    Object(Box<CallObject>),
    Header(String),
    /// Before the arguments of a named call.
    Arguments,
    Value(ValueScan),
    /// Arguments that are not JSON, up to the end marker.
    Raw,
    /// After the arguments of a named call.
    Tail,
    /// Text where none is allowed.
    Junk,
}

/// The next element inside a call.
enum Next {
    Char(char),
    Start,
    End,
    Ignored,
    HeaderEnd,
    /// The text is used up, except what may become a marker.
    Wait,
}

pub(super) struct JsonParser {
    marks: &'static JsonMarks,
    tools: Arc<ToolSchemas>,
    state: State,
    /// Whether anything but white space has come.
    has_begun: bool,
    /// Whether the current calls began without a marker.
    is_bare: bool,
    content: Prose,
    held: String,
    /// How much of `held` was consumed.
    at: usize,
    /// Bytes after `at`, at the beginning of an answer, that were already scanned: white space, and the bracket of a list.
    passed: usize,
    /// That bracket's place after `at`.
    bracket: Option<usize>,
    /// Whether the model was cut off.
    is_cut: bool,
    /// Whether all of the answer is calls, so that the beginning of one is no content.
    is_forced: bool,
}

impl JsonParser {
    pub(super) fn new(marks: &'static JsonMarks, tools: Arc<ToolSchemas>) -> Self {
        Self {
            marks,
            tools,
            state: State::Outside,
            has_begun: false,
            is_bare: false,
            content: Prose::content(),
            held: String::new(),
            at: 0,
            passed: 0,
            bracket: None,
            is_cut: false,
            is_forced: false,
        }
    }

    /// A parser of the text after a start; `content` came before it.
    pub(super) fn behind_start(
        marks: &'static JsonMarks,
        tools: Arc<ToolSchemas>,
        content: Prose,
    ) -> Self {
        Self {
            state: State::Between,
            has_begun: true,
            content,
            ..Self::new(marks, tools)
        }
    }

    /// A parser of text that is a list of calls from its beginning.
    pub(super) fn inside(marks: &'static JsonMarks, tools: Arc<ToolSchemas>) -> Self {
        Self {
            state: State::Between,
            is_forced: true,
            ..Self::new(marks, tools)
        }
    }

    fn rest(&self) -> &str {
        self.held.get(self.at..).unwrap_or_default()
    }

    fn run(&mut self, is_end: bool, out: &mut Deltas) {
        while self.step(is_end, out) {}
        self.held.drain(..self.at);
        self.at = 0;
    }

    /// Consumes some text; false if it must wait for more.
    fn step(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        match self.state {
            State::Outside => self.outside(is_end, out),
            State::Junk => self.prose(is_end, out),
            State::Between
            | State::Object(_)
            | State::Header(_)
            | State::Arguments
            | State::Value(_)
            | State::Raw
            | State::Tail => match self.next(is_end) {
                Next::Wait => false,
                Next::Char(c) => {
                    self.take(c, out);
                    true
                }
                Next::HeaderEnd => {
                    self.end_header(out);
                    true
                }
                Next::Ignored => true,
                Next::End => {
                    self.end_call(out);
                    self.state = State::Outside;
                    true
                }
                Next::Start => {
                    self.end_call(out);
                    self.begin();
                    true
                }
            },
        }
    }

    /// Begins calls, which a marker announced.
    fn begin(&mut self) {
        self.is_bare = false;
        self.state = State::Between;
    }

    fn outside(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        if !self.has_begun && self.marks.is_bare {
            let text = self.held.get(self.at + self.passed..);
            let mut text = text.unwrap_or_default().trim_start();
            if self.bracket.is_none()
                && let Some(list) = text.strip_prefix('[')
            {
                self.bracket = Some(self.held.len() - self.at - text.len());
                text = list.trim_start();
            }
            if text.is_empty() && !is_end {
                self.passed = self.held.len() - self.at;
                return false;
            }
            if text.starts_with('{') {
                let object = self.held.len() - text.len();
                let begin = self.bracket.map_or(object, |bracket| self.at + bracket);
                let gap = self.held.get(self.at..begin).unwrap_or_default();
                self.content.push(gap, out);
                let opening = self.held.get(begin..object).unwrap_or_default();
                let call = CallObject::new(Some(Arc::clone(&self.tools)), false, opening);
                self.at = object;
                self.has_begun = true;
                self.is_bare = true;
                self.state = State::Object(Box::new(call));
                return true;
            }
        }
        self.has_begun = true;
        self.prose(is_end, out)
    }

    /// Running text, up to the next marker.
    fn prose(&mut self, is_end: bool, out: &mut Deltas) -> bool {
        let JsonMarks { starts, ends, .. } = self.marks;
        let text = self.held.get(self.at..).unwrap_or_default();
        match scan(text, self.marks.all()) {
            Scan::Marker { which, start, end } => {
                self.content.push(&text[..start], out);
                self.content.markup();
                self.at += end;
                if which < starts.len() {
                    self.begin();
                } else if which < starts.len() + ends.len() {
                    self.state = State::Outside;
                }
                true
            }
            Scan::Text { sure } => {
                let sure = if is_end { text.len() } else { sure };
                self.content.push(&text[..sure], out);
                self.at += sure;
                false
            }
        }
    }

    fn is_in_string(&self) -> bool {
        match &self.state {
            State::Object(object) => object.is_in_string(),
            State::Value(scan) => scan.is_in_string(),
            State::Outside
            | State::Between
            | State::Header(_)
            | State::Arguments
            | State::Raw
            | State::Tail
            | State::Junk => false,
        }
    }

    /// The next marker or character. Inside a JSON string, nothing is a marker.
    fn next(&mut self, is_end: bool) -> Next {
        let Some(c) = self.rest().chars().next() else {
            return Next::Wait;
        };
        if !self.is_in_string() {
            let mut waits = false;
            let rest = self.rest();
            for (marker, next) in self.markers() {
                if rest.starts_with(marker) {
                    self.at += marker.len();
                    return next;
                }
                waits |= !is_end && marker.starts_with(rest);
            }
            if waits {
                return Next::Wait;
            }
        }
        self.at += c.len_utf8();
        Next::Char(c)
    }

    /// The markers that are valid inside a call.
    fn markers(&self) -> impl Iterator<Item = (&'static str, Next)> + use<> {
        let header = match (&self.state, self.marks.shape) {
            (State::Header(_), Shape::Named(header) | Shape::Either(header)) => Some(header.end),
            _ => None,
        };
        let of = |markers: &'static [&'static str]| markers.iter().copied();
        let ends = of(self.marks.ends).map(|marker| (marker, Next::End));
        let starts = of(self.marks.starts).map(|marker| (marker, Next::Start));
        let ignored = of(self.marks.ignored).map(|marker| (marker, Next::Ignored));
        let header = header.map(|marker| (marker, Next::HeaderEnd));
        ends.chain(starts).chain(ignored).chain(header)
    }

    fn take(&mut self, c: char, out: &mut Deltas) {
        match &mut self.state {
            State::Outside | State::Junk => {}
            State::Between => self.between(c, out),
            State::Object(object) => match object.take(c, out) {
                ObjectStep::Inside => {}
                ObjectStep::Last => self.end_object(true, out),
                ObjectStep::Broken => self.end_object(false, out),
            },
            State::Header(_) if c == '{' => {
                self.end_header(out);
                self.take(c, out);
            }
            State::Header(header) => header.push(c),
            State::Arguments => self.begin_arguments(c, out),
            State::Value(scan) => match scan.take(c) {
                ValueStep::Inside => out.arguments(c.encode_utf8(&mut [0; 4])),
                ValueStep::Last => {
                    out.arguments(c.encode_utf8(&mut [0; 4]));
                    self.state = if self.marks.ends.is_empty() {
                        State::Outside
                    } else {
                        State::Tail
                    };
                }
                ValueStep::Behind => self.reread(c, State::Tail),
            },
            State::Raw => out.arguments(c.encode_utf8(&mut [0; 4])),
            // A code fence that was opened before the arguments may close here.
            State::Tail if c.is_whitespace() || c == '`' => {}
            State::Tail => self.reread(c, State::Junk),
        }
    }

    /// Switches to another state, and reprocesses the character just taken.
    fn reread(&mut self, c: char, state: State) {
        self.at -= c.len_utf8();
        self.state = state;
    }

    fn between(&mut self, c: char, out: &mut Deltas) {
        let shape = self.marks.shape;
        let is_object = match shape {
            Shape::Object | Shape::Keyed => true,
            Shape::Named(_) => false,
            Shape::Either(_) => matches!(c, '[' | '{' | ']' | ',' | ';' | '}'),
        };
        match c {
            _ if c.is_whitespace() => {}
            '{' if is_object => {
                let tools = self.is_bare.then(|| Arc::clone(&self.tools));
                let object = CallObject::new(tools, shape == Shape::Keyed, "");
                self.state = State::Object(Box::new(object));
                self.take(c, out);
            }
            ']' if is_object && (self.is_bare || self.marks.ends.is_empty()) => {
                self.state = State::Outside;
            }
            '[' | ']' | ',' | ';' | '}' if is_object => {}
            _ if !matches!(shape, Shape::Object | Shape::Keyed) => {
                self.state = State::Header(String::new());
                self.take(c, out);
            }
            _ if self.marks.ends.is_empty() => self.reread(c, State::Outside),
            _ => self.reread(c, State::Junk),
        }
    }

    /// Ends the object. One that is not whole, or not a call, is content, as far as it was not reported.
    fn end_object(&mut self, is_whole: bool, out: &mut Deltas) {
        let State::Object(mut object) = std::mem::replace(&mut self.state, State::Outside) else {
            return;
        };
        if is_whole && object.close(out) {
            self.content.markup();
            self.state = State::Between;
            return;
        }
        self.content
            .push_without(self.marks.all(), object.raw(), out);
        if !self.is_bare && !self.marks.ends.is_empty() {
            self.state = State::Junk;
        }
    }

    fn end_header(&mut self, out: &mut Deltas) {
        let (Shape::Named(header) | Shape::Either(header)) = self.marks.shape else {
            return;
        };
        let State::Header(text) = std::mem::replace(&mut self.state, State::Arguments) else {
            return;
        };
        let (name, id) = (header.read)(&text);
        out.tool_call(name, id);
        self.content.markup();
    }

    fn begin_arguments(&mut self, c: char, out: &mut Deltas) {
        match c {
            _ if c.is_whitespace() => {}
            '{' | '[' => {
                let mut scan = ValueScan::default();
                scan.take(c);
                out.arguments(c.encode_utf8(&mut [0; 4]));
                self.state = State::Value(scan);
            }
            _ => self.reread(c, State::Raw),
        }
    }

    /// A marker ends the current call.
    fn end_call(&mut self, out: &mut Deltas) {
        match &self.state {
            State::Object(_) => self.end_object(true, out),
            State::Header(header) if !header.trim().is_empty() => {
                self.end_header(out);
                out.arguments("{}");
            }
            State::Arguments => out.arguments("{}"),
            State::Outside
            | State::Between
            | State::Header(_)
            | State::Value(_)
            | State::Raw
            | State::Tail
            | State::Junk => {}
        }
        self.content.markup();
    }
}

impl MarkupParser for JsonParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        self.held.push_str(text);
        self.run(false, out);
    }

    fn cut_short(&mut self) {
        self.is_cut = true;
    }

    fn finish(&mut self, out: &mut Deltas) {
        self.run(true, out);
        match std::mem::replace(&mut self.state, State::Outside) {
            State::Object(mut object) => {
                let is_call = if self.is_bare {
                    false
                } else if self.is_cut || object.has_open_arguments() {
                    object.cut_short(out)
                } else {
                    object.close(out)
                };
                if !(is_call || self.is_forced && self.is_cut) {
                    self.content
                        .push_without(self.marks.all(), object.raw(), out);
                }
            }
            State::Header(text) => self.content.push(&text, out),
            State::Arguments if !self.is_cut => out.arguments("{}"),
            State::Outside
            | State::Between
            | State::Arguments
            | State::Value(_)
            | State::Raw
            | State::Tail
            | State::Junk => {}
        }
        self.content.finish(out);
    }

    fn is_in_call(&self) -> bool {
        self.is_in_string()
    }
}
