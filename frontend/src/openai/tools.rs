//! The tool fields of a chat request.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::common::{ParamLimits, at_most};
use super::custom::{GRAMMAR_IS_SHOWN, as_function, as_function_call, read_custom};
use super::fields::Fields;
use crate::block::Block;
use crate::error::ApiError;
use crate::json::{Meter, is_object};

/// The longest name of a tool, in bytes, as in Anthropic's API; OpenAI's takes fewer.
const MAX_NAME_BYTES: usize = 128;

/// The tools that a request offers.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolOptions {
    /// The tools, each a function: as the client sent it, or one of a text for a custom tool.
    pub tools: Vec<Value>,
    /// The names of the custom tools, if there are any.
    pub custom: Option<Arc<BTreeSet<String>>>,
    /// Which of them the model may or must call.
    pub choice: ToolChoice,
    /// The names of those that it may call, if not all. It sees the others too, so that its prompt stays in the prefix cache.
    pub allowed: Option<Arc<BTreeSet<String>>>,
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
            custom: None,
            choice: ToolChoice::None,
            allowed: None,
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

    /// Whether the model may call this one of the tools.
    #[must_use]
    pub fn may_call(&self, tool: &Value) -> bool {
        let allowed = self.allowed.as_ref();
        allowed.is_none_or(|allowed| allowed.contains(name_of(tool)))
    }

    pub(super) fn read(fields: &mut Fields<'_>, limits: &ParamLimits) -> Result<Self, ApiError> {
        let mut tools = fields.list("tools")?.unwrap_or_default();
        at_most("tools", limits.max_tools, tools.len(), "tools")?;
        let custom = read_tools(fields, &mut tools)?;
        let (choice, allowed) = match fields.take("tool_choice")? {
            Some(choice) if choice["type"] == "allowed_tools" => {
                let (choice, allowed) = read_allowed(choice, &tools, limits)?;
                (choice, Some(Arc::new(allowed)))
            }
            choice => (read_choice(fields, choice, &tools)?, None),
        };
        let is_parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        refuse_legacy(fields)?;
        Ok(Self {
            tools,
            custom: (!custom.is_empty()).then(|| Arc::new(custom)),
            choice,
            allowed,
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

/// Checks the tools, and makes functions of custom ones. Returns the names of those.
fn read_tools(fields: &Fields<'_>, tools: &mut [Value]) -> Result<BTreeSet<String>, ApiError> {
    let mut custom = BTreeSet::new();
    let mut first_grammar = None;
    for (index, tool) in tools.iter_mut().enumerate() {
        let at = format!("tools[{index}]");
        if tool.get("type").is_none_or(|kind| kind != "custom") {
            check_tool(&at, tool)?;
            continue;
        }
        let mut of_type = Block::new(at, std::mem::take(tool))?;
        let expected = "expected an object with a name";
        let own = of_type.required_object("custom", expected)?;
        let own = Block::new(of_type.path("custom"), own)?;
        of_type.finish(&["type"])?;
        let (own, grammar_at) = read_custom(own)?;
        first_grammar = first_grammar.or(grammar_at);
        *tool = as_function(own);
        custom.insert(name_of(tool).to_owned());
    }
    // A call says no more than the name.
    let named = tools.iter().filter(|tool| custom.contains(name_of(tool)));
    if named.count() > custom.len() {
        let problem = "a custom tool has the name of another tool";
        return Err(ApiError::invalid("tools", problem));
    }
    if let Some(at) = first_grammar {
        fields.accept(&at, GRAMMAR_IS_SHOWN)?;
    }
    Ok(custom)
}

fn name_of(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

fn check_tool(at: &str, tool: &Value) -> Result<(), ApiError> {
    let Value::Object(tool) = tool else {
        return Err(ApiError::invalid(at, "expected an object"));
    };
    read_kind(at, tool)?;
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

/// The `type` of a tool or a call: `function` or `custom`.
fn read_kind<'a>(at: &str, object: &'a Map<String, Value>) -> Result<&'a str, ApiError> {
    let at = format!("{at}.type");
    match object.get("type") {
        Some(Value::String(kind)) if matches!(kind.as_str(), "function" | "custom") => {
            Ok(kind.as_str())
        }
        Some(Value::String(kind)) => Err(ApiError::unsupported(
            at,
            format!("{kind:?} is not available, only \"function\" and \"custom\""),
        )),
        _ => Err(ApiError::invalid(at, "expected \"function\" or \"custom\"")),
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

fn read_choice(
    fields: &Fields<'_>,
    choice: Option<Value>,
    tools: &[Value],
) -> Result<ToolChoice, ApiError> {
    match choice {
        None if tools.is_empty() => Ok(ToolChoice::None),
        None => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" if tools.is_empty() => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" if tools.is_empty() => Err(ApiError::invalid(
                "tool_choice",
                "there are no 'tools' to choose from",
            )),
            "required" => Ok(ToolChoice::Required),
            other => {
                let problem =
                    format!("expected \"none\", \"auto\", \"required\" or a tool, got {other:?}");
                Err(ApiError::invalid("tool_choice", problem))
            }
        },
        Some(Value::Object(choice)) => {
            chosen_name("tool_choice", &choice, tools).map(ToolChoice::Named)
        }
        Some(other) => Err(fields.wrong_type("tool_choice", "a string or an object", &other)),
    }
}

/// Reads which of the tools the model may call, and whether it must call one.
fn read_allowed(
    choice: Value,
    tools: &[Value],
    limits: &ParamLimits,
) -> Result<(ToolChoice, BTreeSet<String>), ApiError> {
    let mut choice = Block::new("tool_choice".into(), choice)?;
    let expected = "expected an object with a mode and tools";
    let allowed = choice.required_object("allowed_tools", expected)?;
    let mut allowed = Block::new(choice.path("allowed_tools"), allowed)?;
    choice.finish(&["type"])?;
    let choice = match allowed.required_string("mode")?.as_str() {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        other => {
            let problem = format!("expected \"auto\" or \"required\", got {other:?}");
            return Err(ApiError::invalid(allowed.path("mode"), problem));
        }
    };
    let at = allowed.path("tools");
    let chosen = match allowed.take("tools") {
        Some(Value::Array(chosen)) if !chosen.is_empty() => chosen,
        _ => {
            return Err(ApiError::invalid(
                at,
                "expected a list of at least one tool",
            ));
        }
    };
    allowed.finish(&[])?;
    at_most(&at, limits.max_tools, chosen.len(), "tools")?;
    let names = chosen.iter().enumerate().map(|(index, tool)| {
        let at = format!("{at}[{index}]");
        let Value::Object(tool) = tool else {
            return Err(ApiError::invalid(at, "expected an object"));
        };
        chosen_name(&at, tool, tools)
    });
    Ok((choice, names.collect::<Result<_, _>>()?))
}

/// The name in `chosen`, which must be that of one of the `tools`.
fn chosen_name(at: &str, chosen: &Map<String, Value>, tools: &[Value]) -> Result<String, ApiError> {
    let kind = read_kind(at, chosen)?;
    let at = format!("{at}.{kind}.name");
    let name = chosen.get(kind).and_then(|tool| tool.get("name"));
    let Some(Value::String(name)) = name else {
        return Err(ApiError::invalid(at, "expected the name of a tool"));
    };
    if tools.iter().any(|tool| name_of(tool) == name) {
        return Ok(name.clone());
    }
    let problem = format!("there is no tool {name:?} in 'tools'");
    Err(ApiError::invalid(at, problem))
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
    let is_custom = read_kind(at, call)? == "custom";
    if !call.get("id").is_some_and(Value::is_string) {
        return Err(ApiError::invalid(format!("{at}.id"), "expected a string"));
    }
    if is_custom {
        return as_function_call(at, call);
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
