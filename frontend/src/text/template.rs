//! Renders chat messages as the prompt text that a model was trained on.
//!
//! A model's repository contains its prompt format as a Jinja template, written for Python and the
//! `transformers` library. [`ChatTemplate`] compiles it and renders it for each request, with what such
//! templates expect: Python's methods on strings, lists and dictionaries, `raise_exception`,
//! `strftime_now`, `tojson` in the format of `json.dumps`, `break` and `continue`, and `generation`
//! blocks. [`TemplateSource`] finds the template in a `tokenizer_config.json`.
//!
//! A template belongs to a model, not to a request, but models come from anywhere. So one rendering is
//! bounded: its instructions by fuel, its memory by `bounds`.
//!
//! The frontend's preprocessor calls it after validation. It does not check messages: the template
//! defines which roles and orders a model accepts, and raises an exception for others.
//!
//! # Source
//!
//! `transformers/utils/chat_template_utils.py`.

mod bounds;
mod config;
mod iterator;
mod python;
mod source;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::error::Error;

use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use serde::Serialize;
use serde_json::{Map, json};

use bounds::{Bounds, TooLarge};
pub use config::{TemplateSource, TemplateSourceError};
use python::Raised;
use source::Bounded;

/// How many template instructions one rendering may execute, unless
/// [`with_fuel`](ChatTemplate::with_fuel) sets another limit. A message takes some hundred, so
/// conversations may have tens of thousands of messages; an endless template ends within about a
/// second.
pub const DEFAULT_FUEL: u64 = 10_000_000;

/// How many instructions a template may execute for one short message, to find out how it reads
/// contents.
const PROBE_FUEL: u64 = 50_000;

const CHAT: &str = "chat_template";
const TOOL_USE: &str = "tool_use";

/// Why a template could not be compiled or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template refused the messages with `raise_exception`. The caller is at fault, and the
    /// message is meant for the caller.
    #[error("{message}")]
    Raised {
        /// The template's message.
        message: String,
    },
    /// The template is not valid Jinja. The model's files are at fault.
    #[error("line {line} of the chat template: {message}")]
    Syntax {
        /// The line, from 1; 0 if unknown.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// The rendering took more instructions than its fuel.
    #[error("the chat template did not end within {limit} instructions")]
    OutOfFuel {
        /// The fuel, in instructions.
        limit: u64,
    },
    /// The rendering produced more text, or longer lists, than allowed.
    #[error("the chat template makes more than {limit_bytes} bytes of these messages")]
    TooLarge {
        /// The limit for one value, or for all.
        limit_bytes: usize,
    },
    /// The template failed on these messages without raising an exception: it was not written for one
    /// of them, or uses a feature that this implementation lacks.
    #[error("line {line} of the chat template failed: {message}")]
    Render {
        /// The line, from 1; 0 if unknown.
        line: usize,
        /// What went wrong.
        message: String,
    },
}

/// The input of a chat template.
///
/// Messages and tools are objects of the OpenAI API, with keys in the client's order: templates print
/// them unchanged.
#[derive(Debug, Clone, Copy)]
pub struct TemplateInput<'a> {
    /// The conversation, oldest message first.
    pub messages: &'a [serde_json::Value],
    /// The tools on offer. `None` and an empty list are the same.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether to append the beginning of an assistant message, so that the model writes one.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. They may replace `bos_token`, `eos_token` and
    /// `documents`, but none of the above.
    pub extra: &'a Map<String, serde_json::Value>,
}

/// A compiled chat template: compile once, render for every request, from any thread.
///
/// # Examples
///
/// ```
/// use genset_frontend::text::{ChatTemplate, TemplateInput};
/// use serde_json::json;
///
/// let source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}
/// {%- if add_generation_prompt %}<|assistant|>{% endif %}";
/// let template = ChatTemplate::try_new(source, None, Some("</s>"))?;
/// let prompt = template.render(&TemplateInput {
///     messages: &[json!({ "role": "user", "content": "Hi" })],
///     tools: None,
///     add_generation_prompt: true,
///     extra: &serde_json::Map::new(),
/// })?;
/// assert_eq!(prompt, "<|user|>Hi</s><|assistant|>");
/// # Ok::<(), genset_frontend::text::TemplateError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    /// Whether it recognizes a message with only tool calls by `content` being none.
    tests_for_no_content: bool,
    /// Whether it shows a text only as a part of a list, not as a string.
    shows_only_parts: bool,
    /// The requested fuel; see [`effective_fuel`](Self::effective_fuel).
    fuel: u64,
    bounds: Bounds,
    /// The longest literal text of the templates that a loop or a macro can repeat, in bytes.
    longest_repeated: usize,
}

