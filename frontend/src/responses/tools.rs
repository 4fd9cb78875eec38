//! The tools of a request as a chat's. A chat has no namespaces: the model sees a function of a namespace under both names.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::block::Block;
use crate::error::ApiError;
use crate::openai::{Fields, GRAMMAR_IS_SHOWN, check_function, check_tool_name, read_custom};

/// Separates the name of a namespace from that of its function, unless the former ends with it.
const SEPARATOR: &str = "__";

/// The most functions in the namespaces of a request. A chat takes fewer by far, but counts them later: until then, a long name of a
/// namespace would take memory for each of them.
const MAX_IN_NAMESPACES: usize = 1024;

/// Tools that run at OpenAI and need nothing of the client's. Codex and others offer them whoever serves the model, which never calls
/// them here.
pub(crate) const HOSTED: [&str; 6] = [
    "code_interpreter",
    "image_generation",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
];

fn is_hosted(tool: &Value) -> bool {
    tool["type"]
        .as_str()
        .is_some_and(|kind| HOSTED.contains(&kind))
}

/// The functions of a request's namespaces: each one's namespace and name, by the name that the model sees.
#[derive(Debug, Clone, Default)]
pub(super) struct Namespaces(BTreeMap<String, [String; 2]>);

impl Namespaces {
    /// The namespace of a function that the model called, and the function's name.
    pub(super) fn split<'a>(&'a self, seen: &'a str) -> (Option<&'a str>, &'a str) {
        match self.0.get(seen) {
            Some([namespace, name]) => (Some(namespace.as_str()), name.as_str()),
            None => (None, seen),
        }
    }

    /// Its approximate memory in bytes.
    pub(super) fn bytes(&self) -> usize {
        let bytes = |(seen, [namespace, name]): (&String, &[String; 2])| {
            seen.len() + namespace.len() + name.len() + 3 * size_of::<String>()
        };
        self.0.iter().map(bytes).sum()
    }
}

/// The name that the model sees.
pub(super) fn seen_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None => name.to_owned(),
        Some(namespace) if namespace.ends_with(SEPARATOR) => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}{SEPARATOR}{name}"),
    }
}

/// Parses `tools` and `tool_choice`, whose functions and custom tools are nested one level less than a chat's.
pub(super) fn read_tools(
    fields: &mut Fields<'_>,
    chat: &mut Map<String, Value>,
) -> Result<Namespaces, ApiError> {
    let mut functions = Functions::default();
    if let Some(tools) = fields.list("tools")? {
        let mut hosted = None;
        for (index, tool) in tools.into_iter().enumerate() {
            let at = format!("tools[{index}]");
            if is_hosted(&tool) {
                // Named once: a body has room for many of them, a header has not.
                hosted.get_or_insert(at);
            } else {
                functions.add(&at, tool)?;
            }
        }
        if let Some(at) = hosted {
            fields.accept(&at, "this tool runs at OpenAI; leave it out")?;
        }
        if let Some(at) = &functions.first_grammar {
            fields.accept(at, GRAMMAR_IS_SHOWN)?;
        }
        functions.refuse_clashes()?;
        chat.insert("tools".into(), functions.of_chat.into());
    }
    match fields.take("tool_choice")? {
        None => {}
        Some(choice @ Value::Object(_)) => {
            let choice = Block::new("tool_choice".into(), choice)?;
            chat.insert("tool_choice".into(), read_choice(choice)?);
        }
        Some(other) => {
            chat.insert("tool_choice".into(), other);
        }
    }
    Ok(functions.namespaces)
}

/// A choice of one tool or of several as a chat's.
fn read_choice(mut choice: Block) -> Result<Value, ApiError> {
    let of_chat = match choice.required_string("type")?.as_str() {
        kind @ ("function" | "custom") => named(kind, &choice.required_string("name")?),
        "allowed_tools" => {
            let allowed = json!({"mode": choice.take("mode"), "tools": read_allowed(&mut choice)?});
            json!({"type": "allowed_tools", "allowed_tools": allowed})
        }
        other => {
            let available = "\"function\", \"custom\" and \"allowed_tools\"";
            return Err(choice.unavailable("type", other, available));
        }
    };
    choice.finish(&[])?;
    Ok(of_chat)
}

fn read_allowed(choice: &mut Block) -> Result<Vec<Value>, ApiError> {
    let at = choice.path("tools");
    let Some(Value::Array(tools)) = choice.take("tools") else {
        return Err(ApiError::invalid(at, "expected a list of tools"));
    };
    if !tools.is_empty() && tools.iter().all(is_hosted) {
        let why = "these tools run at OpenAI; name one of your own, or choose \"none\"";
        return Err(ApiError::unsupported(at, why));
    }
    let read = |(index, tool): (usize, Value)| {
        let mut tool = Block::new(format!("{at}[{index}]"), tool)?;
        let kind = tool.required_string("type")?;
        if !matches!(kind.as_str(), "function" | "custom") {
            return Err(tool.unavailable("type", &kind, "\"function\" and \"custom\""));
        }
        Ok(named(&kind, &tool.required_string("name")?))
    };
    let tools = tools.into_iter().enumerate();
    tools
        .filter(|(_, tool)| !is_hosted(tool))
        .map(read)
        .collect()
}

