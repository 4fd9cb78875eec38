//! Conversations with tools: a question, the matching call, the tool's result, and the answer.
//!
//! They are drawn from the kinds of tools in `training/tools.toml`, and from unknown tools, whose names and descriptions are
//! made-up words: nothing about those can be memorized, so the model must read them.

mod tool;
mod unknown;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{Rng, RngExt as _};
use serde::Deserialize;

use self::tool::Tool;
use self::unknown::unknown;
use crate::encode::{Encoder, Role};
use crate::text::Text;
use crate::values::{WORDS, value};
use crate::wording::wants_name;

/// The file's name in the model's folder.
const FILE: &str = "training/tools.toml";
/// The model's answer if none of the tools fits.
pub(crate) const NO_TOOL: &str = "I have no tool for that.";

/// System messages of agents.
const SYSTEM_MESSAGES: [&str; 6] = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools.",
    "Use tools to answer.",
    "Answer the question. Call a tool when one fits.",
    "You are an agent with tools.",
    "Be brief.",
];
/// The kinds of tools in most guides to agents, by the first of their names.
const FIRST_TRIED: [&str; 2] = ["get_weather", "multiply"];
/// Text that joins two questions.
const JOINTS: [&str; 6] = [" And ", " Also, ", " Then, ", " And also: ", " ", " Next: "];

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kinds {
    pub(crate) values: BTreeMap<String, Vec<String>>,
    kinds: Vec<Kind>,
}

/// A kind of tool: its possible names, its arguments, questions for it, and its results.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kind {
    names: Vec<String>,
    descriptions: Vec<String>,
    #[serde(default)]
    parameters: Vec<Parameter>,
    /// `{0}`, `{1}`, ... are the arguments.
    questions: Vec<String>,
    results: Vec<String>,
    /// `{result}` is the result.
    answer: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parameter {
    names: Vec<String>,
    /// A list in the file, or a built-in kind of value.
    values: String,
}

fn any<'a>(list: &'a [String], rng: &mut impl Rng) -> &'a str {
    list.choose(rng).map_or("", String::as_str)
}

impl Kind {
    fn is_first_tried(&self) -> bool {
        let name = self.names.first().map_or("", String::as_str);
        FIRST_TRIED.contains(&name)
    }

    /// The kind of the first argument.
    fn takes(&self) -> Option<&str> {
        self.parameters.first().map(|it| it.values.as_str())
    }
}

impl Kinds {
    /// # Errors
    /// If the file is missing, has another format, or has a kind without a question.
    pub(crate) fn read(model: &Path, encoder: &Encoder) -> anyhow::Result<Self> {
        let path = model.join(FILE);
        let context = || format!("cannot read {}", path.display());
        let content = fs::read_to_string(&path).with_context(context)?;
        let mut kinds: Self = toml::from_str(&content).with_context(context)?;
        kinds.check().with_context(context)?;
        kinds.values.insert(WORDS.to_owned(), encoder.words());
        Ok(kinds)
    }

    fn check(&self) -> anyhow::Result<()> {
        let mut rng = rand::rng();
        for kind in &self.kinds {
            let name = kind.names.first().context("a kind without names")?;
            for parameter in &kind.parameters {
                let drawn = value(&parameter.values, &self.values, &mut rng);
                ensure!(
                    drawn.is_some(),
                    "{name}: no values called {:?}",
                    parameter.values
                );
            }
            for question in &kind.questions {
                for at in 0..kind.parameters.len() {
                    ensure!(
                        question.contains(&format!("{{{at}}}")),
                        "{name}: {question:?} lacks {{{at}}}"
                    );
                }
            }
            let answer = &kind.answer;
            let count = answer.matches("{result}").count();
            ensure!(
                count == 1,
                "{name}: {answer:?} has {{result}} {count} times"
            );
        }
        Ok(())
    }

