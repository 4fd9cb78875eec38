//! The parser for dialects with a tag for each parameter, whose values are bare text.

mod value;

use std::sync::Arc;

use serde_json::Value;
pub(super) use value::BareValue;

use super::ToolSchemas;
use super::aside::Aside;
use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan, trim_start_len};

/// A dialect of this kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct XmlMarks {
    /// Markers around calls, which are dropped.
    pub(super) ignored: &'static [&'static str],
    /// Begins a call; the tool's name follows.
    pub(super) call: &'static str,
    /// Ends the name. If `None`, white space or the next marker does.
    pub(super) name_end: Option<&'static str>,
    /// Ends the call.
    pub(super) call_end: &'static str,
    /// Begins a parameter; its key follows.
    pub(super) key: &'static str,
    /// Ends the key.
    pub(super) key_end: &'static str,
    /// Begins the value, unless the end of the key does.
    pub(super) value: Option<&'static str>,
    /// Ends the value.
    pub(super) value_end: &'static str,
    /// The end of the call and the beginning of a parameter, each after a line break: they may end a value whose end marker
    /// the model omitted. And the beginning of the end marker, in case that the rest is wrong. The line break belongs to the
    /// value.
    pub(super) value_stops: Option<[&'static str; 3]>,
    /// Whether a value is on lines of its own.
    pub(super) is_on_lines: bool,
    /// The same dialect with other markers. The answer's first marker decides.
    pub(super) other: Option<&'static XmlMarks>,
}

impl XmlMarks {
    /// Every marker.
    pub(super) fn all(&self) -> Vec<&'static str> {
        let inner = [self.key, self.key_end, self.value_end];
        let inner = inner.into_iter().chain(self.name_end).chain(self.value);
        let others = self.other.into_iter().flat_map(XmlMarks::all);
        self.outer().chain(inner).chain(others).collect()
    }

    /// The markers outside of calls: first the one that begins a call.
    fn outer(&self) -> impl Iterator<Item = &'static str> + Clone + use<> {
        let (own, ignored) = ([self.call, self.call_end], self.ignored);
        own.into_iter().chain(ignored.iter().copied())
    }

    /// The end of the key if it is a tag, which says that a key precedes it even if the mark of the key is missing.
    fn key_end_tag(&self) -> Option<&'static str> {
        self.key_end.starts_with("</").then_some(self.key_end)
    }
}

enum State {
    Outside,
    Name,
    /// In a call, between parameters.
    Parameters,
    Key,
    /// Between a key and its value. The text here may say whether the value is a string.
    Gap,
    Value(BareValue),
}

/// The next step after a piece of a value.
enum Then {
    Wait,
    GoOn,
    Close,
}

/// An end marker within a value that more white space than this (in bytes) follows does not end the call.
const MAX_BLANK_BYTES: usize = 64;

/// A wrong end marker is at most this much (in bytes) longer than it should be.
const MAX_BROKEN_BYTES: usize = 16;

/// A name longer than this (in bytes) is not a name but content.
const MAX_NAME_BYTES: usize = 1024;

pub(super) struct XmlParser {
    marks: &'static XmlMarks,
    tools: Arc<ToolSchemas>,
    state: State,
    name: String,
    key: String,
    /// The parameters given in the current call so far.
    keys: Vec<String>,
    content: Prose,
    aside: Aside,
    held: String,
    /// The part of an unfinished key or gap that was already scanned.
    passed: String,
    /// Whether the text between parameters is too long for a key.
    is_prose: bool,
    /// Whether the text has ended.
    is_over: bool,
    /// Whether the model was cut off.
    is_cut: bool,
}

impl XmlParser {
    pub(super) fn new(marks: &'static XmlMarks, tools: Arc<ToolSchemas>) -> Self {
        Self {
            marks,
            tools,
            state: State::Outside,
            name: String::new(),
            key: String::new(),
            keys: Vec::new(),
            content: Prose::content(),
            aside: Aside::default(),
            held: String::new(),
            passed: String::new(),
            is_prose: false,
            is_over: false,
            is_cut: false,
        }
    }

    /// Removes and returns the first `len` bytes of the held text.
    fn cut(&mut self, len: usize) -> String {
        self.held.drain(..len).collect()
    }

    /// Consumes text up to and including a marker; false if it must wait for more.
    fn step(&mut self, out: &mut Deltas) -> bool {
        match self.state {
            State::Outside => self.outside(out),
            State::Name => self.name(out),
            State::Parameters => self.parameters(out),
            State::Key => self.key(out),
            State::Gap => self.gap(out),
            State::Value(_) => self.value(out),
        }
    }

