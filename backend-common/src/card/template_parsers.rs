//! [`TemplateParsers`]: the parsers of a model's tool calls and reasoning, by what its chat template shows.
//!
//! It does not read templates: it looks for texts that only the templates of one family have. The names are those of the
//! frontend's parsers, whose tests compare them. [`WorkerConfig`](crate::worker::WorkerConfig) uses it for what the operator
//! does not name, and the frontend for an error that says what to name.

use serde::Deserialize;
use serde_json::Value;

use super::Artifact;

/// The parsers that a chat template shows. A parser is found only if all that the template shows fits no other.
///
/// # Examples
/// ```
/// use genset_backend_common::card::TemplateParsers;
///
/// let template = r#"{% if tools %}<tool_call>\n{"name": "{{ name }}"}\n</tool_call>"#;
/// assert_eq!(TemplateParsers::of(template).tool, Some("hermes"));
/// assert_eq!(TemplateParsers::of("{{ messages }}").tool, None);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateParsers {
    /// The parser of tool calls.
    pub tool: Option<&'static str>,
    /// The parser of reasoning.
    pub reasoning: Option<&'static str>,
    /// The parsers of tool calls of which one may fit: more than one if the template shows several forms of calls, and one that
    /// is not found if it shows calls, but not the tools to call.
    pub likely_tools: Vec<&'static str>,
}

/// A parser, the texts that its models' templates have, each of them, and those that they lack.
type Row = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

/// The text of a call in the system prompt of Llama's templates.
const LLAMA_CALL: &str = "{\"name\": function name, \"parameters\": ";

/// The same of templates for a list of calls as in Python.
const PYTHONIC_CALL: &str = "[func_name1(";

/// How templates use the tools of a request. Some take them under another name (`xml_tools`) or from a message.
const SEES_TOOLS: [&str; 3] = ["if tools", "in tools", "not tools"];

/// Parsers of tool calls. Rows of one parser are neighbours.
const TOOLS: &[Row] = &[
    ("apertus", &["<|tools_prefix|>"], &[]),
    ("cohere", &["<|START_ACTION|>"], &[]),
    ("deepseek_v3", &["<｜tool▁sep｜>", "```json"], &[]),
    ("deepseek_v31", &["<｜tool▁sep｜>"], &["```json"]),
    ("deepseek_v32", &["｜DSML｜"], &[]),
    ("functiongemma", &["<start_function_call>"], &[]),
    ("gemma3", &[PYTHONIC_CALL, "<start_of_turn>"], &[]),
    ("gemma4", &["<|tool_call>call:"], &[]),
    ("gigachat3", &["<|role_sep|>", "function call"], &[]),
    ("glm45", &["<tool_call>", "<arg_key>"], &["<tool_sep"]),
    ("granite", &["<|tool_call|>", "<|start_of_role|>"], &[]),
    (
        "granite-20b-fc",
        &["<|function_call_library|>", "<function_call> "],
        &[],
    ),
    (
        "harmony",
        &["<|channel|>commentary", "<|message|>", "functions."],
        &[],
    ),
    (
        "hermes",
        &["<tool_call>", "</tool_call>", "{\"name\": "],
        &[
            "<arg_key>",
            "<function=",
            "<tool_calls>",
            "<tool_sep",
            "<|tool_call|>",
        ],
    ),
    ("hunyuan_a13b", &["<tool_calls>[", "\"name\""], &[]),
    ("hy_v3", &["<tool_call", "<tool_sep", "<arg_key"], &[]),
    ("internlm", &["<|action_start|>", "<|plugin|>"], &[]),
    (
        "kimi_k2",
        &["<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
        &[],
    ),
    ("kimi_k3", &["<|open|>", "<|sep|>", "<|close|>"], &[]),
    // Other models write JSON or a fence between these tags.
    (
        "lfm2",
        &["<|tool_call_start|>"],
        &["{\"name\": ", "```python"],
    ),
    ("lfm2", &["<|tool_list_start|>"], &["{\"name\": "]),
    (
        "llama3_function",
        &["<function=example_function_name>{"],
        &[],
    ),
    ("llama3_json", &[LLAMA_CALL], &[]),
    (
        "llama3_json",
        &["<|start_header_id|>", "{\"name\": \"", "\"parameters\": "],
        &["<tool_call>", "<function=", "functools["],
    ),
    ("llama4_pythonic", &[PYTHONIC_CALL, "<|header_start|>"], &[]),
    ("longcat", &["<longcat_tool_call>"], &["<longcat_arg_key>"]),
    (
        "longcat_flash_lite",
        &["<longcat_tool_call>", "<longcat_arg_key>"],
        &[],
    ),
    ("minimax_m2", &["<minimax:tool_call>", "<invoke name="], &[]),
    ("minimax_m3", &["]<]minimax[>["], &[]),
    ("mistral", &["[AVAILABLE_TOOLS]", "[TOOL_CALLS]"], &[]),
    ("nemotron_json", &["<TOOLCALL>["], &[]),
    (
        "olmo3",
        &["<functions>", "<function_calls>"],
        &["<invoke", "｜DSML｜"],
    ),
    ("phi4", &["functools["], &[]),
    ("pythonic", &[PYTHONIC_CALL, "<|start_header_id|>"], &[]),
    (
        "qwen3_coder",
        &["<tool_call>\n<function=", "<parameter="],
        &[],
    ),
    (
        "seed_oss",
        &["<seed:tool_call>", "<function=", "<parameter="],
        &[],
    ),
    ("solar_open2", &["<|tool_call:start|>"], &[]),
    ("step3", &["<steptml:invoke name="], &[]),
    ("xlam", &["[{\"name\": \"tool_call_name\", "], &[]),
];

/// Parsers of reasoning between other tags than `<think>` and `</think>`.
const REASONING: &[Row] = &[
    ("apertus", &["<|inner_prefix|>"], &[]),
    ("cohere", &["<|START_THINKING|>"], &[]),
    ("gemma4", &["<|channel>", "<channel|>"], &[]),
    ("granite", &["Here is my thought process:"], &[]),
    ("harmony", &["<|channel|>analysis", "<|message|>"], &[]),
    ("hy_v3", &["<think:opensource>"], &[]),
    ("kimi", &["◁think▷", "◁/think▷"], &[]),
    (
        "kimi_k3",
        &["<|open|>", "<|sep|>", "<|close|>", "think"],
        &[],
    ),
    ("minimax_m3", &["<mm:think>"], &[]),
    ("mistral", &["[THINK]", "[/THINK]"], &[]),
    ("seed_oss", &["<seed:think>"], &[]),
    ("solar_open2", &["<|think:start|>"], &[]),
];

impl TemplateParsers {
    /// The parsers that this template shows; two templates of a model are one text.
    #[must_use]
    pub fn of(template: &str) -> Self {
        // A template's strings have their line ends and quotes escaped.
        let text = template.replace("\\n", "\n").replace("\\\"", "\"");
        let likely_tools = fitting(TOOLS, &text);
        let shown = only(&likely_tools);
        Self {
            // Without its tools, a model would be asked for calls of tools that it does not see.
            tool: shown.filter(|_| SEES_TOOLS.iter().any(|words| text.contains(words))),
            reasoning: reasoning(&text, shown),
            likely_tools,
        }
    }

    /// The parsers that the templates in a model's files show.
    #[must_use]
    pub fn of_artifacts(artifacts: &[Artifact]) -> Self {
        let content = |name: &str| {
            let mut all = artifacts.iter();
            let file = all.find(|artifact| artifact.reference.name == name)?;
            std::str::from_utf8(&file.content).ok()
        };
        let in_json = |name: &str| content(name).and_then(template_in);
        let chat = content("chat_template.jinja").map(str::to_owned);
        let chat = chat.or_else(|| in_json("chat_template.json"));
        let chat = chat.or_else(|| in_json("tokenizer_config.json"));
        let tool_use = content("additional_chat_templates/tool_use.jinja");
        let both = [chat.as_deref(), tool_use].map(Option::unwrap_or_default);
        Self::of(&both.join("\n"))
    }
}

/// The template in a `tokenizer_config.json`, or the two that chats use of several.
fn template_in(json: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        chat_template: Value,
    }
    let template = serde_json::from_str::<Config>(json).ok()?.chat_template;
    if let Some(text) = template.as_str() {
        return Some(text.to_owned());
    }
    let text = |named: &Value, field: &str| {
        let text = named.get(field).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    let used = template.as_array()?.iter();
    let used = used.filter(|named| ["default", "tool_use"].contains(&&*text(named, "name")));
    let used: Vec<String> = used.map(|named| text(named, "template")).collect();
    Some(used.join("\n"))
}

/// The parsers whose rows fit.
fn fitting(rows: &[Row], text: &str) -> Vec<&'static str> {
    let has = |mark: &&str| text.contains(*mark);
    let fits = |(_, all, none): &&Row| all.iter().all(has) && !none.iter().any(has);
    let mut names: Vec<_> = rows.iter().filter(fits).map(|(name, ..)| *name).collect();
    names.dedup();
    names
}

