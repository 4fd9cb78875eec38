//! Converts a request's fields other than its messages (tools, thinking, output format) to chat fields.

use serde_json::{Map, Value, json};

use super::block::Block;
use crate::error::ApiError;
use crate::openai::Fields;

/// Fields of a tool that are hints, or have no meaning for a model.
const TOOL_IGNORED: [&str; 3] = ["cache_control", "eager_input_streaming", "input_examples"];

/// What is expected where a schema is missing.
const A_SCHEMA: &str = "expected an object, a JSON schema";

/// The edit that says how much of the earlier reasoning the model sees.
const CLEAR_THINKING: &str = "clear_thinking_20251015";

/// The smallest `budget_tokens`, as in Anthropic's API.
const MIN_THINKING_TOKENS: u64 = 1024;

/// Converts `tools` and `tool_choice` to chat fields.
pub(super) fn read_tools(
    fields: &mut Fields<'_>,
    chat: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    if let Some(tools) = fields.list("tools")? {
        let tools = tools.into_iter().enumerate();
        let tools = tools.map(|(index, tool)| read_tool(format!("tools[{index}]"), tool));
        let tools = tools.collect::<Result<Vec<Value>, ApiError>>()?;
        chat.insert("tools".into(), tools.into());
    }
    let Some(choice) = fields.take("tool_choice")? else {
        return Ok(());
    };
    let mut choice = Block::new("tool_choice".into(), choice)?;
    let kind = choice.required_string("type")?;
    let choice_of_chat = match kind.as_str() {
        "auto" | "none" => json!(kind),
        "any" => json!("required"),
        "tool" => {
            let name = choice.required_string("name")?;
            json!({"type": "function", "function": {"name": name}})
        }
        other => {
            let problem =
                format!("expected \"auto\", \"any\", \"tool\" or \"none\", got {other:?}");
            return Err(ApiError::invalid(choice.path("type"), problem));
        }
    };
    chat.insert("tool_choice".into(), choice_of_chat);
    if choice.flag("disable_parallel_tool_use")? {
        chat.insert("parallel_tool_calls".into(), json!(false));
    }
    choice.finish(&[])
}

/// The beginnings of the types of tools that the client runs, and that have no schema because Anthropic's models know it.
const OF_CLIENT: [&str; 4] = ["bash_", "computer_", "memory_", "text_editor_"];

fn read_tool(at: String, tool: Value) -> Result<Value, ApiError> {
    let mut tool = Block::new(at, tool)?;
    match tool.string("type")?.as_deref() {
        None | Some("custom") => {}
        Some(other) => {
            let is_of_client = OF_CLIENT.iter().any(|kind| other.starts_with(kind));
            let why = if is_of_client {
                format!(
                    "only Anthropic's models know the arguments of {other:?}; define a tool of your own, with name and input_schema"
                )
            } else {
                format!("tools of type {other:?} run at Anthropic's; leave it out")
            };
            return Err(ApiError::unsupported(tool.path("type"), why));
        }
    }
    let mut function = Map::new();
    function.insert("name".into(), tool.required_string("name")?.into());
    if let Some(description) = tool.string("description")? {
        function.insert("description".into(), description.into());
    }
    let schema = tool.required_object("input_schema", A_SCHEMA)?;
    function.insert("parameters".into(), schema);
    if tool.flag("strict")? {
        function.insert("strict".into(), json!(true));
    }
    tool.refuse("defer_loading", &[json!(false)])?;
    tool.refuse("allowed_callers", &[json!([]), json!(["direct"])])?;
    tool.finish(&TOOL_IGNORED)?;
    Ok(json!({"type": "function", "function": function}))
}