    fn outside(&mut self, out: &mut Deltas) -> bool {
        let marks = self.marks;
        let others = marks.other.into_iter().flat_map(XmlMarks::outer);
        match scan(&self.held, marks.outer().chain(others)) {
            Scan::Marker { which, start, end } => {
                let text = self.cut(end);
                self.content.push(&text[..start], out);
                self.content.markup();
                let own = marks.outer().count();
                let which = match marks.other {
                    Some(other) if which >= own => {
                        self.marks = other;
                        which - own
                    }
                    Some(_) | None => which,
                };
                if which == 0 {
                    self.state = State::Name;
                }
                true
            }
            Scan::Text { sure } => {
                let text = self.cut(sure);
                self.content.push(&text, out);
                false
            }
        }
    }

    /// The name ends at any marker, or at white space if the dialect has no marker for it. If the model omitted the mark of the
    /// first key, the key follows the name.
    fn name(&mut self, out: &mut Deltas) -> bool {
        let marks = self.marks;
        let own = [marks.call_end, marks.key, marks.call, marks.value_end];
        let others = own.into_iter().chain(marks.ignored.iter().copied());
        let others = others.chain(marks.key_end_tag());
        let (len, taken) = match scan(&self.held, marks.name_end.into_iter().chain(others)) {
            Scan::Marker { which, start, end } => {
                let is_end = which == 0 && marks.name_end.is_some();
                (start, Some(if is_end { end } else { start }))
            }
            Scan::Text { sure } => (sure, None),
        };
        let blank = trim_start_len(&self.held);
        let name = self.held.get(blank..len).unwrap_or_default();
        let space = name.find(char::is_whitespace).map(|len| blank + len);
        let (len, taken) = match (space.filter(|_| marks.name_end.is_none()), taken) {
            (Some(space), _) => (space, space),
            // Independent of how the text is cut: the certain part grows up to the marker.
            (None, _) if len > MAX_NAME_BYTES => {
                self.state = State::Outside;
                return true;
            }
            (None, Some(taken)) => (len, taken),
            (None, None) => return false,
        };
        let text = self.cut(taken);
        // Other attributes may follow the name.
        let name = text[..len].split('"').next().unwrap_or_default().trim();
        let is_with_key = |mark: &str| self.held.starts_with(mark);
        let (name, key) = match marks.key_end_tag().is_some_and(is_with_key) {
            true => self.tools.split_key(name),
            false => (name, ""),
        };
        name.clone_into(&mut self.name);
        self.held.insert_str(0, key);
        self.keys.clear();
        self.state = if self.name.is_empty() {
            State::Outside
        } else {
            out.tool_call(&self.name, "");
            State::Parameters
        };
        true
    }

    fn parameters(&mut self, out: &mut Deltas) -> bool {
        let marks = self.marks;
        let own = [marks.key, marks.call_end, marks.call, marks.value_end];
        let markers = own.into_iter().chain(marks.ignored.iter().copied());
        let key_end = marks.key_end_tag();
        let (which, start, end) = match scan(&self.held, markers.chain(key_end)) {
            Scan::Marker { which, start, end } => (which, start, end),
            // It may be a key whose mark the model omitted.
            Scan::Text { sure }
                if key_end.is_some() && !self.is_prose && sure <= MAX_NAME_BYTES =>
            {
                return false;
            }
            Scan::Text { sure } => {
                self.is_prose = true;
                let text = self.cut(sure);
                self.aside.push(&text, &mut self.content);
                return false;
            }
        };
        let text = self.cut(end);
        let may_be_key = !std::mem::take(&mut self.is_prose) && start <= MAX_NAME_BYTES;
        let key = text[..start].trim();
        if may_be_key && key_end.is_some_and(|mark| &text[start..] == mark) && is_word(key) {
            key.clone_into(&mut self.key);
            self.content.markup();
            self.state = State::Gap;
            return true;
        }
        self.aside.push(&text[..start], &mut self.content);
        self.content.markup();
        match which {
            0 => self.state = State::Key,
            1 => {
                self.close(out);
                self.state = State::Outside;
            }
            2 => {
                self.close(out);
                self.state = State::Name;
            }
            // A stray end of a value: the value that contained this marker ended too early.
            3 => {}
            // A wrapper that ends here ends the call; one that begins here is dropped.
            _ if marks.ignored.get(which - own.len()).is_some_and(is_closing) => {
                self.close(out);
                self.state = State::Outside;
            }
            _ => {}
        }
        true
    }

    fn close(&mut self, out: &mut Deltas) {
        out.arguments(if self.keys.is_empty() { "{}" } else { "}" });
        self.aside.give(out);
    }

