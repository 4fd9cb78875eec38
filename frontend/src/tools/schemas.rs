//! [`ToolSchemas`]: the tools of one request, as far as parsers need them.

use std::collections::BTreeMap;

use serde_json::Value;

/// The parameters of each tool of a request, by the tool's name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSchemas {
    parameters: BTreeMap<String, Value>,
}

/// How a parameter whose value comes as bare text becomes JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Typing {
    /// A string, whatever it looks like.
    Text,
    /// What it looks like, if the schema allows that; else a string.
    Guess,
}

impl ToolSchemas {
    /// Reads the objects of a request's `tools`, which were checked.
    ///
    /// # Examples
    /// ```
    /// use genset_frontend::tools::ToolSchemas;
    /// use serde_json::json;
    ///
    /// let tools = ToolSchemas::new(&[json!({"type": "function", "function": {"name": "get_time"}})]);
    /// assert!(tools.has("get_time") && !tools.has("get_date"));
    /// ```
    #[must_use]
    pub fn new(tools: &[Value]) -> Self {
        let read = |tool: &Value| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            let parameters = function.get("parameters").cloned();
            Some((name, parameters.unwrap_or(Value::Null)))
        };
        Self {
            parameters: tools.iter().filter_map(read).collect(),
        }
    }

    /// Whether there is a tool of this name.
    #[must_use]
    pub fn has(&self, tool: &str) -> bool {
        self.parameters.contains_key(tool)
    }

    /// Every name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    fn schema(&self, tool: &str, parameter: &str) -> Option<&Value> {
        self.parameters.get(tool)?.get("properties")?.get(parameter)
    }

    pub(super) fn typing(&self, tool: &str, parameter: &str) -> Typing {
        match self.schema(tool, parameter).and_then(|s| s.get("type")) {
            Some(Value::String(kind)) if kind == "string" => Typing::Text,
            _ => Typing::Guess,
        }
    }

    /// The JSON of a parameter's value that came as bare text.
    pub(super) fn guess(&self, tool: &str, parameter: &str, text: &str) -> String {
        let trimmed = text.trim();
        // Models trained on Python write its words.
        let json = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        let is_allowed = serde_json::from_str::<Value>(json)
            .is_ok_and(|value| allows(self.schema(tool, parameter), &value));
        if is_allowed {
            json.to_owned()
        } else {
            Value::from(text).to_string()
        }
    }
}

/// Whether the schema's `type` takes the value; one that says nothing takes all but strings, which stand without quotes.
fn allows(schema: Option<&Value>, value: &Value) -> bool {
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(is_whole),
        _ => false,
    };
    match schema.and_then(|schema| schema.get("type")) {
        Some(Value::String(kind)) => is(kind),
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).any(is),
        _ => !value.is_string(),
    }
}

fn is_whole(number: f64) -> bool {
    number.fract() == 0.0
}
