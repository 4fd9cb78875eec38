//! A tool as one conversation offers it, and its uses.

use std::collections::BTreeMap;

use rand::seq::IndexedRandom as _;
use rand::{Rng, RngExt as _};

use super::{Kind, Parameter, any};
use crate::values::{fill, is_integer, value};

/// Possible field names for a tool's result in an object.
const RESULT_NAMES: [&str; 6] = ["result", "output", "value", "answer", "text", "content"];

/// A tool as offered in one conversation.
pub(super) struct Tool {
    pub(super) kind: Kind,
    name: String,
    description: String,
    parameters: Vec<String>,
}

/// One use of a tool.
pub(super) struct Use {
    pub(super) question: String,
    pub(super) call: String,
    pub(super) result: String,
    pub(super) answer: String,
    /// The answer if a schema asks for an object.
    pub(super) in_json: String,
}

impl Tool {
    pub(super) fn new(kind: Kind, rng: &mut impl Rng) -> Self {
        Self {
            name: any(&kind.names, rng).to_owned(),
            description: any(&kind.descriptions, rng).to_owned(),
            parameters: kind
                .parameters
                .iter()
                .map(|it| any(&it.names, rng).to_owned())
                .collect(),
            kind,
        }
    }

    /// The tool's line in the prompt: the description comes first, so that the model knows it when it reads the name.
    pub(super) fn line(&self) -> String {
        let parameter = |(name, parameter): (&String, &Parameter)| {
            let kind = if is_integer(&parameter.values) {
                "integer"
            } else {
                "string"
            };
            format!("\"{name}\": {kind}")
        };
        let parameters = self.parameters.iter().zip(&self.kind.parameters);
        let parameters: Vec<String> = parameters.map(parameter).collect();
        format!(
            "{} {{\"name\": \"{}\", \"arguments\": {{{}}}}}",
            self.description,
            self.name,
            parameters.join(", ")
        )
    }

    pub(super) fn used(&self, lists: &BTreeMap<String, Vec<String>>, rng: &mut impl Rng) -> Use {
        let arguments: Vec<String> = self
            .kind
            .parameters
            .iter()
            .map(|it| value(&it.values, lists, rng).unwrap_or_default())
            .collect();
        let written = std::iter::zip(&self.parameters, &self.kind.parameters)
            .zip(&arguments)
            .map(|((name, parameter), argument)| {
                if is_integer(&parameter.values) {
                    format!("\"{name}\": {argument}")
                } else {
                    format!("\"{name}\": \"{argument}\"")
                }
            });
        let result = fill(any(&self.kind.results, rng), &arguments, lists, rng);
        let (result, answer) = if rng.random_bool(0.04) {
            let problem = value("phrase", lists, rng).unwrap_or_default();
            let problem = format!("error: {problem}");
            let answer = format!("That did not work: {problem}");
            (problem, answer)
        } else {
            let answer = fill(&self.kind.answer, &arguments, lists, rng);
            (result.clone(), answer.replace("{result}", &result))
        };
        Use {
            question: fill(any(&self.kind.questions, rng), &arguments, lists, rng),
            call: call(&self.name, &written.collect::<Vec<_>>().join(", ")),
            in_json: in_json(&result, rng),
            result: in_a_form(&result, rng),
            answer,
        }
    }
}

/// A call as the chat template renders it.
pub(super) fn call(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{{arguments}}}}}\n</tool_call>")
}

/// The result as an object of one field.
fn in_json(result: &str, rng: &mut impl Rng) -> String {
    let numbers = ["degrees", "value", "count", "number", "amount", "minutes"];
    let texts = ["result", "text", "answer", "weather", "value", "summary"];
    let digits = |it: &char| it.is_ascii_digit();
    let number: String = result
        .chars()
        .skip_while(|it| !digits(it))
        .take_while(digits)
        .collect();
    match number.parse::<u32>() {
        Ok(number) => format!(
            "{{\"{}\": {number}}}",
            numbers.choose(rng).unwrap_or(&"value")
        ),
        Err(_) => format!(
            "{{\"{}\": \"{result}\"}}",
            texts.choose(rng).unwrap_or(&"text")
        ),
    }
}

/// A result in a form that tools use: mostly text, sometimes JSON.
fn in_a_form(result: &str, rng: &mut impl Rng) -> String {
    match rng.random_range(0..10) {
        0..6 => result.to_owned(),
        6 => format!("\"{result}\""),
        7 => {
            let name = RESULT_NAMES.choose(rng).unwrap_or(&"result");
            format!("{{\"{name}\":\"{result}\"}}")
        }
        _ => {
            let name = RESULT_NAMES.choose(rng).unwrap_or(&"result");
            format!("{{\"{name}\": \"{result}\"}}")
        }
    }
}