/// Whether the answer's reasoning is shown.
pub(super) fn read_thinking(
    fields: &mut Fields<'_>,
    max_tokens: Option<u32>,
) -> Result<bool, ApiError> {
    let Some(thinking) = fields.take("thinking")? else {
        return Ok(false);
    };
    let mut thinking = Block::new("thinking".into(), thinking)?;
    let shows = match thinking.required_string("type")?.as_str() {
        "disabled" => false,
        "enabled" => {
            check_budget(thinking.take("budget_tokens"), max_tokens)?;
            fields.ignore("thinking.budget_tokens");
            true
        }
        "adaptive" => true,
        other => {
            let why = format!(
                "{other:?} is not available; send \"enabled\", \"adaptive\" or \"disabled\""
            );
            return Err(ApiError::unsupported("thinking.type", why));
        }
    };
    let display = thinking.string("display")?;
    let is_omitted = match display.as_deref() {
        None | Some("summarized") => false,
        Some("omitted") => true,
        Some(other) => {
            let problem = format!("expected \"summarized\" or \"omitted\", got {other:?}");
            return Err(ApiError::invalid("thinking.display", problem));
        }
    };
    thinking.finish(&[])?;
    Ok(shows && !is_omitted)
}

fn check_budget(budget: Option<Value>, max_tokens: Option<u32>) -> Result<(), ApiError> {
    let name = "thinking.budget_tokens";
    match budget.as_ref().and_then(Value::as_u64) {
        Some(budget) if budget < MIN_THINKING_TOKENS => Err(ApiError::invalid(
            name,
            format!("must be at least {MIN_THINKING_TOKENS}, got {budget}"),
        )),
        Some(budget) if max_tokens.is_some_and(|max| budget >= u64::from(max)) => {
            Err(ApiError::invalid(
                name,
                format!("must be less than 'max_tokens', got {budget}"),
            ))
        }
        Some(_) => Ok(()),
        None => Err(ApiError::invalid(name, "expected a number of tokens")),
    }
}

/// Checks `context_management`. Its only edit here is a hint, because the model's template decides which reasoning it sees again.
pub(super) fn read_context_management(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let Some(mut management) = fields.object("context_management")? else {
        return Ok(());
    };
    let edits = management.list("edits")?.unwrap_or_default();
    if !edits.is_empty() {
        management.ignore("edits");
    }
    for (index, edit) in edits.into_iter().enumerate() {
        let mut edit = Block::new(format!("context_management.edits[{index}]"), edit)?;
        let kind = edit.required_string("type")?;
        if kind != CLEAR_THINKING {
            return Err(edit.unavailable("type", &kind, &format!("{CLEAR_THINKING:?}")));
        }
        edit.finish(&["keep"])?;
    }
    management.finish(&[])
}

/// Converts `output_config` to chat fields, and `output_format`, which is the name of its `format` in a beta that older clients use.
pub(super) fn read_output_config(
    fields: &mut Fields<'_>,
    chat: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    if let Some(config) = fields.take("output_config")? {
        let mut config = Block::new("output_config".into(), config)?;
        if let Some(effort) = config.string("effort")? {
            chat.insert("reasoning_effort".into(), effort.into());
        }
        if let Some(format) = config.object("format")? {
            let format = read_format(config.path("format"), format)?;
            chat.insert("response_format".into(), format);
        }
        config.finish(&[])?;
    }
    let Some(format) = fields.take("output_format")? else {
        return Ok(());
    };
    let format = read_format("output_format".into(), format)?;
    match chat.insert("response_format".into(), format) {
        None => Ok(()),
        Some(_) => {
            let problem = "'output_config.format' is given too; send it alone";
            Err(ApiError::invalid("output_format", problem))
        }
    }
}

/// The format of an answer as a chat's `response_format`.
fn read_format(at: String, format: Value) -> Result<Value, ApiError> {
    let mut format = Block::new(at, format)?;
    let kind = format.required_string("type")?;
    if kind != "json_schema" {
        return Err(format.unavailable("type", &kind, "\"json_schema\""));
    }
    let schema = format.required_object("schema", A_SCHEMA)?;
    format.finish(&[])?;
    let named = json!({"name": "output", "schema": schema, "strict": true});
    Ok(json!({"type": "json_schema", "json_schema": named}))
}
