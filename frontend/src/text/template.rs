//! Chat messages to the prompt text that a model was trained on.
//!
//! A model's repository carries its prompt format as a Jinja template, written for Python and the
//! `transformers` library. [`ChatTemplate`] compiles one and renders it for each request, with what
//! such templates count on there: Python's methods on strings, lists and dictionaries,
//! `raise_exception`, `strftime_now`, `tojson` as `json.dumps` writes it, `break` and `continue`, and
//! `generation` blocks. [`TemplateSource`] finds the template in a `tokenizer_config.json`.
//!
//! A template is a model's, not a request's; but models come from everywhere, so what one rendering may take is bounded:
//! its instructions by fuel, its memory by `bounds`.
//!
//! The frontend's preprocessor calls it, after validation. It does not check messages: which roles and
//! orders of messages a model takes, its template says, by raising an exception.
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
use serde_json::Map;

use bounds::{Bounds, TooLarge};
pub use config::{TemplateSource, TemplateSourceError};
use python::Raised;
use source::Bounded;

/// How many template instructions one rendering may execute, unless
/// [`with_fuel`](ChatTemplate::with_fuel) says otherwise. A message takes some hundred, so this is room
/// for conversations of tens of thousands of messages; an endless template ends within about a second.
pub const DEFAULT_FUEL: u64 = 10_000_000;

const CHAT: &str = "chat_template";
const TOOL_USE: &str = "tool_use";

/// Why a template could not be compiled or rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template refused the messages by `raise_exception`. The caller is at fault, and the message
    /// is meant for them.
    #[error("{message}")]
    Raised {
        /// What the template said.
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
    /// The rendering took more instructions than its fuel allows.
    #[error("the chat template did not end within {limit} instructions")]
    OutOfFuel {
        /// The fuel, in instructions.
        limit: u64,
    },
    /// The rendering made more text, or longer lists, than it may.
    #[error("the chat template makes more than {limit_bytes} bytes of these messages")]
    TooLarge {
        /// How much a value, or all of them, may take.
        limit_bytes: usize,
    },
    /// The template failed on these messages, without raising an exception of its own: it met a message
    /// that it was not written for, or uses what this implementation lacks.
    #[error("line {line} of the chat template failed: {message}")]
    Render {
        /// The line, from 1; 0 if unknown.
        line: usize,
        /// What went wrong.
        message: String,
    },
}

/// What a chat template renders.
///
/// Messages and tools are the objects of the OpenAI API, in the order of keys the client sent:
/// templates print them as they are.
#[derive(Debug, Clone, Copy)]
pub struct TemplateInput<'a> {
    /// The conversation, oldest message first.
    pub messages: &'a [serde_json::Value],
    /// The tools on offer. None and an empty list are the same.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether to end with the beginning of an assistant's message, so that the model writes one.
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
    has_tool_use: bool,
    /// Whether it tells a message of nothing but calls by its content, which is none.
    tests_for_no_content: bool,
    /// As asked for; see [`effective_fuel`](Self::effective_fuel).
    fuel: u64,
    bounds: Bounds,
    /// The longest text of the templates that a loop or a macro can repeat, in bytes.
    longest_repeated: usize,
}

impl ChatTemplate {
    /// Compiles `source`. The template sees `bos` and `eos` as `bos_token` and `eos_token`, undefined
    /// if absent.
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
            has_tool_use: false,
            tests_for_no_content: false,
            fuel,
            bounds: Bounds::DEFAULT,
            longest_repeated: 0,
        };
        template.add(CHAT, source)?;
        Ok(template)
    }

    /// Compiles a second template, rendered instead of the first when a request offers tools.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] if the template is not valid.
    pub fn try_with_tool_use(mut self, source: &str) -> Result<Self, TemplateError> {
        self.add(TOOL_USE, source)?;
        self.has_tool_use = true;
        Ok(self)
    }

    /// Sets how many template instructions one rendering may execute. It may execute fewer if the template repeats long
    /// texts of its own, for these count for nothing else.
    #[must_use]
    pub fn with_fuel(mut self, instructions: u64) -> Self {
        self.fuel = instructions;
        self.environment.set_fuel(Some(self.effective_fuel()));
        self
    }

    /// The same for messages that are short: what does not end after so many instructions, or makes or reads more than short
    /// messages need, is an error soon.
    #[must_use]
    pub(crate) fn into_quick(mut self, instructions: u64) -> Self {
        self.bounds = Bounds::QUICK;
        self.with_fuel(instructions)
    }

    /// No text of the template's own takes less than two instructions to be repeated.
    fn effective_fuel(&self) -> u64 {
        let repetitions = self.bounds.repeated / self.longest_repeated.max(1);
        self.fuel
            .min(u64::try_from(2 * repetitions).unwrap_or(u64::MAX))
    }

    /// Whether a variable of this name makes a difference to the template.
    #[must_use]
    pub fn reads(&self, name: &str) -> bool {
        self.environment
            .templates()
            .any(|(_, template)| template.undeclared_variables(false).contains(name))
    }

    /// The prompt for a conversation. It holds special tokens as text: tokenize it without adding more.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Raised`] if the template refuses the input, [`TemplateError::OutOfFuel`],
    /// [`TemplateError::TooLarge`] and [`TemplateError::Render`] if it fails.
    pub fn render(&self, input: &TemplateInput<'_>) -> Result<String, TemplateError> {
        let tools = input.tools.filter(|tools| !tools.is_empty());
        let name = match tools {
            Some(_) if self.has_tool_use => TOOL_USE,
            Some(_) | None => CHAT,
        };
        let context = self.context(input, tools);
        self.environment
            .get_template(name)
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
        // Of two with one name, the later holds.
        let documents = [("documents", Value::from(()))];
        let defaults = bos.into_iter().chain(eos).chain(documents);
        Value::from_pairs(defaults.chain(given).chain(own))
    }

    /// The messages as `transformers` hands them on: a key that is null is left out, for templates take a key for its presence.
    /// Clients that repeat an answer send it whole, with `"tool_calls": null`. The content of a message of nothing but calls is
    /// null where the template tests for that.
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
        if !messages.iter().any(|m| has_null(m) || only_calls(m)) {
            return Cow::Borrowed(messages);
        }
        let mut messages = messages.to_vec();
        for message in &mut messages {
            let only_calls = only_calls(message);
            if let Some(message) = message.as_object_mut() {
                message.retain(|_, value| !value.is_null());
                if only_calls {
                    message.insert("content".into(), serde_json::Value::Null);
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

/// Sorts an error of the template engine by who is at fault.
fn explain(error: &minijinja::Error, fuel: u64) -> TemplateError {
    if let Some(raised) = find_cause::<Raised>(error) {
        return TemplateError::Raised {
            message: raised.message.clone(),
        };
    }
    if let Some(&TooLarge { limit_bytes }) = find_cause(error) {
        return TemplateError::TooLarge { limit_bytes };
    }
    // A macro's error comes wrapped in its caller's.
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

/// The error itself, and what caused it.
fn causes(error: &minijinja::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    fn cause<'a>(error: &&'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
        (**error).source()
    }
    let outermost: &(dyn Error + 'static) = error;
    std::iter::successors(Some(outermost), cause)
}