impl ChatTemplate {
    /// Compiles `source`. The template sees `bos` and `eos` as `bos_token` and `eos_token`, which are
    /// undefined if absent.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] if the template is not valid.
    pub fn try_new(
        source: &str,
        bos: Option<&str>,
        eos: Option<&str>,
    ) -> Result<Self, TemplateError> {
        let fuel = DEFAULT_FUEL;
        let mut template = Self {
            environment: python::environment().map_err(|error| explain(&error, fuel))?,
            bos_token: bos.map(str::to_owned),
            eos_token: eos.map(str::to_owned),
            tests_for_no_content: false,
            shows_only_parts: false,
            fuel,
            bounds: Bounds::DEFAULT,
            longest_repeated: 0,
        };
        template.add(CHAT, source)?;
        template.shows_only_parts = template.finds_only_parts();
        Ok(template)
    }

    /// Renders a text as a string and as a part of a list, and returns whether only the latter is
    /// shown. Templates of models with images may be written for lists alone: of a string, they show
    /// nothing, without an error.
    fn finds_only_parts(&self) -> bool {
        const TEXT: &str = "genset-probe";
        let mut probe = self.clone().into_quick(PROBE_FUEL);
        let mut shows = |shows_only_parts| {
            probe.shows_only_parts = shows_only_parts;
            let prompt = probe.render(&TemplateInput {
                messages: &[json!({ "role": "user", "content": TEXT })],
                tools: None,
                add_generation_prompt: true,
                extra: &Map::new(),
            });
            prompt.is_ok_and(|prompt| prompt.contains(TEXT))
        };
        !shows(false) && shows(true)
    }

    /// Compiles a second template, which is rendered instead of the first if a request offers tools.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] if the template is not valid.
    pub fn try_with_tool_use(mut self, source: &str) -> Result<Self, TemplateError> {
        self.add(TOOL_USE, source)?;
        Ok(self)
    }

    /// Sets how many template instructions one rendering may execute. The limit is lower if the
    /// template repeats long literal texts, which are not counted in any other way.
    #[must_use]
    pub fn with_fuel(mut self, instructions: u64) -> Self {
        self.fuel = instructions;
        self.environment.set_fuel(Some(self.effective_fuel()));
        self
    }

    /// Sets the limits for short messages: a rendering that takes more instructions, or produces or
    /// reads more than short messages need, fails soon.
    #[must_use]
    pub(crate) fn into_quick(mut self, instructions: u64) -> Self {
        self.bounds = Bounds::QUICK;
        self.with_fuel(instructions)
    }

    /// Repeating a literal text of the template takes at least two instructions.
    fn effective_fuel(&self) -> u64 {
        let repetitions = self.bounds.repeated / self.longest_repeated.max(1);
        self.fuel
            .min(u64::try_from(2 * repetitions).unwrap_or(u64::MAX))
    }

    /// Whether the template uses a variable of this name.
    #[must_use]
    pub fn reads(&self, name: &str) -> bool {
        self.environment
            .templates()
            .any(|(_, template)| template.undeclared_variables(false).contains(name))
    }

