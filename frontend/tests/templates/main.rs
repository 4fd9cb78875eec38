//! Chat templates in the style of the most used model families, rendered as `transformers` renders them.
//!
//! Every case of `cases.json` goes through every template. `goldens` has the results of `transformers`, recorded by
//! `python-tests/template_goldens.py`; the Python tests check that they are current.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]

mod parsers;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use genset_frontend::text::{ChatTemplate, TemplateError, TemplateInput};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The formats in which the templates print today's date. In a golden prompt, the format stands for the date.
const DATE_FORMATS: [&str; 2] = ["%d %b %Y", "%B %d, %Y"];

/// Intended differences: the template, the case and the reason.
const DEVIATIONS: [(&str, &str, &str); 4] = [
    ("deepseek", NO_TOOLS, NO_TOOLS_WHY),
    ("llama3", NO_TOOLS, NO_TOOLS_WHY),
    ("mistral", NO_TOOLS, NO_TOOLS_WHY),
    (
        "deepseek",
        "a tool without description and parameters",
        "a function needs no parameters in the API, so writing an absent value as JSON gives null and not an error",
    ),
];
const NO_TOOLS: &str = "an empty list of tools";
const NO_TOOLS_WHY: &str = "no tools are no tools, whether the list is empty or absent";

#[derive(Deserialize)]
struct Corpus {
    templates: BTreeMap<String, Tokens>,
    cases: Map<String, Value>,
}

#[derive(Deserialize)]
struct Tokens {
    bos_token: Option<String>,
    eos_token: Option<String>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    #[serde(default)]
    extra: Map<String, Value>,
}

/// The result of `transformers` for a case.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Prompt(String),
    /// The template raised an exception of its own, with this message.
    Raised(String),
    /// The template failed. The wording is specific to Python.
    Failed(String),
}

impl Outcome {
    fn of(result: Result<String, TemplateError>) -> Self {
        match result {
            Ok(prompt) => Self::Prompt(prompt),
            Err(TemplateError::Raised { message }) => Self::Raised(message),
            Err(error) => Self::Failed(error.to_string()),
        }
    }

    /// Whether `ours` equals this outcome on the day `date`.
    fn allows(&self, ours: &Self, date: &jiff::Zoned) -> bool {
        match (self, ours) {
            (Self::Prompt(golden), Self::Prompt(prompt)) => *prompt == dated(golden, date),
            (Self::Raised(golden), Self::Raised(message)) => golden == message,
            (Self::Failed(_), Self::Failed(_)) => true,
            (Self::Prompt(_) | Self::Raised(_) | Self::Failed(_), _) => false,
        }
    }
}

fn dated(golden: &str, date: &jiff::Zoned) -> String {
    DATE_FORMATS.iter().fold(golden.to_owned(), |text, format| {
        text.replace(&format!("«{format}»"), &date.strftime(format).to_string())
    })
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn read(path: &str) -> String {
    let path = folder().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn corpus() -> Corpus {
    serde_json::from_str(&read("cases.json")).unwrap()
}

fn render(template: &ChatTemplate, case: &Value) -> Outcome {
    let case = Case::deserialize(case).unwrap();
    Outcome::of(template.render(&TemplateInput {
        messages: &case.messages,
        tools: case.tools.as_deref(),
        add_generation_prompt: case.add_generation_prompt,
        extra: &case.extra,
    }))
}

/// Returns the cases that this template renders differently from `transformers`, each with both outcomes.
fn differences(name: &str, tokens: &Tokens, cases: &Map<String, Value>) -> Vec<(String, String)> {
    let (bos, eos) = (tokens.bos_token.as_deref(), tokens.eos_token.as_deref());
    let template = ChatTemplate::try_new(&read(&format!("{name}.jinja")), bos, eos).unwrap();
    let goldens: BTreeMap<String, Outcome> =
        serde_json::from_str(&read(&format!("goldens/{name}.json"))).unwrap();
    let recorded: BTreeSet<_> = goldens.keys().collect();
    assert_eq!(
        recorded,
        cases.keys().collect(),
        "{name}: record the goldens again"
    );
    let mut differences = Vec::new();
    for (case, input) in cases {
        let golden = &goldens[case];
        // Midnight may fall between the rendering and one of these dates, but not both.
        let before = jiff::Zoned::now();
        let ours = render(&template, input);
        if !golden.allows(&ours, &before) && !golden.allows(&ours, &jiff::Zoned::now()) {
            let both = format!("\n  transformers: {golden:?}\n  ours:         {ours:?}");
            differences.push((case.clone(), both));
        }
    }
    differences
}

#[test]
fn every_template_renders_every_case_as_transformers_does() {
    let corpus = corpus();
    let mut meant = DEVIATIONS.map(|(name, case, _)| (name, case)).to_vec();
    let mut problems = String::new();
    for (name, tokens) in &corpus.templates {
        for (case, both) in differences(name, tokens, &corpus.cases) {
            match meant.iter().position(|meant| *meant == (name, &case)) {
                Some(found) => {
                    meant.swap_remove(found);
                }
                None => writeln!(problems, "{name}, {case}:{both}").unwrap(),
            }
        }
    }
    assert!(problems.is_empty(), "{problems}");
    assert!(
        meant.is_empty(),
        "rendered as transformers does by now: {meant:?}"
    );
}

#[test]
fn every_template_file_is_in_the_corpus() {
    let mut files: Vec<_> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "jinja")
        })
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    files.sort();
    assert!(files.iter().eq(corpus().templates.keys()), "{files:?}");
}
