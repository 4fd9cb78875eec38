//! The parser for harmony, in which every message names its channel: reasoning, tool calls or the answer.
//!
//! # Source
//! <https://github.com/openai/harmony>, `docs/format.md`

use crate::markup::{Deltas, MarkupParser, Prose, Scan, scan, trim_start_len};

/// The markers. The first three end a message.
pub(super) const MARKERS: &[&str] = &[
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
];
const START: usize = 3;
const CHANNEL: usize = 4;
const MESSAGE: usize = 5;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Content,
    Reasoning,
    Call,
}

enum State {
    /// Before the first marker, and between messages.
    Between,
    /// After a message's start: role, recipient and channel, up to the body.
    Header(String),
    Body(Body),
}

pub(super) struct HarmonyParser {
    /// Whether calls are reported; otherwise they are content.
    has_tools: bool,
    state: State,
    /// Whether it is undecided if the first words belong to a header: a prompt may end within one.
    is_open: bool,
    content: Prose,
    reasoning: Prose,
    has_arguments: bool,
    /// Whether the model was cut off.
    is_cut: bool,
    held: String,
}

impl HarmonyParser {
    pub(super) fn new(has_tools: bool) -> Self {
        Self {
            has_tools,
            state: State::Between,
            is_open: true,
            content: Prose::content(),
            reasoning: Prose::reasoning(),
            has_arguments: false,
            is_cut: false,
            held: String::new(),
        }
    }

    fn give(&mut self, len: usize, out: &mut Deltas) {
        let text = self.held.get(..len).unwrap_or_default();
        match &mut self.state {
            // Text without a header: the model ignores the format, so the text is for the reader.
            State::Between | State::Body(Body::Content) => self.content.push(text, out),
            State::Body(Body::Reasoning) => self.reasoning.push(text, out),
            State::Body(Body::Call) => {
                let blank = if self.has_arguments {
                    0
                } else {
                    trim_start_len(text)
                };
                self.has_arguments |= blank < text.len();
                out.arguments(&text[blank..]);
            }
            State::Header(header) => header.push_str(text),
        }
        self.held.drain(..len);
    }

    /// Whether the answer begins with a recipient, which continues the prompt's header; `None` while that is open.
    fn begins_in_header(&self) -> Option<bool> {
        const RECIPIENT: &str = "to=";
        let text = self.held.trim_start();
        if text.len() < RECIPIENT.len() && RECIPIENT.starts_with(text) {
            return None;
        }
        Some(text.starts_with(RECIPIENT))
    }

    fn step(&mut self, out: &mut Deltas) -> bool {
        if self.is_open {
            match self.begins_in_header() {
                None => return false,
                Some(true) => self.state = State::Header(String::new()),
                Some(false) => {}
            }
            self.is_open = false;
        }
        let (which, start, end) = match scan(&self.held, MARKERS.iter().copied()) {
            Scan::Marker { which, start, end } => (which, start, end),
            Scan::Text { sure } => {
                self.give(sure, out);
                return false;
            }
        };
        self.give(start, out);
        self.held.drain(..end - start);
        self.take(which, out);
        true
    }

    fn take(&mut self, which: usize, out: &mut Deltas) {
        match (&mut self.state, which) {
            (State::Header(header), MESSAGE) => {
                let header = std::mem::take(header);
                self.begin_body(&header, out);
            }
            // Only the marker tells the channel's name apart from the recipient after it.
            (State::Header(header), CHANNEL) => header.push_str(" channel="),
            (State::Header(header), 4..) => header.push(' '),
            (_, START) => self.between_messages(State::Header(String::new()), out),
            (_, CHANNEL) => self.between_messages(State::Header(" channel=".into()), out),
            (_, MESSAGE) => self.between_messages(State::Body(Body::Content), out),
            _ => self.between_messages(State::Between, out),
        }
    }

    /// A call without arguments gets an empty object.
    fn end_call(&mut self, out: &mut Deltas) {
        if matches!(self.state, State::Body(Body::Call)) && !self.has_arguments {
            out.arguments("{}");
        }
    }

    fn between_messages(&mut self, state: State, out: &mut Deltas) {
        self.end_call(out);
        self.content.message_end();
        self.reasoning.message_end();
        self.state = state;
    }

    fn begin_body(&mut self, header: &str, out: &mut Deltas) {
        let words = || header.split_whitespace();
        let channel = words().find_map(|word| word.strip_prefix("channel="));
        let recipient = words().find_map(|word| word.strip_prefix("to="));
        let body = match (recipient, channel) {
            (Some(recipient), _) if self.has_tools => {
                let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                out.tool_call(name, "");
                self.has_arguments = false;
                Body::Call
            }
            (None, Some("analysis")) => Body::Reasoning,
            _ => Body::Content,
        };
        self.between_messages(State::Body(body), out);
    }
}

impl MarkupParser for HarmonyParser {
    fn push(&mut self, text: &str, out: &mut Deltas) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    fn cut_short(&mut self) {
        self.is_cut = true;
    }

    fn finish(&mut self, out: &mut Deltas) {
        self.give(self.held.len(), out);
        // The marker after a call also ends the answer, and is then often not shown.
        if !self.is_cut {
            self.end_call(out);
        }
        // A header without a body is not text.
        self.content.finish(out);
    }

    fn is_thinking(&self) -> Option<bool> {
        Some(matches!(self.state, State::Body(Body::Reasoning)))
    }
}