    /// Renders the prompt of a conversation. It contains special tokens as text: tokenize it without
    /// adding more.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Raised`] if the template refuses the input, [`TemplateError::OutOfFuel`],
    /// [`TemplateError::TooLarge`] and [`TemplateError::Render`] if it fails.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let tools = input.tools.filter(|tools| !tools.is_empty());
        let of_tools = tools.and_then(|_| self.environment.get_template(TOOL_USE).ok());
        let context = self.context(input, tools);
        of_tools
            .map_or_else(|| self.environment.get_template(CHAT), Ok)
            .and_then(|template| bounds::counted(self.bounds, || template.render(context)))
            .map_err(|error| explain(&error, self.effective_fuel()))
    }

    fn context(&self, input: &TemplateInput<'_>, tools: Option<&[serde_json::Value]>) -> Value {
        fn defined<T: Serialize>(name: &str, value: T) -> (&str, Value) {
            (name, Value::from(Serde(value)))
        }
        let bos = self
            .bos_token
            .as_ref()
            .map(|token| defined("bos_token", token));
        let eos = self
            .eos_token
            .as_ref()
            .map(|token| defined("eos_token", token));
        let given = input.extra.iter().map(|(name, value)| defined(name, value));
        let own = [
            defined("messages", self.given(input.messages)),
            defined("tools", tools),
            defined("add_generation_prompt", input.add_generation_prompt),
        ];
        // If two have the same name, the later one applies.
        let documents = [("documents", Value::from(()))];
        let defaults = bos.into_iter().chain(eos).chain(documents);
        Value::from_pairs(defaults.chain(given).chain(own))
    }

    /// Returns the messages as `transformers` passes them. Omits keys with a null value, because
    /// templates test for a key's presence, and clients that repeat an answer send it whole, with
    /// `"tool_calls": null`. If the template tests for it, sets the content of a message with only
    /// tool calls to null. If the template shows only parts, makes each other text a list of one.
    fn given<'m>(&self, messages: &'m [serde_json::Value]) -> Cow<'m, [serde_json::Value]> {
        let has_null = |message: &serde_json::Value| {
            let mut values = message.as_object().into_iter().flat_map(Map::values);
            values.any(serde_json::Value::is_null)
        };
        let only_calls = |message: &serde_json::Value| {
            let calls = message["tool_calls"].as_array();
            self.tests_for_no_content
                && calls.is_some_and(|calls| !calls.is_empty())
                && (message["content"].is_null() || message["content"] == "")
        };
        let is_text =
            |message: &serde_json::Value| self.shows_only_parts && message["content"].is_string();
        let is_changed = |m: &serde_json::Value| has_null(m) || only_calls(m) || is_text(m);
        if !messages.iter().any(is_changed) {
            return Cow::Borrowed(messages);
        }
        let mut messages = messages.to_vec();
        for message in &mut messages {
            let (only_calls, is_text) = (only_calls(message), is_text(message));
            if let Some(message) = message.as_object_mut() {
                message.retain(|_, value| !value.is_null());
                if only_calls {
                    message.insert("content".into(), serde_json::Value::Null);
                } else if is_text && let Some(content) = message.get_mut("content") {
                    let text = content.take();
                    *content = json!([{ "type": "text", "text": text }]);
                }
            }
        }
        Cow::Owned(messages)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TemplateError> {
        let tests = [
            "['content'] is none",
            "[\"content\"] is none",
            ".content is none",
        ];
        self.tests_for_no_content |= tests.iter().any(|test| source.contains(test));
        let source = source::without_generation_tags(source);
        let invalid = |error| explain(&error, DEFAULT_FUEL);
        let syntax = self.environment.syntax().clone();
        let bounded = Bounded::try_new(&source, syntax).map_err(invalid)?;
        bounds::add_functions(&mut self.environment, &bounded.function);
        self.environment
            .add_template_owned(name, bounded.source)
            .map_err(invalid)?;
        self.longest_repeated = self.longest_repeated.max(bounded.longest_repeated);
        self.environment.set_fuel(Some(self.effective_fuel()));
        Ok(())
    }
}

/// Classifies an error of the template engine by who is at fault.
fn explain(error: &minijinja::Error, fuel: u64) -> TemplateError {
    if let Some(raised) = find_cause::<Raised>(error) {
        return TemplateError::Raised {
            message: raised.message.clone(),
        };
    }
    if let Some(&TooLarge { limit_bytes }) = find_cause(error) {
        return TemplateError::TooLarge { limit_bytes };
    }
    // A macro's error is wrapped in its caller's.
    let innermost = causes(error)
        .filter_map(|error| error.downcast_ref::<minijinja::Error>())
        .last()
        .unwrap_or(error);
    let line = innermost.line().unwrap_or(0);
    let message = match innermost.detail() {
        Some(detail) => format!("{}: {detail}", innermost.kind()),
        None => innermost.kind().to_string(),
    };
    if innermost.kind() == ErrorKind::OutOfFuel {
        TemplateError::OutOfFuel { limit: fuel }
    } else if innermost.kind() == ErrorKind::SyntaxError {
        TemplateError::Syntax { line, message }
    } else {
        TemplateError::Render { line, message }
    }
}

fn find_cause<T: Error + 'static>(error: &minijinja::Error) -> Option<&T> {
    causes(error).find_map(|error| error.downcast_ref())
}

/// The error itself, and its causes.
fn causes(error: &minijinja::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    fn cause<'a>(error: &&'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
        (**error).source()
    }
    let outermost: &(dyn Error + 'static) = error;
    std::iter::successors(Some(outermost), cause)
}
