//! [`ToolSchemas`]: what parsers need of one request's tools.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::json::value_bytes;

/// How many schemas are examined for the types of one parameter. Clients write them, and references may be circular.
const MAX_SCHEMAS: usize = 200;

/// The parameters of each tool of a request, by the tool's name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSchemas {
    parameters: BTreeMap<String, Value>,
}

impl ToolSchemas {
    /// Reads a request's `tools`, which were validated.
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

    /// Whether there is a tool with this name.
    #[must_use]
    pub fn has(&self, tool: &str) -> bool {
        self.parameters.contains_key(tool)
    }

    /// Its approximate memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let tool = |(name, schema): (&String, &Value)| name.len() + value_bytes(schema);
        self.parameters.iter().map(tool).sum()
    }

    /// The names of all tools.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The schema of a tool's parameters, and within it that of one parameter.
    fn schema(&self, tool: &str, parameter: &str) -> Option<(&Value, &Value)> {
        let root = self.parameters.get(tool)?;
        Some((root, root.get("properties")?.get(parameter)?))
    }

    /// Whether a tool has this parameter among its properties.
    pub(super) fn has_parameter(&self, tool: &str, parameter: &str) -> bool {
        self.schema(tool, parameter).is_some()
    }

    /// Whether a parameter accepts the type of `value`. A parameter without a schema accepts any.
    fn takes(&self, tool: &str, parameter: &str, value: &Value) -> bool {
        let schema = self.schema(tool, parameter);
        schema.is_none_or(|(root, schema)| Types::new(root).take(schema, value))
    }

    /// Whether a parameter's bare text becomes a string, whatever it looks like.
    pub(super) fn is_text(&self, tool: &str, parameter: &str) -> bool {
        let takes = |value: &Value| self.takes(tool, parameter, value);
        let others = [json!(null), json!(true), json!(0), json!([]), json!({})];
        takes(&json!("")) && !others.iter().any(takes)
    }

    /// Converts a parameter's bare text to JSON: to the type that it looks like, if the schema allows that; otherwise to a
    /// string.
    pub(super) fn guess(&self, tool: &str, parameter: &str, text: &str) -> String {
        let trimmed = text.trim();
        // Models trained on Python write its literals.
        let json = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            other => other,
        };
        // Strings have no quotes.
        let is_allowed = serde_json::from_str::<Value>(json)
            .is_ok_and(|value| !value.is_string() && self.takes(tool, parameter, &value));
        if is_allowed {
            json.to_owned()
        } else {
            Value::from(text).to_string()
        }
    }
}

/// The types that schemas allow. An empty schema allows any.
struct Types<'a> {
    /// The root for references.
    root: &'a Value,
    /// How many schemas may still be examined.
    left: usize,
}

impl<'a> Types<'a> {
    fn new(root: &'a Value) -> Self {
        Self {
            root,
            left: MAX_SCHEMAS,
        }
    }

    /// Whether `schema` allows the type of `value`.
    fn take(&mut self, schema: &Value, value: &Value) -> bool {
        let (Some(keywords), Some(left)) = (schema.as_object(), self.left.checked_sub(1)) else {
            return true;
        };
        self.left = left;
        keywords.iter().all(|(keyword, operand)| {
            let operands = operand.as_array();
            match keyword.as_str() {
                "type" => is_of_type(operand, value),
                "const" => is_of_same_type(operand, value),
                "enum" => operands
                    .is_none_or(|values| values.iter().any(|other| is_of_same_type(other, value))),
                "anyOf" | "oneOf" => operands
                    .is_none_or(|schemas| schemas.iter().any(|schema| self.take(schema, value))),
                "allOf" => operands
                    .is_none_or(|schemas| schemas.iter().all(|schema| self.take(schema, value))),
                "$ref" => self
                    .referred(operand)
                    .is_none_or(|schema| self.take(schema, value)),
                _ => true,
            }
        })
    }

    fn referred(&self, reference: &Value) -> Option<&'a Value> {
        let place = reference.as_str()?.strip_prefix('#')?;
        self.root.pointer(place)
    }
}

/// Whether a value has the `type`, or one of several.
fn is_of_type(types: &Value, value: &Value) -> bool {
    let is = |name: &str| match name {
        "string" => value.is_string(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(is_whole),
        _ => false,
    };
    match types {
        Value::String(name) => is(name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => true,
    }
}

fn is_of_same_type(one: &Value, other: &Value) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn is_whole(number: f64) -> bool {
    number.fract() == 0.0
}