    fn key(&mut self, out: &mut Deltas) -> bool {
        let Some(text) = self.cut_to(self.marks.key_end) else {
            return false;
        };
        // Some models write the mark twice.
        let key = text.rsplit(self.marks.key).next().unwrap_or_default();
        key.trim().clone_into(&mut self.key);
        if self.marks.value.is_some() {
            self.state = State::Gap;
        } else {
            self.begin_value("", out);
        }
        true
    }

    fn gap(&mut self, out: &mut Deltas) -> bool {
        let Some(mark) = self.marks.value else {
            return false;
        };
        let marks = self.marks;
        let next = marks
            .key_end_tag()
            .map(|_| [marks.call_end, marks.key, marks.call]);
        let markers = [mark, marks.value_end].into_iter();
        match scan(&self.held, markers.chain(next.into_iter().flatten())) {
            Scan::Marker {
                which: 0,
                start,
                end,
            } => {
                let mut attributes = std::mem::take(&mut self.passed);
                attributes.push_str(&self.held[..start]);
                self.held.drain(..end);
                self.begin_value(&attributes, out);
                true
            }
            // The model omitted the mark: what came is the value.
            Scan::Marker { which: 1, .. } => {
                let passed = std::mem::take(&mut self.passed);
                self.held.insert_str(0, &passed);
                self.begin_value("", out);
                true
            }
            // It omitted the end of the value too.
            Scan::Marker { start, .. } => {
                let mut value = std::mem::take(&mut self.passed);
                value.push_str(&self.held[..start]);
                let value = [value.trim(), marks.value_end].concat();
                self.held.replace_range(..start, &value);
                self.begin_value("", out);
                true
            }
            Scan::Text { sure } => {
                self.passed.push_str(&self.held[..sure]);
                self.held.drain(..sure);
                false
            }
        }
    }

    /// The text up to `mark`, which is consumed too; `None` if it has not come yet.
    fn cut_to(&mut self, mark: &str) -> Option<String> {
        match scan(&self.held, [mark]) {
            Scan::Marker { start, end, .. } => {
                let mut text = std::mem::take(&mut self.passed);
                text.push_str(&self.held[..start]);
                self.held.drain(..end);
                Some(text)
            }
            Scan::Text { sure } => {
                self.passed.push_str(&self.held[..sure]);
                self.held.drain(..sure);
                None
            }
        }
    }

    /// `attributes` is the text between key and value.
    fn begin_value(&mut self, attributes: &str, out: &mut Deltas) {
        self.open_parameter(out);
        out.arguments(": ");
        let has = |attribute: &str| attributes.contains(attribute);
        let is_text = if has("string=\"true\"") || has("type=\"string\"") {
            true
        } else if has("string=\"false\"") || has("type=\"") {
            false
        } else {
            self.tools.is_text(&self.name, &self.key)
        };
        self.state = State::Value(BareValue::new(is_text, self.marks.is_on_lines));
    }

    fn value(&mut self, out: &mut Deltas) -> bool {
        let stops = self.marks.value_stops.into_iter().flatten();
        let ends = [self.marks.value_end].into_iter().chain(stops);
        let (len, taken, then) = match scan(&self.held, ends) {
            Scan::Marker {
                which: 0,
                start,
                end,
            } => (start, end, Then::Close),
            Scan::Marker {
                which: 3,
                start,
                end,
            } => match self.broken_end(&self.held[end..]) {
                Some(0) => (start + 1, start + 1, Then::GoOn),
                Some(len) => (start + 1, end + len, Then::Close),
                None => (start, start, Then::Wait),
            },
            Scan::Marker { which, start, end } => {
                let rest = &self.held[end..];
                let is_stop = match which {
                    1 => self.ends_call(rest),
                    _ => self.begins_parameter(rest),
                };
                match is_stop {
                    Some(true) => (start + 1, start + 1, Then::Close),
                    Some(false) => (start + 1, start + 1, Then::GoOn),
                    None => (start, start, Then::Wait),
                }
            }
            Scan::Text { sure } => (sure, sure, Then::Wait),
        };
        let text = self.cut(taken);
        let State::Value(value) = &mut self.state else {
            return false;
        };
        value.push(&text[..len], |json| out.arguments(json));
        match then {
            Then::Wait => false,
            Then::GoOn => true,
            Then::Close => {
                value.close(|text| self.tools.guess(&self.name, &self.key, text), out);
                self.state = State::Parameters;
                true
            }
        }
    }

