//! [`Splitter`] runs a reasoning parser and then a tool parser over one answer, or reads the answer's objects.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use genset_backend_common::{EngineError, FinishReason};
use serde::Deserialize;

use super::objects::Objects;
use super::{Delta, Deltas, MarkupParser, ValueScan, ValueStep};

/// The format of tool call ids if the model gives none, or one twice. Some templates require one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IdStyle {
    /// `call_` and 24 hex digits, like OpenAI's.
    #[default]
    Call,
    /// Nine letters and digits, as Mistral's templates require.
    Nine,
}

impl IdStyle {
    fn make(self) -> String {
        let random = rand::random::<u128>();
        match self {
            Self::Call => format!("call_{:024x}", random >> 32),
            Self::Nine => format!("{:09x}", random >> 92),
        }
    }
}

/// A tool call in an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Identifies the call in later messages.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments, as the model wrote them: a JSON object, unless the model erred or was cut short. Of a custom tool, its input.
    pub arguments: String,
    /// Whether it is a custom tool.
    pub is_custom: bool,
}

/// An answer, split.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Content for the reader.
    pub content: String,
    /// The model's reasoning.
    pub reasoning: String,
    /// Its tool calls, in order.
    pub tool_calls: Vec<ToolCall>,
}

impl From<String> for Message {
    fn from(content: String) -> Self {
        Self {
            content,
            ..Self::default()
        }
    }
}

/// Splits one answer as it arrives.
pub struct Splitter {
    reasoning: Option<Box<dyn MarkupParser>>,
    tools: Option<Box<dyn MarkupParser>>,
    /// Reads the answer's objects; `None` if the answer is text.
    objects: Option<Objects>,
    ids: IdStyle,
    max_calls: u32,
    /// The names of the tools that may be called, if not all.
    allowed: Option<Arc<BTreeSet<String>>>,
    /// The names of custom tools.
    custom: Option<Arc<BTreeSet<String>>>,
    /// The arguments of the latest call so far, if its tool is a custom one: only whole ones tell its input.
    custom_arguments: Option<String>,
    /// The calls that were passed on.
    calls: u32,
    /// Whether the latest call is left out, with its arguments.
    is_left_out: bool,
    /// Deltas between the two parsers; empty between two pushes.
    between: Deltas,
    deltas: Deltas,
    /// The latest id that was generated.
    id: String,
    /// The ids that the model gave.
    given_ids: HashSet<String>,
    /// Follows the arguments of the latest call until they are complete.
    open_call: Option<ValueScan>,
}

impl Splitter {
    /// The tool parser reads the content that the reasoning parser emits.
    #[must_use]
    pub fn new(
        reasoning: Option<Box<dyn MarkupParser>>,
        tools: Option<Box<dyn MarkupParser>>,
        ids: IdStyle,
    ) -> Self {
        Self {
            reasoning,
            tools,
            objects: None,
            ids,
            max_calls: u32::MAX,
            allowed: None,
            custom: None,
            custom_arguments: None,
            calls: 0,
            is_left_out: false,
            between: Deltas::default(),
            deltas: Deltas::default(),
            id: String::new(),
            given_ids: HashSet::new(),
            open_call: None,
        }
    }

    /// A splitter for an engine that writes OpenAI's own objects: chunks, or one whole answer.
    #[must_use]
    pub fn of_objects() -> Self {
        Self {
            objects: Some(Objects::default()),
            ..Self::new(None, None, IdStyle::Call)
        }
    }

    /// Drops calls beyond this many, with their arguments.
    #[must_use]
    pub fn with_max_calls(mut self, calls: u32) -> Self {
        self.max_calls = calls;
        self
    }

    /// Drops calls of other tools than these, with their arguments.
    #[must_use]
    pub(crate) fn with_allowed(mut self, tools: Option<Arc<BTreeSet<String>>>) -> Self {
        self.allowed = tools;
        self
    }

    /// Gives the input of calls of these tools in place of their arguments.
    #[must_use]
    pub(crate) fn with_custom(mut self, tools: Option<Arc<BTreeSet<String>>>) -> Self {
        self.custom = tools;
        self
    }