/// A chat's choice of a tool of this type.
fn named(kind: &str, name: &str) -> Value {
    json!({"type": kind, kind: {"name": name}})
}

/// The functions that were read so far.
#[derive(Default)]
struct Functions {
    of_chat: Vec<Value>,
    namespaces: Namespaces,
    /// The path of the first grammar of a custom tool. Like a hosted tool, it is named once.
    first_grammar: Option<String>,
}

impl Functions {
    fn add(&mut self, at: &str, tool: Value) -> Result<(), ApiError> {
        let mut tool = Block::new(at.to_owned(), tool)?;
        match tool.required_string("type")?.as_str() {
            "function" => self.add_function(at, tool, None),
            "custom" => {
                tool.refuse("defer_loading", &[json!(false)])?;
                let (custom, grammar_at) = read_custom(tool)?;
                if let Some(at) = grammar_at {
                    self.first_grammar.get_or_insert(at);
                }
                self.of_chat
                    .push(json!({"type": "custom", "custom": custom}));
                Ok(())
            }
            "namespace" => self.add_namespace(at, tool),
            other => {
                let why = format!(
                    "tools of type {other:?} are not available, only \"function\", \"custom\" and \"namespace\""
                );
                Err(ApiError::unsupported(tool.path("type"), why))
            }
        }
    }

    fn add_namespace(&mut self, at: &str, mut namespace: Block) -> Result<(), ApiError> {
        let name = namespace.required_string("name")?;
        check_tool_name(&namespace.path("name"), Some(&json!(name)))?;
        namespace.string("description")?;
        let tools = match namespace.take("tools") {
            Some(Value::Array(tools)) if !tools.is_empty() => tools,
            _ => {
                let problem = "expected a list of at least one function";
                return Err(ApiError::invalid(namespace.path("tools"), problem));
            }
        };
        namespace.finish(&[])?;
        for (index, tool) in tools.into_iter().enumerate() {
            let at = format!("{at}.tools[{index}]");
            let mut tool = Block::new(at.clone(), tool)?;
            let kind = tool.required_string("type")?;
            if kind != "function" {
                let why = format!("{kind:?} is not available in a namespace, only \"function\"");
                return Err(ApiError::unsupported(tool.path("type"), why));
            }
            self.add_function(&at, tool, Some(&name))?;
        }
        Ok(())
    }

    /// Refuses a function outside of namespaces with a name that the model sees of another.
    fn refuse_clashes(&self) -> Result<(), ApiError> {
        let names = self.of_chat.iter();
        let names = names.filter_map(|tool| tool["function"]["name"].as_str());
        let mut left: BTreeSet<&str> = self.namespaces.0.keys().map(String::as_str).collect();
        let mut clashes =
            names.filter(|name| self.namespaces.0.contains_key(*name) && !left.remove(name));
        match clashes.next() {
            None => Ok(()),
            Some(name) => {
                let problem = format!("the model would see two tools named {name:?}");
                Err(ApiError::invalid("tools", problem))
            }
        }
    }

    fn add_function(
        &mut self,
        at: &str,
        mut tool: Block,
        namespace: Option<&str>,
    ) -> Result<(), ApiError> {
        let mut function = Map::new();
        for name in ["name", "description", "parameters", "strict"] {
            if let Some(value) = tool.take(name) {
                function.insert(name.into(), value);
            }
        }
        tool.refuse("defer_loading", &[json!(false)])?;
        tool.finish(&[])?;
        check_function(at, &function)?;
        let name = function.get("name").and_then(Value::as_str);
        let name = name.unwrap_or_default().to_owned();
        if let Some(namespace) = namespace {
            let seen = seen_name(Some(namespace), &name);
            function.insert("name".into(), seen.clone().into());
            // The two names may be too long together.
            check_function(at, &function)?;
            let own = [namespace.to_owned(), name];
            if self.namespaces.0.insert(seen, own).is_some() {
                let problem = "another function of a namespace has this name for the model";
                return Err(ApiError::invalid(format!("{at}.name"), problem));
            }
            if self.namespaces.0.len() > MAX_IN_NAMESPACES {
                let problem = format!("at most {MAX_IN_NAMESPACES} functions in namespaces");
                return Err(ApiError::invalid("tools", problem));
            }
        }
        self.of_chat
            .push(json!({"type": "function", "function": function}));
        Ok(())
    }
}
