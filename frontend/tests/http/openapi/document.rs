//! The served `/openapi.json`, as a test reads it.

use std::collections::BTreeMap;

use jsonschema::Validator;
use serde_json::{Value, json};

/// The document.
#[derive(Debug, Clone)]
pub(super) struct Document(Value);

/// One method of one path.
#[derive(Debug, Clone)]
pub(super) struct Operation {
    pub(super) method: String,
    /// With its parameters in braces.
    pub(super) path: String,
    /// The schema of its body, if it takes one.
    pub(super) body: Option<Value>,
    /// Whether its path has a parameter.
    pub(super) has_parameter: bool,
    /// Its answers by status, with the schema of their JSON, if any.
    answers: BTreeMap<u16, Option<Value>>,
}

/// Validates values against a schema.
pub(super) struct Judge(Validator);

impl Document {
    pub(super) fn new(document: Value) -> Self {
        assert!(
            document["openapi"]
                .as_str()
                .is_some_and(|v| v.starts_with("3.1"))
        );
        Self(document)
    }

    /// Returns what a schema refers to, or the schema itself.
    pub(super) fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            None => schema,
            Some(reference) => {
                let pointer = reference.trim_start_matches('#');
                let found = self.0.pointer(pointer);
                self.resolve(found.unwrap_or_else(|| panic!("{reference} is not there")))
            }
        }
    }

    pub(super) fn operations(&self) -> Vec<Operation> {
        let mut operations = Vec::new();
        for (path, methods) in self.0["paths"].as_object().expect("paths") {
            for (method, operation) in methods.as_object().expect("methods") {
                operations.push(self.operation(method, path, operation));
            }
        }
        operations
    }

    fn operation(&self, method: &str, path: &str, operation: &Value) -> Operation {
        let json_schema = |content: &Value| {
            let schema = &content["content"]["application/json"]["schema"];
            (!schema.is_null()).then(|| schema.clone())
        };
        let answers = operation["responses"].as_object().expect("answers");
        let answers = answers.iter().map(|(status, answer)| {
            let status = status.parse().expect("a status and no default");
            (status, json_schema(self.resolve(answer)))
        });
        Operation {
            method: method.to_uppercase(),
            path: path.to_owned(),
            body: json_schema(&operation["requestBody"]),
            has_parameter: path.contains('{'),
            answers: answers.collect(),
        }
    }

    pub(super) fn judge(&self, schema: &Value) -> Judge {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "allOf": [schema],
            "components": self.0["components"],
        });
        Judge(jsonschema::validator_for(&schema).expect("a schema"))
    }

    /// The validators of every answer of an operation, by status; `None` for an answer that is not JSON.
    pub(super) fn judges(&self, operation: &Operation) -> BTreeMap<u16, Option<Judge>> {
        let judge = |schema: &Option<Value>| schema.as_ref().map(|schema| self.judge(schema));
        let answers = operation.answers.iter();
        answers
            .map(|(status, schema)| (*status, judge(schema)))
            .collect()
    }
}

impl Judge {
    pub(super) fn allows(&self, value: &Value) -> bool {
        self.0.is_valid(value)
    }

    /// What is wrong with a value.
    pub(super) fn faults(&self, value: &Value) -> Vec<String> {
        let faults = self.0.iter_errors(value);
        faults.map(|fault| fault.to_string()).collect()
    }
}