    /// Takes the next piece of text and passes its deltas to `each`; every call has an id of its own.
    pub fn push(&mut self, text: &str, each: impl FnMut(Delta<'_>)) {
        self.feed(text);
        self.flush(each);
    }

    /// Takes the next piece of text; its deltas are kept for [`flush`](Self::flush).
    pub(crate) fn feed(&mut self, text: &str) {
        let mut deltas = std::mem::take(&mut self.deltas);
        let mut rest = text;
        let first = |parser: &mut dyn MarkupParser, is_in_call: bool, out: &mut Deltas| {
            parser.push_to_marker(std::mem::take(&mut rest), is_in_call, out)
        };
        self.run(&mut deltas, first, text);
        self.deltas = deltas;
    }

    /// Takes the answer's next object; its deltas are kept for [`flush`](Self::flush). Returns the bytes of their text; `None` if
    /// the answer is text.
    pub(crate) fn take_object(&mut self, object: &str) -> Option<Result<usize, EngineError>> {
        let objects = self.objects.as_mut()?;
        let before = self.deltas.bytes();
        let read = objects.read(object, &mut self.deltas);
        Some(read.map(|()| self.deltas.bytes() - before))
    }

    /// Whether deltas are kept for [`flush`](Self::flush).
    pub(crate) fn has_deltas(&self) -> bool {
        !self.deltas.is_empty()
    }

    /// Why the answer was cut, if its objects say so.
    pub(crate) fn said_cut(&self) -> Option<FinishReason> {
        self.objects.as_ref()?.cut
    }

    /// The reasoning tokens that its objects report.
    pub(crate) fn said_reasoning_tokens(&self) -> u32 {
        self.objects
            .as_ref()
            .map_or(0, |objects| objects.reasoning_tokens)
    }

    /// Passes the kept deltas to `each`.
    pub(crate) fn flush(&mut self, each: impl FnMut(Delta<'_>)) {
        let deltas = std::mem::take(&mut self.deltas);
        self.deliver(deltas, each);
    }

    /// Whether the next text is reasoning, as far as is certain; `None` if the splitter does not look for reasoning.
    pub(crate) fn is_thinking(&self) -> Option<bool> {
        let of = |parser: &Option<Box<dyn MarkupParser>>| parser.as_ref()?.is_thinking();
        of(&self.reasoning).or_else(|| of(&self.tools))
    }

    /// Tells the parsers that the model was cut off. Called before [`finish`](Self::finish).
    pub(crate) fn cut_short(&mut self) {
        let parsers = [&mut self.reasoning, &mut self.tools];
        for parser in parsers.into_iter().flatten() {
            parser.cut_short();
        }
    }

    /// Ends the text and passes what was held back to `each`.
    pub fn finish(&mut self, mut each: impl FnMut(Delta<'_>)) {
        let mut deltas = std::mem::take(&mut self.deltas);
        let first = |parser: &mut dyn MarkupParser, _: bool, out: &mut Deltas| {
            parser.finish(out);
            false
        };
        self.run(&mut deltas, first, "");
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut deltas);
        }
        self.deliver(deltas, &mut each);
        self.give_input(each);
    }

    /// Whether the answer has called tools so far.
    #[must_use]
    pub fn has_calls(&self) -> bool {
        self.calls > 0
    }

    /// Whether the arguments of the latest call are still incomplete.
    pub(crate) fn has_open_call(&self) -> bool {
        self.open_call.is_some()
    }

    /// Runs the reasoning parser as long as it has more to take (or bypasses it), and the tool parser over the content. Tells
    /// the reasoning parser whether the tool parser is in a call, where all text belongs to the tool.
    fn run(
        &mut self,
        out: &mut Deltas,
        mut first: impl FnMut(&mut dyn MarkupParser, bool, &mut Deltas) -> bool,
        text: &str,
    ) {
        match (&mut self.reasoning, &mut self.tools) {
            (Some(reasoning), None) => while first(reasoning.as_mut(), false, out) {},
            (None, Some(tools)) => tools.push(text, out),
            (None, None) => out.content(text),
            (Some(reasoning), Some(tools)) => loop {
                let is_in_call = tools.is_in_call();
                let has_more = first(reasoning.as_mut(), is_in_call, &mut self.between);
                for delta in self.between.iter() {
                    match delta {
                        Delta::Content(text) => tools.push(text, out),
                        Delta::Reasoning(text) => out.reasoning(text),
                        // A parser of both is used alone.
                        Delta::ToolCall { .. } | Delta::Arguments { .. } => {}
                    }
                }
                self.between.clear();
                if !has_more {
                    break;
                }
            },
        }
    }

    fn deliver(&mut self, mut deltas: Deltas, mut each: impl FnMut(Delta<'_>)) {
        for delta in deltas.iter() {
            if !matches!(delta, Delta::Arguments { .. }) {
                self.give_input(&mut each);
            }
            match delta {
                Delta::ToolCall { name, .. } if !self.takes(name) => self.is_left_out = true,
                Delta::ToolCall { name, id, .. } => {
                    self.is_left_out = false;
                    self.follow(delta);
                    // Clients tell calls apart by their ids.
                    let is_own = !id.is_empty() && self.given_ids.insert(id.to_owned());
                    if !is_own {
                        self.id = self.ids.make();
                    }
                    let custom = self.custom.as_ref();
                    let is_custom = custom.is_some_and(|custom| custom.contains(name));
                    self.custom_arguments = is_custom.then(String::new);
                    each(Delta::ToolCall {
                        index: self.calls,
                        name,
                        id: if is_own { id } else { &self.id },
                        is_custom,
                    });
                    self.calls += 1;
                }
                Delta::Arguments { .. } if self.is_left_out => {}
                Delta::Arguments { text, .. } => {
                    self.follow(delta);
                    match &mut self.custom_arguments {
                        Some(arguments) => arguments.push_str(text),
                        None => each(Delta::Arguments {
                            index: self.calls.saturating_sub(1),
                            text,
                            is_custom: false,
                        }),
                    }
                }
                Delta::Content(_) | Delta::Reasoning(_) => {
                    self.follow(delta);
                    each(delta);
                }
            }
        }
        deltas.clear();
        self.deltas = deltas;
    }

    /// Passes on the input of the latest call, if its tool is a custom one.
    fn give_input(&mut self, mut each: impl FnMut(Delta<'_>)) {
        let arguments = self.custom_arguments.take();
        let input = arguments.map(input_of).filter(|input| !input.is_empty());
        if let Some(input) = input {
            each(Delta::Arguments {
                index: self.calls.saturating_sub(1),
                text: &input,
                is_custom: true,
            });
        }
    }

    /// Whether a further call, of this tool, is passed on.
    fn takes(&self, tool: &str) -> bool {
        let allowed = self.allowed.as_ref();
        self.calls < self.max_calls && allowed.is_none_or(|allowed| allowed.contains(tool))
    }

    fn follow(&mut self, delta: Delta<'_>) {
        match (delta, &mut self.open_call) {
            (Delta::ToolCall { .. }, open_call) => *open_call = Some(ValueScan::default()),
            (Delta::Arguments { text, .. }, Some(scan)) => {
                if text.chars().any(|c| scan.take(c) == ValueStep::Last) {
                    self.open_call = None;
                }
            }
            (Delta::Content(_) | Delta::Reasoning(_) | Delta::Arguments { .. }, _) => {}
        }
    }
}

/// The arguments of a custom tool's function.
#[derive(Deserialize)]
struct CustomArguments {
    input: String,
}

/// The most bytes of an escape that is cut, as `\ud83d\ude0`.
const MOST_OF_ESCAPE: usize = 11;

/// The input in the arguments of a custom tool's function. Of arguments that were cut within it, it is the text so far; of others,
/// whatever the model wrote.
fn input_of(arguments: String) -> String {
    let read = |text: &str| serde_json::from_str::<CustomArguments>(text).ok();
    let before = |cut: usize| {
        let end = arguments.len().checked_sub(cut)?;
        read(&format!("{}\"}}", arguments.get(..end)?))
    };
    let found = read(&arguments).or_else(|| (0..=MOST_OF_ESCAPE).find_map(before));
    found.map_or(arguments, |read| read.input)
}

genset_backend_common::debug_as!(|it| Splitter {
    has_reasoning: it.reasoning.is_some(),
    has_tools: it.tools.is_some(),
    ..
});

impl Message {
    /// Adds a [`Splitter`]'s delta.
    pub fn add(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Content(text) => self.content.push_str(text),
            Delta::Reasoning(text) => self.reasoning.push_str(text),
            Delta::ToolCall {
                name,
                id,
                is_custom,
                ..
            } => self.tool_calls.push(ToolCall {
                id: id.to_owned(),
                name: name.to_owned(),
                arguments: String::new(),
                is_custom,
            }),
            Delta::Arguments { text, .. } => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.arguments.push_str(text);
                }
            }
        }
    }
}
