//! The tool fields of a chat request.

use serde_json::{Map, Value, json};

use super::common::{ParamLimits, at_most};
use super::fields::Fields;
use crate::error::ApiError;
use crate::json::{Meter, is_object};

/// The longest name of a tool, in bytes, as in Anthropic's API; OpenAI's takes fewer.
const MAX_NAME_BYTES: usize = 128;

/// The tools that a request offers.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolOptions {
    /// The tools as the client sent them, each a function.
    pub tools: Vec<Value>,
    /// Which of them the model may or must call.
    pub choice: ToolChoice,
    /// Whether an answer may have several calls.
    pub is_parallel: bool,
}

/// Which tools the model may or must call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// None: the model does not see the tools.
    None,
    /// The model decides.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

impl Default for ToolOptions {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            choice: ToolChoice::None,
            is_parallel: true,
        }
    }
}

impl ToolOptions {
    /// The tools that the model sees.
    #[must_use]
    pub fn offered(&self) -> &[Value] {
        match self.choice {
            ToolChoice::None => &[],
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => &self.tools,
        }
    }

    /// Like [`Self::offered`], by value.
    #[must_use]
    pub fn into_offered(self) -> Vec<Value> {
        match self.choice {
            ToolChoice::None => Vec::new(),
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => self.tools,
        }
    }

    pub(super) fn read(fields: &mut Fields<'_>, limits: &ParamLimits) -> Result<Self, ApiError> {
        let tools = fields.list("tools")?.unwrap_or_default();
        at_most("tools", limits.max_tools, tools.len(), "tools")?;
        for (index, tool) in tools.iter().enumerate() {
            check_tool(&format!("tools[{index}]"), tool)?;
        }
        let choice = read_choice(fields, &tools)?;
        let is_parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        refuse_legacy(fields)?;
        Ok(Self {
            tools,
            choice,
            is_parallel,
        })
    }
}

/// Refuses the fields that `tools` and `tool_choice` replaced.
fn refuse_legacy(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    fields.refuse("functions", &[json!([])], "use 'tools'")?;
    let neutral = [json!("none"), json!("auto")];
    fields.refuse("function_call", &neutral, "use 'tool_choice'")
}

fn check_tool(at: &str, tool: &Value) -> Result<(), ApiError> {
    let Value::Object(tool) = tool else {
        return Err(ApiError::invalid(at, "expected an object"));
    };
    check_kind(at, tool)?;
    let at = format!("{at}.function");
    let Some(Value::Object(function)) = tool.get("function") else {
        return Err(ApiError::invalid(at, "expected an object with a name"));
    };
    check_function(&at, function)
}

/// Checks a function, whose fields are below `at`.
pub(crate) fn check_function(at: &str, function: &Map<String, Value>) -> Result<(), ApiError> {
    check_tool_name(&format!("{at}.name"), function.get("name"))?;
    let is = |field: &str, matches: fn(&Value) -> bool, expected: &str| match function.get(field) {
        Some(value) if !value.is_null() && !matches(value) => Err(ApiError::invalid(
            format!("{at}.{field}"),
            format!("expected {expected}"),
        )),
        _ => Ok(()),
    };
    is("description", Value::is_string, "a string")?;
    is("parameters", Value::is_object, "an object, a JSON schema")?;
    is("strict", Value::is_boolean, "a boolean")
}

/// Checks a tool's or a call's `type`, which must be `function`.
fn check_kind(at: &str, object: &Map<String, Value>) -> Result<(), ApiError> {
    let at = format!("{at}.type");
    match object.get("type") {
        Some(Value::String(kind)) if kind == "function" => Ok(()),
        Some(Value::String(kind)) => Err(ApiError::unsupported(
            at,
            format!("{kind:?} is not available, only \"function\""),
        )),
        _ => Err(ApiError::invalid(at, "expected \"function\"")),
    }
}

/// Checks the name of a tool.
pub(crate) fn check_tool_name(at: &str, name: Option<&Value>) -> Result<(), ApiError> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    match name {
        Some(Value::String(name))
            if (1..=MAX_NAME_BYTES).contains(&name.len()) && name.chars().all(is_part) =>
        {
            Ok(())
        }
        _ => Err(ApiError::invalid(
            at,
            format!("expected 1 to {MAX_NAME_BYTES} of a-z, A-Z, 0-9, '_' and '-'"),
        )),
    }
}