/// The name, if there is one alone.
fn only(names: &[&'static str]) -> Option<&'static str> {
    let [name] = names else { return None };
    Some(*name)
}

fn reasoning(text: &str, tool: Option<&'static str>) -> Option<&'static str> {
    let mut names = fitting(REASONING, text);
    if text.contains("</think>") {
        names.push(of_think(text, tool)?);
    }
    only(&names)
}

/// The parser of reasoning that ends with `</think>`. The parser of the model's calls tells which of their marks end it, too.
fn of_think(text: &str, tool: Option<&'static str>) -> Option<&'static str> {
    let always = always_thinks(text);
    if text.contains("<｜Assistant｜>") {
        return Some(if always {
            "deepseek_r1"
        } else {
            "deepseek_v31"
        });
    }
    // MiniMax M2 has these tags around results.
    if text.contains("<response>") && tool != Some("minimax_m2") {
        return match text.contains("<|start_of_role|>") {
            true => Some("granite33"),
            false => always.then_some("ernie45"),
        };
    }
    let name = match tool {
        Some(name @ ("glm45" | "hunyuan_a13b" | "hy_v3" | "kimi_k2")) => name,
        Some(name @ ("minimax_m2" | "olmo3" | "step3")) if always => name,
        Some("nemotron_json") => "nemotron",
        Some(_) | None if always => "qwen3_thinking",
        Some(_) | None => "qwen3",
    };
    Some(name)
}

/// Whether every prompt ends with `<think>`: it is in what the template adds for an answer, and no condition is before it.
fn always_thinks(text: &str) -> bool {
    let prompt = text.rsplit_once("add_generation_prompt");
    let Some((before, after)) = prompt.and_then(|(_, end)| end.split_once("<think>")) else {
        return false;
    };
    let conditions = [" if ", "elif ", "else", "endif"];
    !conditions.iter().any(|word| before.contains(word)) && !after.contains("</think>")
}