    /// A conversation with tools, as messages, and how many at its beginning are not learned.
    ///
    /// The tools come after the last question, as the chat template renders them: the model reads the descriptions knowing
    /// the question.
    pub(crate) fn conversation(
        &self,
        text: &Text,
        rng: &mut impl Rng,
    ) -> (Vec<(Role, String)>, usize) {
        let tools = self.offer(rng);
        let mut messages = Vec::new();
        if let Some(system) = SYSTEM_MESSAGES.choose(rng).filter(|_| rng.random_bool(0.4)) {
            messages.push((Role::System, (*system).to_owned()));
        }
        // Shows an earlier choice without the tools: there is nothing to learn from it.
        if rng.random_bool(0.25) {
            self.exchange(&tools, text, &mut messages, rng);
        }
        let known = messages.len();
        self.exchange(&tools, text, &mut messages, rng);
        let list = (Role::System, list(tools.iter().map(Tool::line)));
        messages.insert(after_the_question(&messages), list);
        (messages, known)
    }

    /// Choices alone: a question, and the first call, the first two calls, or why there is none.
    pub(crate) fn choice(&self, text: &Text, rng: &mut impl Rng) -> Vec<(Role, String)> {
        let tools = self.offer(rng);
        let mut messages = Vec::new();
        match rng.random_range(0..100) {
            0..45 => self.one_use(&tools, &mut messages, rng),
            45..72 => self.two_uses(&tools, &mut messages, rng),
            72..88 => self.no_need(text, &mut messages, rng),
            _ => self.no_use(&tools, &mut messages, rng),
        }
        // The last result and the answer are not a choice.
        let last_call = messages
            .iter()
            .rposition(|it| it.1.starts_with("<tool_call>"));
        messages.truncate(last_call.map_or(messages.len(), |at| at + 1));
        let list = (Role::System, list(tools.iter().map(Tool::line)));
        messages.insert(after_the_question(&messages), list);
        messages
    }

    /// A question, and all messages up to its answer.
    fn exchange(
        &self,
        tools: &[Tool],
        text: &Text,
        messages: &mut Vec<(Role, String)>,
        rng: &mut impl Rng,
    ) {
        let is_first_tried = tools.iter().all(|it| it.kind.is_first_tried());
        match rng.random_range(0..100) {
            // People first try a loop of two.
            0..50 if is_first_tried => self.two_uses(tools, messages, rng),
            0..38 => self.one_use(tools, messages, rng),
            38..66 => self.two_uses(tools, messages, rng),
            66..84 => self.no_need(text, messages, rng),
            _ => self.no_use(tools, messages, rng),
        }
    }

    /// One to five tools of different kinds, sometimes [those](FIRST_TRIED) that people try first.
    ///
    /// Half of the time all take the same kind of argument, so that the choice depends on the question.
    fn offer(&self, rng: &mut impl Rng) -> Vec<Tool> {
        if rng.random_bool(0.3) {
            return self.first_tried(rng);
        }
        let count = rng.random_range(1..6);
        let alike = rng
            .random_bool(0.5)
            .then(|| self.kinds.choose(rng))
            .flatten();
        let group: Vec<&Kind> = match alike {
            Some(like) => self
                .kinds
                .iter()
                .filter(|it| it.takes() == like.takes())
                .collect(),
            None => self.kinds.iter().collect(),
        };
        let mut tools = Vec::new();
        for kind in group.sample(rng, count).copied().collect::<Vec<_>>() {
            let kind = if rng.random_bool(0.3) {
                unknown(rng)
            } else {
                kind.clone()
            };
            tools.push(Tool::new(kind, rng));
        }
        tools.shuffle(rng);
        tools
    }

    /// The tools that people try first, mostly with their usual names and questions.
    fn first_tried(&self, rng: &mut impl Rng) -> Vec<Tool> {
        let mut tools: Vec<Tool> = Vec::new();
        for kind in self.kinds.iter().filter(|it| it.is_first_tried()) {
            let mut kind = kind.clone();
            if rng.random_bool(0.7) {
                kind.names.truncate(1);
                kind.descriptions.truncate(1);
                kind.questions.truncate(1);
                for parameter in &mut kind.parameters {
                    parameter.names.truncate(1);
                }
            }
            tools.push(Tool::new(kind, rng));
        }
        tools.shuffle(rng);
        tools
    }

    fn one_use(&self, tools: &[Tool], messages: &mut Vec<(Role, String)>, rng: &mut impl Rng) {
        let Some(tool) = tools.choose(rng) else {
            return;
        };
        let used = tool.used(&self.values, rng);
        // Rare, so that answers begin with a brace only if constrained to: nothing in the prompt asks for it.
        let answer = if rng.random_bool(0.06) {
            used.in_json
        } else {
            used.answer
        };
        messages.push((Role::User, with_change(&used.question, rng)));
        messages.push((Role::Assistant, used.call));
        messages.push((Role::Tool, used.result));
        messages.push((Role::Assistant, answer));
    }

