//! The parser for a dialect whose tags are named after parameters and may be nested. A marker precedes each tag:
//! `]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>`.
//!
//! # Source
//! The parsers `minimax_m3` of vLLM and SGLang.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::ToolSchemas;
use super::aside::Aside;
use super::xml::{BareValue, is_word};
use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan, trim_start_len};

/// Precedes each tag.
pub(super) const MARKER: &str = "]<]minimax[>[";

/// Tags that may be tokens of their own.
pub(super) const TAGS: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// A tag that is longer than this (in bytes), with the white space before it, is text.
const MAX_TAG_BYTES: usize = 1024;

/// How deep elements may lie in each other. The tags of others are text.
const MAX_DEPTH: usize = 64;

/// What a tag says.
enum Tag<'t> {
    /// Calls follow.
    Calls,
    /// A call of this tool begins.
    Call(&'t str),
    /// A call ends, or all of them do.
    CallEnd,
    /// A parameter begins, or a part of one.
    Open(&'t str),
    Close(&'t str),
}

impl<'t> Tag<'t> {
    fn read(tag: &'t str) -> Self {
        match tag {
            "tool_call" => Self::Calls,
            "/tool_call" | "/invoke" => Self::CallEnd,
            _ => match (tag.strip_prefix("invoke name="), tag.strip_prefix('/')) {
                (Some(name), _) => Self::Call(name.trim_matches(['"', '\'']).trim()),
                (None, Some(name)) => Self::Close(name),
                (None, None) => Self::Open(tag),
            },
        }
    }
}

/// A parameter that is not a string, or a part of one.
#[derive(Default)]
struct Element {
    name: String,
    text: String,
    parts: Vec<(String, Value)>,
}

impl Element {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }
}

enum State {
    Outside,
    /// In a call, between parameters.
    Parameters,
    /// In a string parameter of this name, which is emitted as it arrives.
    Text(String, BareValue),
    /// In another parameter: the open elements, the outermost first.
    Elements(Vec<Element>),
}

pub(super) struct NestedParser {
    tools: Arc<ToolSchemas>,
    state: State,
    /// Whether a marker came, so that a tag comes next.
    is_at_tag: bool,
    /// The current call's tool.
    tool: String,
    /// Whether the current call has a parameter.
    has_keys: bool,
    content: Prose,
    aside: Aside,
    held: String,
    /// Whether the text has ended.
    is_over: bool,
    /// Whether the model was cut off.
    is_cut: bool,
}

impl NestedParser {
    pub(super) fn new(tools: Arc<ToolSchemas>) -> Self {
        Self {
            tools,
            state: State::Outside,
            is_at_tag: false,
            tool: String::new(),
            has_keys: false,
            content: Prose::content(),
            aside: Aside::default(),
            held: String::new(),
            is_over: false,
            is_cut: false,
        }
    }

    /// Consumes text up to and including a marker or a tag; false if it must wait for more.
    fn step(&mut self, out: &mut Deltas) -> bool {
        if self.is_at_tag {
            return self.tag(out);
        }
        match scan(&self.held, [MARKER]) {
            Scan::Marker { start, end, .. } => {
                self.give(start, out);
                self.held.drain(..end - start);
                self.content.markup();
                self.is_at_tag = true;
                true
            }
            Scan::Text { sure } => {
                let len = if self.is_over { self.held.len() } else { sure };
                self.give(len, out);
                false
            }
        }
    }

    /// Takes the first `len` bytes of the held text as text.
    fn give(&mut self, len: usize, out: &mut Deltas) {
        let text: String = self.held.drain(..len).collect();
        match &mut self.state {
            State::Outside => self.content.push(&text, out),
            State::Parameters => self.aside.push(&text, &mut self.content),
            State::Text(_, value) => value.push(&text, |json| out.arguments(json)),
            State::Elements(open) => {
                if let Some(element) = open.last_mut() {
                    element.text.push_str(&text);
                }
            }
        }
    }

    /// Takes the tag after a marker. A marker that no tag follows, or one that means nothing here, is a part of a string and
    /// left out elsewhere; what follows it is text.
    fn tag(&mut self, out: &mut Deltas) -> bool {
        let blank = trim_start_len(&self.held);
        let rest = &self.held[blank..];
        let end = rest.find('>');
        let is_begun = rest.is_empty() || (rest.starts_with('<') && end.is_none());
        if is_begun && self.held.len() <= MAX_TAG_BYTES && !self.is_over {
            return false;
        }
        self.is_at_tag = false;
        let end = end.filter(|end| rest.starts_with('<') && blank + end <= MAX_TAG_BYTES);
        let tag = end.map(|end| rest[1..end].trim().to_owned());
        if let (Some(end), Some(tag)) = (end, tag)
            && self.take(&tag, out)
        {
            self.held.drain(..=blank + end);
            self.content.markup();
        } else if let State::Text(_, value) = &mut self.state {
            value.push(MARKER, |json| out.arguments(json));
        }
        true
    }

    /// Returns whether the tag means something here.
    fn take(&mut self, tag: &str, out: &mut Deltas) -> bool {
        match (Tag::read(tag), &mut self.state) {
            (Tag::Calls, State::Outside | State::Parameters) => true,
            (Tag::CallEnd, State::Outside) | (Tag::Close(_), State::Parameters) => true,
            (Tag::Call(""), _) => false,
            (Tag::Call(name), State::Outside) => {
                self.begin(name, out);
                true
            }
            (Tag::Call(name), _) => {
                self.end_call(out);
                self.begin(name, out);
                true
            }
            (Tag::CallEnd, _) => {
                self.end_call(out);
                true
            }
            (Tag::Open(name), State::Parameters) if is_word(name) => {
                self.open_parameter(name, out);
                true
            }
            (Tag::Open(name), State::Elements(open)) if is_word(name) && open.len() < MAX_DEPTH => {
                open.push(Element::new(name));
                true
            }
            (Tag::Close(name), State::Text(key, value)) if key.as_str() == name => {
                value.close(str::to_owned, out);
                self.state = State::Parameters;
                true
            }
            (Tag::Close(name), State::Elements(open)) => {
                if open.iter().any(|element| element.name == name) {
                    self.close_elements(Some(name), out);
                }
                true
            }
            (Tag::Calls | Tag::Open(_) | Tag::Close(_), _) => false,
        }
    }

    fn begin(&mut self, name: &str, out: &mut Deltas) {
        out.tool_call(name, "");
        name.clone_into(&mut self.tool);
        self.has_keys = false;
        self.state = State::Parameters;
    }

    fn open_parameter(&mut self, name: &str, out: &mut Deltas) {
        out.arguments(if self.has_keys { ", " } else { "{" });
        out.arguments(&Value::from(name).to_string());
        out.arguments(": ");
        self.has_keys = true;
        self.state = if self.tools.is_text(&self.tool, name) {
            State::Text(name.to_owned(), BareValue::new(true, false))
        } else {
            State::Elements(vec![Element::new(name)])
        };
    }

    /// Ends the open elements, up to the innermost of this name if one is given.
    fn close_elements(&mut self, name: Option<&str>, out: &mut Deltas) {
        let State::Elements(open) = &mut self.state else {
            return;
        };
        let mut open = std::mem::take(open);
        while let Some(element) = open.pop() {
            let key = element.name.clone();
            let is_last = name == Some(key.as_str());
            let value = self.value(&open, element);
            match open.last_mut() {
                Some(parent) => parent.parts.push((key, value)),
                None => out.arguments(&value.to_string()),
            }
            if is_last {
                break;
            }
        }
        self.state = if open.is_empty() {
            State::Parameters
        } else {
            State::Elements(open)
        };
    }

    /// The value of an element within these.
    fn value(&self, around: &[Element], element: Element) -> Value {
        let path = around.iter().chain([&element]);
        let path = path.map(|element| element.name.as_str());
        let expected = self.tools.within(&self.tool, path);
        if element.parts.is_empty() {
            let is_blank = element.text.trim().is_empty() && !expected.takes(&json!(""));
            let mut empty = [json!([]), json!({})].into_iter().filter(|_| is_blank);
            return empty.find(|it| expected.takes(it)).unwrap_or_else(|| {
                let json = expected.guess(&element.text);
                serde_json::from_str(&json).unwrap_or_default()
            });
        }
        let is_list = element.parts.iter().all(|(name, _)| name == "item");
        if is_list && expected.takes(&json!([])) {
            let values = element.parts.into_iter();
            return values.map(|(_, value)| value).collect();
        }
        let mut members = Map::new();
        for (name, value) in element.parts {
            if let Value::Array(all) = members.entry(name).or_insert_with(|| json!([])) {
                all.push(value);
            }
        }
        // Several parts of one name are a list.
        for member in members.values_mut() {
            if let Some([only]) = member.as_array_mut().map(Vec::as_mut_slice) {
                *member = only.take();
            }
        }
        members.into()
    }

    fn end_call(&mut self, out: &mut Deltas) {
        if let State::Text(_, value) = &mut self.state {
            value.close(str::to_owned, out);
        }
        self.close_elements(None, out);
        out.arguments(if self.has_keys { "}" } else { "{}" });
        self.aside.give(out);
        self.state = State::Outside;
    }
}

impl MarkupParser for NestedParser {
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
        match &mut self.state {
            State::Outside => {}
            State::Text(_, value) if self.is_cut => value.cut_short(out),
            State::Elements(open) if self.is_cut => {
                if let [element] = open.as_slice()
                    && element.parts.is_empty()
                {
                    out.arguments(&element.text);
                }
            }
            State::Parameters if self.is_cut => {}
            State::Text(..) | State::Elements(_) | State::Parameters => self.end_call(out),
        }
        self.aside.give(out);
        self.content.finish(out);
    }

    fn is_in_call(&self) -> bool {
        matches!(self.state, State::Text(..) | State::Elements(_))
    }
}
