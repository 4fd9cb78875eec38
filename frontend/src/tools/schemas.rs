//! [`ToolSchemas`]: what parsers need of one request's tools.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::literal::literal;
use crate::json::value_bytes;

/// How many schemas are examined for the types of one parameter. Clients write them, and references may be circular.
const MAX_SCHEMAS: usize = 200;

/// How many values of `enum` and names of `type` are examined for the same. A reference may lead to a long list again and again.
const MAX_VALUES: usize = 10_000;

/// The longest reference that is followed, in bytes.
const MAX_REFERENCE_BYTES: usize = 1024;

/// The keywords that say something about types.
const KEYWORDS: [&str; 7] = ["type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref"];

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

    /// Splits text into the names of a tool and of a parameter of it. Text that is not these is a tool's name as a whole.
    pub(super) fn split_key<'a>(&self, text: &'a str) -> (&'a str, &'a str) {
        let split = |tool: &str| {
            let key = text.strip_prefix(tool)?;
            let tool = &text[..tool.len()];
            self.has_parameter(tool, key).then_some((tool, key))
        };
        let longest = self.names().filter_map(split);
        let longest = longest.max_by_key(|(tool, _)| tool.len());
        longest.filter(|_| !self.has(text)).unwrap_or((text, ""))
    }

    /// What is expected of an element by the names of those around it and its own, beginning with the parameter. Elements of
    /// a list have the name `item`.
    pub(super) fn within<'n>(
        &self,
        tool: &str,
        path: impl IntoIterator<Item = &'n str>,
    ) -> Expected<'_> {
        let schema = self.parameters.get(tool).and_then(|root| {
            let types = Types::new(root);
            let mut schema = root;
            for name in path {
                let referred = schema.get("$ref").and_then(|place| types.referred(place));
                let at = referred.unwrap_or(schema);
                let property = at.get("properties").and_then(|all| all.get(name));
                let item = at.get("items").filter(|_| name == "item");
                let further = at.get("additionalProperties");
                schema = property.or(item).or(further)?;
            }
            Some((root, schema))
        });
        Expected(schema)
    }

    /// Whether a parameter's bare text becomes a string, whatever it looks like.
    pub(super) fn is_text(&self, tool: &str, parameter: &str) -> bool {
        let expected = Expected(self.schema(tool, parameter));
        let takes = |value: &Value| expected.takes(value);
        let others = [json!(null), json!(true), json!(0), json!([]), json!({})];
        takes(&json!("")) && !others.iter().any(takes)
    }

    /// Converts a parameter's bare text to JSON: to the type that it looks like, if the schema allows that; otherwise to a
    /// string. If the schema allows no string, the text may be a Python literal.
    pub(super) fn guess(&self, tool: &str, parameter: &str, text: &str) -> String {
        Expected(self.schema(tool, parameter)).guess(text)
    }
}

/// What a tool's schema says about a value: the root for references, and the value's schema. Without one, any is right.
#[derive(Clone, Copy)]
pub(super) struct Expected<'a>(Option<(&'a Value, &'a Value)>);

impl Expected<'_> {
    /// Whether the type of `value` is right.
    pub(super) fn takes(self, value: &Value) -> bool {
        self.0
            .is_none_or(|(root, schema)| Types::new(root).take(schema, value))
    }

    /// Converts bare text to JSON, as [`ToolSchemas::guess`] does.
    pub(super) fn guess(self, text: &str) -> String {
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
            .is_ok_and(|value| !value.is_string() && self.takes(&value));
        if is_allowed {
            return json.to_owned();
        }
        let literal = match self.takes(&json!("")) {
            true => None,
            false => literal(trimmed).filter(|value| self.takes(value)),
        };
        literal.unwrap_or_else(|| text.into()).to_string()
    }
}

/// The types that schemas allow. An empty schema allows any.
struct Types<'a> {
    /// The root for references.
    root: &'a Value,
    /// How many schemas may still be examined.
    left: usize,
    /// How many values in them may still be examined.
    values_left: usize,
}

impl<'a> Types<'a> {
    fn new(root: &'a Value) -> Self {
        Self {
            root,
            left: MAX_SCHEMAS,
            values_left: MAX_VALUES,
        }
    }

    /// Whether `schema` allows the type of `value`.
    fn take(&mut self, schema: &Value, value: &Value) -> bool {
        let (Some(keywords), Some(left)) = (schema.as_object(), self.left.checked_sub(1)) else {
            return true;
        };
        self.left = left;
        // Looked up by name: there may be any number of others.
        KEYWORDS.into_iter().all(|keyword| {
            let operand = keywords.get(keyword);
            operand.is_none_or(|operand| self.allows(keyword, operand, value))
        })
    }