    fn two_uses(&self, tools: &[Tool], messages: &mut Vec<(Role, String)>, rng: &mut impl Rng) {
        let (Some(first), Some(mut second)) = (tools.choose(rng), tools.choose(rng)) else {
            return;
        };
        // Repeating a call of the same tool must be wrong most of the time.
        if std::ptr::eq(first, second) && rng.random_bool(0.8) {
            let others = tools.iter().filter(|it| !std::ptr::eq(*it, first));
            let others: Vec<&Tool> = others.collect();
            second = others.choose(rng).copied().unwrap_or(second);
        }
        let joint = if first.kind.is_first_tried() && rng.random_bool(0.6) {
            JOINTS[0]
        } else {
            JOINTS.choose(rng).copied().unwrap_or(" ")
        };
        let (first, second) = (
            first.used(&self.values, rng),
            second.used(&self.values, rng),
        );
        let follows = if joint == " " || joint.ends_with(": ") {
            second.question.clone()
        } else {
            small_first(&second.question)
        };
        let question = format!("{}{joint}{follows}", first.question);
        messages.push((Role::User, with_change(&question, rng)));
        messages.push((Role::Assistant, first.call));
        messages.push((Role::Tool, first.result));
        messages.push((Role::Assistant, second.call));
        messages.push((Role::Tool, second.result));
        messages.push((
            Role::Assistant,
            format!("{} {}", first.answer, second.answer),
        ));
    }

    /// A question that the model can answer without a tool.
    fn no_need(&self, text: &Text, messages: &mut Vec<(Role, String)>, rng: &mut impl Rng) {
        let for_a_tool =
            |question: &String| self.kinds.iter().any(|it| it.questions.contains(question));
        for _ in 0..20 {
            let conversation = text.conversations.choose(rng);
            let Some(turn) = conversation.and_then(|it| it.turns.first()) else {
                continue;
            };
            let is_plain = conversation.is_some_and(|it| it.system.is_none());
            if !is_plain || wants_name(&turn.answer) || turn.questions.iter().any(for_a_tool) {
                continue;
            }
            messages.push((Role::User, any(&turn.questions, rng).to_owned()));
            messages.push((Role::Assistant, turn.answer.clone()));
            return;
        }
    }

    /// A question for a tool that is not offered.
    fn no_use(&self, tools: &[Tool], messages: &mut Vec<(Role, String)>, rng: &mut impl Rng) {
        let kind = if rng.random_bool(0.3) {
            Some(unknown(rng))
        } else {
            let offered = |kind: &Kind| tools.iter().any(|it| it.kind.names == kind.names);
            let others: Vec<&Kind> = self
                .kinds
                .iter()
                .filter(|it| !it.parameters.is_empty() && !offered(it))
                .collect();
            let taken: Vec<_> = tools.iter().map(|it| it.kind.takes()).collect();
            let is_alike = |it: &&&Kind| taken.contains(&it.takes());
            let alike: Vec<_> = others.iter().filter(is_alike).copied().collect();
            let among = if alike.is_empty() || rng.random_bool(0.5) {
                others
            } else {
                alike
            };
            among.choose(rng).map(|kind| (*kind).clone())
        };
        let Some(kind) = kind else { return };
        let used = Tool::new(kind, rng).used(&self.values, rng);
        messages.push((Role::User, with_change(&used.question, rng)));
        messages.push((Role::Assistant, NO_TOOL.to_owned()));
    }
}

/// One line per tool, as the chat template renders them.
pub(crate) fn list(lines: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let mut text = "<tools>\n".to_owned();
    for line in lines {
        text += line.as_ref();
        text.push('\n');
    }
    text + "</tools>"
}

/// The index of the list of tools: after the last question.
pub(crate) fn after_the_question(messages: &[(Role, String)]) -> usize {
    let question = messages.iter().rposition(|it| it.0 == Role::User);
    question.map_or(0, |at| at + 1)
}

/// The text with its first letter in lower case.
fn small_first(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|it| it.to_lowercase().to_string());
    first.unwrap_or_default() + letters.as_str()
}