fn read_choice(fields: &mut Fields<'_>, tools: &[Value]) -> Result<ToolChoice, ApiError> {
    let choice = match fields.take("tool_choice")? {
        None if tools.is_empty() => return Ok(ToolChoice::None),
        None => return Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => ToolChoice::None,
            "auto" if tools.is_empty() => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            other => {
                let problem =
                    format!("expected \"none\", \"auto\", \"required\" or a tool, got {other:?}");
                return Err(ApiError::invalid("tool_choice", problem));
            }
        },
        Some(Value::Object(choice)) => {
            check_kind("tool_choice", &choice)?;
            let name = choice.get("function").and_then(|f| f.get("name"));
            let Some(Value::String(name)) = name else {
                let problem = "expected the name of a tool";
                return Err(ApiError::invalid("tool_choice.function.name", problem));
            };
            ToolChoice::Named(name.clone())
        }
        Some(other) => {
            return Err(fields.wrong_type("tool_choice", "a string or an object", &other));
        }
    };
    match &choice {
        ToolChoice::Required if tools.is_empty() => Err(ApiError::invalid(
            "tool_choice",
            "there are no 'tools' to choose from",
        )),
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == *name) => {
            let problem = format!("there is no tool {name:?} in 'tools'");
            Err(ApiError::invalid("tool_choice.function.name", problem))
        }
        ToolChoice::None | ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => {
            Ok(choice)
        }
    }
}

/// Reads the calls of an assistant message, as templates expect them: the arguments parsed to an object. Arguments that are
/// not an object stay text: models make mistakes, and their templates may still print what they wrote.
pub(super) fn read_calls(
    at: &str,
    message: &mut Map<String, Value>,
    meter: &Meter,
) -> Result<(), ApiError> {
    let at = format!("{at}.tool_calls");
    let calls = match message.get_mut("tool_calls") {
        None => return Ok(()),
        Some(Value::Array(calls)) if !calls.is_empty() => calls,
        // Templates may only test whether the key exists.
        Some(Value::Array(_) | Value::Null) => {
            message.shift_remove("tool_calls");
            return Ok(());
        }
        Some(_) => return Err(ApiError::invalid(at, "expected a list")),
    };
    for (index, call) in calls.iter_mut().enumerate() {
        read_call(&format!("{at}[{index}]"), call, meter)?;
    }
    Ok(())
}

fn read_call(at: &str, call: &mut Value, meter: &Meter) -> Result<(), ApiError> {
    let Value::Object(call) = call else {
        return Err(ApiError::invalid(at, "expected an object"));
    };
    check_kind(at, call)?;
    if !call.get("id").is_some_and(Value::is_string) {
        return Err(ApiError::invalid(format!("{at}.id"), "expected a string"));
    }
    let at = format!("{at}.function");
    let Some(Value::Object(function)) = call.get_mut("function") else {
        return Err(ApiError::invalid(
            at,
            "expected an object with name and arguments",
        ));
    };
    // Any name that the model called, even one that no tool may have.
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(ApiError::invalid(format!("{at}.name"), "expected a string"));
    }
    match function.get_mut("arguments") {
        Some(Value::Object(_)) => Ok(()),
        Some(arguments @ Value::String(_)) => {
            let text = arguments.as_str().unwrap_or_default().trim();
            if text.is_empty() {
                *arguments = Value::Object(Map::new());
            } else if is_object(text) {
                let object = meter.value_in_text(&format!("{at}.arguments"), text)?;
                if let Ok(object) = object {
                    *arguments = object;
                }
            }
            Ok(())
        }
        _ => Err(ApiError::invalid(
            format!("{at}.arguments"),
            "expected a string of JSON",
        )),
    }
}

/// Converts the arguments of calls back to text, for templates that concatenate them.
pub(crate) fn arguments_as_text(messages: &mut [Value]) -> bool {
    let mut has_changed = false;
    for message in messages {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && arguments.is_object()
            {
                *arguments = Value::String(arguments.to_string());
                has_changed = true;
            }
        }
    }
    has_changed
}