    /// Whether a keyword with this operand allows the type of `value`.
    fn allows(&mut self, keyword: &str, operand: &Value, value: &Value) -> bool {
        match (keyword, operand) {
            ("type", Value::String(name)) => is_of_type(name, value),
            ("type", Value::Array(names)) => self.any(names, |name| {
                name.as_str().is_some_and(|name| is_of_type(name, value))
            }),
            ("const", constant) => is_of_same_type(constant, value),
            ("enum", Value::Array(values)) => {
                self.any(values, |other| is_of_same_type(other, value))
            }
            ("anyOf" | "oneOf", Value::Array(schemas)) => {
                schemas.iter().any(|schema| self.take(schema, value))
            }
            ("allOf", Value::Array(schemas)) => {
                let mut examined = schemas.iter().take(MAX_SCHEMAS);
                examined.all(|schema| self.take(schema, value))
            }
            ("$ref", reference) => {
                let schema = self.referred(reference);
                schema.is_none_or(|schema| self.take(schema, value))
            }
            _ => true,
        }
    }

    /// Whether any of these values is right; also if there are too many to examine.
    fn any(&mut self, values: &[Value], is_right: impl Fn(&Value) -> bool) -> bool {
        let Some(left) = self.values_left.checked_sub(values.len()) else {
            return true;
        };
        self.values_left = left;
        values.iter().any(is_right)
    }

    fn referred(&self, reference: &Value) -> Option<&'a Value> {
        let place = reference.as_str()?.strip_prefix('#')?;
        let place = Some(place).filter(|place| place.len() <= MAX_REFERENCE_BYTES)?;
        self.root.pointer(place)
    }
}

/// Whether a value has the type of this name. Clients also write the names of Python and of other languages.
fn is_of_type(name: &str, value: &Value) -> bool {
    let is = |names: &[&str]| names.iter().any(|other| name.eq_ignore_ascii_case(other));
    is(&["any"])
        || match value {
            Value::String(_) => is(&["string", "str", "text", "char", "varchar", "enum"]),
            Value::Object(_) => is(&["object", "dict", "map"]),
            Value::Array(_) => is(&["array", "list", "sequence", "tuple"]),
            Value::Bool(_) => is(&["boolean", "bool"]),
            Value::Null => is(&["null", "none"]),
            Value::Number(number) => {
                let is_integer = number.as_f64().is_some_and(is_whole);
                is(&["number", "float", "double"])
                    || (is_integer && is(&["integer", "int", "int32", "int64", "long"]))
            }
        }
}

fn is_of_same_type(one: &Value, other: &Value) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn is_whole(number: f64) -> bool {
    number.fract() == 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the text `5` becomes as the parameter `a` of this schema.
    fn guessed(schema: &Value, definitions: &Value) -> String {
        let parameters = json!({"properties": {"a": schema}, "$defs": definitions});
        let function = json!({"name": "f", "parameters": parameters});
        let tools = [json!({"type": "function", "function": function})];
        ToolSchemas::new(&tools).guess("f", "a", "5")
    }

    #[test]
    fn types_are_read_from_every_keyword() {
        let (number, text) = ("5", "\"5\"");
        let refers = json!({"$ref": "#/$defs/d"});
        let (a_text, a_number) = (json!({"type": "string"}), json!({"type": "number"}));
        for (schema, expected) in [
            (json!({"type": "integer"}), number),
            (json!({"type": "FLOAT"}), number),
            (json!({"type": "int"}), number),
            (json!({"type": "any"}), number),
            (json!({"type": "str"}), text),
            (json!({"type": "list"}), text),
            (json!({"type": ["string", "null"]}), text),
            (json!({"type": ["string", "number"]}), number),
            (json!({"const": "x"}), text),
            (json!({"enum": ["x", 7]}), number),
            (json!({"enum": vec!["x"; 1000]}), text),
            (json!({"anyOf": [a_text, {"type": "null"}]}), text),
            (json!({"oneOf": [a_text, a_number]}), number),
            (json!({"allOf": [a_number, a_text]}), text),
            (json!({"description": "x"}), number),
        ] {
            assert_eq!(guessed(&schema, &json!({})), expected, "{schema}");
            let behind = guessed(&refers, &json!({"d": schema}));
            assert_eq!(behind, expected, "{schema}");
        }
    }

    /// Beyond, a schema says nothing.
    #[test]
    fn a_schema_is_examined_within_limits() {
        let far = "d".repeat(MAX_REFERENCE_BYTES);
        let mut definitions = json!({"d": {"enum": vec!["x"; MAX_VALUES / 2]}});
        definitions[&far] = json!({"type": "string"});
        let refers = json!({"$ref": "#/$defs/d"});
        for (schema, is_examined) in [
            (json!({"anyOf": [refers, refers]}), true),
            (json!({"anyOf": [refers, refers, refers]}), false),
            (json!({"type": vec!["string"; MAX_VALUES + 1]}), false),
            (json!({"$ref": format!("#/$defs/{far}")}), false),
        ] {
            let expected = if is_examined { "\"5\"" } else { "5" };
            assert_eq!(guessed(&schema, &definitions), expected, "{is_examined}");
        }
    }
}