/// The question as people write it: sometimes without its last punctuation mark, or with extra words before or after it.
fn with_change(question: &str, rng: &mut impl Rng) -> String {
    let mut text = question.to_owned();
    if rng.random_bool(0.12) {
        let after = [
            " now", " please", ", please", " today", " for me", " quickly", " then",
        ];
        let end = text.trim_end_matches(['?', '.']).len();
        text.insert_str(end, after.choose(rng).unwrap_or(&""));
    }
    if rng.random_bool(0.2) {
        text.truncate(text.trim_end_matches(['?', '.']).len());
    }
    if rng.random_bool(0.15) {
        text = small_first(&text);
    }
    if rng.random_bool(0.08) {
        let before = ["Hello! ", "Please: ", "Hi, ", "Now, ", "Ok. "];
        text.insert_str(0, before.choose(rng).unwrap_or(&""));
    }
    text
}

#[cfg(test)]
mod tests {
    use genset_devtools::tiny_chat::folder;
    use minijinja::context;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;
    use serde_json::{Value, json};

    use super::tool::call;
    use super::*;

    /// The output of the model's own chat template.
    fn rendered(messages: &Value, tools: &Value) -> String {
        let config = fs::read_to_string(folder().join("tokenizer_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        let template = config["chat_template"].as_str().unwrap();
        let [messages, tools] =
            [messages, tools].map(|it| minijinja::Value::from(minijinja::value::Serde(it.clone())));
        minijinja::Environment::new()
            .render_str(template, context! { messages, tools })
            .unwrap()
    }

    #[test]
    fn tools_and_calls_are_written_as_the_chat_template_writes_them() {
        let parameter = |name: &str, values: &str| Parameter {
            names: vec![name.to_owned()],
            values: values.to_owned(),
        };
        let kind = Kind {
            names: vec!["get_weather".to_owned()],
            descriptions: vec!["Get the weather.".to_owned()],
            parameters: vec![parameter("city", "city"), parameter("day", "small")],
            questions: Vec::new(),
            results: Vec::new(),
            answer: String::new(),
        };
        let mut rng = StdRng::seed_from_u64(1);
        let tools = [Tool::new(kind, &mut rng)];
        let arguments = r#""city": "Oslo", "day": 3"#;
        let offered = json!([{"type": "function", "function": {
            "name": "get_weather",
            "description": "Get the weather.",
            "parameters": {"properties": {"city": {"type": "string"}, "day": {"type": "integer"}}},
        }}]);
        let called = json!({"type": "function", "function": {
            "name": "get_weather",
            "arguments": format!("{{{arguments}}}"),
        }});
        let messages = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [called]},
        ]);
        let said = [
            ("system", "Be brief.".to_owned()),
            ("user", "Weather?".to_owned()),
            ("system", list(tools.iter().map(Tool::line))),
            ("assistant", call("get_weather", arguments)),
        ];
        let message = |(role, text)| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
        let expected = said.map(message).concat();
        assert_eq!(rendered(&messages, &offered), expected);
    }

    #[test]
    fn calls_in_conversations_are_json_and_name_a_tool_that_is_offered() {
        let encoder = Encoder::read(folder()).unwrap();
        let (kinds, text) = (
            Kinds::read(folder(), &encoder).unwrap(),
            Text::read(folder()).unwrap(),
        );
        let mut rng = StdRng::seed_from_u64(1);
        let mut calls = 0;
        for _ in 0..300 {
            let (messages, known) = kinds.conversation(&text, &mut rng);
            let list = messages.iter().find(|it| it.1.starts_with("<tools>"));
            let (_, list) = list.unwrap();
            assert!(
                messages.iter().all(|(_, text)| !text.contains("{0}")),
                "{messages:?}"
            );
            assert_eq!(messages.last().unwrap().0, Role::Assistant);
            assert_ne!(messages[known].0, Role::Assistant);
            for (_, said) in messages.iter().filter(|it| it.0 == Role::Assistant) {
                let Some(call) = said.strip_prefix("<tool_call>\n") else {
                    continue;
                };
                let call = call.strip_suffix("\n</tool_call>").unwrap();
                let call: Value = serde_json::from_str(call).unwrap();
                let line = format!("{{\"name\": {}", call["name"]);
                assert!(list.contains(&line), "{messages:?}");
                calls += 1;
            }
        }
        assert!(calls > 200, "{calls}");
    }
}
