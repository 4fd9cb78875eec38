//! [`Splitter`]: a reasoning parser and a tool parser, one after the other, over one answer.

use super::{Delta, Deltas, MarkupParser, ValueScan, ValueStep};

/// How ids of tool calls look where the model gives none. Some templates insist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IdStyle {
    /// `call_` and 24 hex digits, as OpenAI's.
    #[default]
    Call,
    /// Nine letters and digits, as Mistral's templates ask for.
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

/// A call of a tool that an answer makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Names the call in the messages that follow.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments, as the model wrote them: a JSON object, unless the model erred or was cut short.
    pub arguments: String,
}

/// An answer apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// Text for the reader.
    pub content: String,
    /// The model's thoughts.
    pub reasoning: String,
    /// The tools it calls, in their order.
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

/// Takes one answer apart as it comes.
pub struct Splitter {
    reasoning: Option<Box<dyn MarkupParser>>,
    tools: Option<Box<dyn MarkupParser>>,
    ids: IdStyle,
    max_calls: u32,
    /// Between the two parsers; empty between two pushes.
    between: Deltas,
    deltas: Deltas,
    /// The id of the latest call, where it was made here.
    id: String,
    /// Follows the arguments of the latest call until they are whole.
    open_call: Option<ValueScan>,
}

impl Splitter {
    /// Content of the one parser is what the other looks into.
    #[must_use]
    pub fn new(
        reasoning: Option<Box<dyn MarkupParser>>,
        tools: Option<Box<dyn MarkupParser>>,
        ids: IdStyle,
    ) -> Self {
        Self {
            reasoning,
            tools,
            ids,
            max_calls: u32::MAX,
            between: Deltas::default(),
            deltas: Deltas::default(),
            id: String::new(),
            open_call: None,
        }
    }

    /// Calls beyond this many are left out, with their arguments.
    #[must_use]
    pub fn with_max_calls(mut self, calls: u32) -> Self {
        self.max_calls = calls;
        self
    }

    /// Takes the next piece of text; `each` gets every delta, and every call with an id.
    pub fn push(&mut self, text: &str, each: impl FnMut(Delta<'_>)) {
        self.feed(text);
        self.flush(each);
    }

    /// Takes the next piece of text; its deltas wait for [`flush`](Self::flush).
    pub(crate) fn feed(&mut self, text: &str) {
        let mut deltas = std::mem::take(&mut self.deltas);
        let mut rest = text;
        let first = |parser: &mut dyn MarkupParser, is_in_call: bool, out: &mut Deltas| {
            parser.push_to_marker(std::mem::take(&mut rest), is_in_call, out)
        };
        self.run(&mut deltas, first, text);
        self.deltas = deltas;
    }

    /// `each` gets the deltas that wait.
    pub(crate) fn flush(&mut self, each: impl FnMut(Delta<'_>)) {
        let deltas = std::mem::take(&mut self.deltas);
        self.deliver(deltas, each);
    }

    /// Whether what comes next is thoughts, as far as is certain; `None` where none are looked for.
    pub(crate) fn is_thinking(&self) -> Option<bool> {
        let of = |parser: &Option<Box<dyn MarkupParser>>| parser.as_ref()?.is_thinking();
        of(&self.reasoning).or_else(|| of(&self.tools))
    }

    /// The model was not done where the text ends. Comes before [`finish`](Self::finish).
    pub(crate) fn cut_short(&mut self) {
        let parsers = [&mut self.reasoning, &mut self.tools];
        for parser in parsers.into_iter().flatten() {
            parser.cut_short();
        }
    }

    /// The text is over; `each` gets what was held back.
    pub fn finish(&mut self, each: impl FnMut(Delta<'_>)) {
        let mut deltas = std::mem::take(&mut self.deltas);
        let first = |parser: &mut dyn MarkupParser, _: bool, out: &mut Deltas| {
            parser.finish(out);
            false
        };
        self.run(&mut deltas, first, "");
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut deltas);
        }
        self.deliver(deltas, each);
    }

    /// Whether the answer calls tools, so far.
    #[must_use]
    pub fn has_calls(&self) -> bool {
        self.deltas.calls() > 0
    }

    /// Whether the arguments of the latest call are not whole, so far.
    pub(crate) fn has_open_call(&self) -> bool {
        self.open_call.is_some()
    }

    /// Runs the first parser as long as it has more to take, or passes `text` by it, and the second over what is content. The
    /// first is told whether the second is in a call: what stands there is the tool's.
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
                        // A parser of both comes alone.
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
            match delta {
                Delta::ToolCall { index, .. } | Delta::Arguments { index, .. }
                    if index >= self.max_calls => {}
                Delta::ToolCall {
                    index,
                    name,
                    id: "",
                } => {
                    self.follow(delta);
                    self.id = self.ids.make();
                    let id = &self.id;
                    each(Delta::ToolCall { index, name, id });
                }
                Delta::Content(_)
                | Delta::Reasoning(_)
                | Delta::ToolCall { .. }
                | Delta::Arguments { .. } => {
                    self.follow(delta);
                    each(delta);
                }
            }
        }
        deltas.clear();
        self.deltas = deltas;
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

impl std::fmt::Debug for Splitter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Splitter")
            .field("has_reasoning", &self.reasoning.is_some())
            .field("has_tools", &self.tools.is_some())
            .finish_non_exhaustive()
    }
}

impl Message {
    /// Adds a delta of a [`Splitter`]'s.
    pub fn add(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Content(text) => self.content.push_str(text),
            Delta::Reasoning(text) => self.reasoning.push_str(text),
            Delta::ToolCall { name, id, .. } => self.tool_calls.push(ToolCall {
                id: id.to_owned(),
                name: name.to_owned(),
                arguments: String::new(),
            }),
            Delta::Arguments { text, .. } => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.arguments.push_str(text);
                }
            }
        }
    }
}