    /// Whether a call's end marker within a value is real, judged by the text after it: the end of the text, or text between
    /// calls. `None` while that is open.
    fn ends_call(&self, rest: &str) -> Option<bool> {
        let blank = trim_start_len(rest);
        if blank > MAX_BLANK_BYTES {
            return Some(false);
        }
        let rest = &rest[blank..];
        let others = self.marks.ignored.iter().copied();
        let mut next = [self.marks.call].into_iter().chain(others);
        if next.clone().any(|marker| rest.starts_with(marker)) {
            return Some(true);
        }
        if next.any(|marker| marker.starts_with(rest)) {
            return self.is_over.then_some(true);
        }
        Some(false)
    }

    /// The length in bytes of the rest of an end marker, which may be wrong, as in `</parameter/>` and `</parameter1>`: then
    /// the white space after it counts too, and the next part of the call must follow. 0 if it is no end marker; `None` while
    /// that is open.
    fn broken_end(&self, rest: &str) -> Option<usize> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/');
        let after = rest.trim_start_matches(is_name);
        let name_len = rest.len() - after.len();
        if name_len > MAX_BROKEN_BYTES {
            return Some(0);
        }
        if after.is_empty() {
            return self.is_over.then_some(0);
        }
        let next = match after.strip_prefix('>') {
            Some(_) if name_len == 0 => return Some(1),
            Some(next) => next,
            None => after,
        };
        let blank = trim_start_len(next);
        if blank > MAX_BLANK_BYTES {
            return Some(0);
        }
        let next = &next[blank..];
        let own = [self.marks.call_end, self.marks.key];
        let mut parts = own.into_iter().chain(self.marks.ignored.iter().copied());
        if parts.clone().any(|marker| next.starts_with(marker)) {
            return Some(rest.len() - next.len());
        }
        if parts.any(|marker| marker.starts_with(next)) {
            return self.is_over.then_some(rest.len() - next.len());
        }
        Some(0)
    }

    /// Whether a parameter's start marker within a value is real, judged by the text after it: a parameter of the tool that
    /// the call does not have yet. `None` while that is open.
    fn begins_parameter(&self, rest: &str) -> Option<bool> {
        let line = rest.split('\n').next().unwrap_or_default();
        let is_open = !self.is_over && line.len() == rest.len() && line.len() <= MAX_NAME_BYTES;
        match scan(line, [self.marks.key_end]) {
            Scan::Marker { start, .. } if start <= MAX_NAME_BYTES => {
                let key = line[..start].trim();
                let is_new = !self.keys.iter().any(|given| given == key);
                Some(is_new && self.tools.has_parameter(&self.name, key))
            }
            Scan::Text { .. } if is_open => None,
            Scan::Marker { .. } | Scan::Text { .. } => Some(false),
        }
    }

    /// Writes what precedes a value: the brace or comma, and the key.
    fn open_parameter(&mut self, out: &mut Deltas) {
        out.arguments(if self.keys.is_empty() { "{" } else { ", " });
        out.arguments(&Value::from(self.key.as_str()).to_string());
        self.keys.push(self.key.clone());
    }
}

impl MarkupParser for XmlParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    fn cut_short(&mut self) {
        self.is_cut = true;
    }

    /// Ends a call whose end the model omitted, unless it was cut off.
    fn finish(&mut self, out: &mut Deltas) {
        self.is_over = true;
        while self.step(out) {}
        // Without the mark of a value, what came is the value, as before an end of the call.
        let has_key_tag = self.marks.key_end_tag().is_some();
        if matches!(self.state, State::Gap) && has_key_tag && !self.is_cut {
            self.held.push_str(self.marks.call_end);
            while self.step(out) {}
        }
        let rest = std::mem::take(&mut self.held);
        match &mut self.state {
            State::Outside | State::Name => self.content.push(&rest, out),
            State::Parameters => {
                self.aside.push(&rest, &mut self.content);
                if !self.is_cut {
                    self.close(out);
                }
            }
            // A key without a value is left out.
            State::Key | State::Gap if !self.is_cut => self.close(out),
            State::Key => {
                self.key = std::mem::take(&mut self.passed) + &rest;
                self.open_parameter(out);
            }
            State::Gap => self.open_parameter(out),
            State::Value(value) => {
                value.push(&rest, |json| out.arguments(json));
                if self.is_cut {
                    value.cut_short(out);
                } else {
                    value.close(|text| self.tools.guess(&self.name, &self.key, text), out);
                    self.close(out);
                }
            }
        }
        self.aside.give(out);
        self.content.finish(out);
    }

    fn is_in_call(&self) -> bool {
        matches!(self.state, State::Value(_))
    }
}

pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && !text.contains(char::is_whitespace)
}

fn is_closing(marker: &&str) -> bool {
    marker.contains('/') || marker.contains("|close|")
}
