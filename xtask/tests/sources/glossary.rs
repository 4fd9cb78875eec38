//! One word per idea. These tests read the names of all public types: each name is used once in the workspace, and none is a word
//! that the glossary of `docs/architecture.md` replaces.
//!
//! Private types are exempt: nobody sees two of them side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use cargo_metadata::MetadataCommand;

use super::{each_source, is_of_tests};

/// Names with several meanings, and why they are allowed.
const SHARED: [(&str, &str); 13] = [
    (
        "Answer",
        "the frontend's choice on its way back, and what the kit read",
    ),
    (
        "Event",
        "a lifecycle's, and a download's; neither is used without its module",
    ),
    (
        "Fault",
        "of a worker's life, and of a simulated fleet: what went wrong",
    ),
    (
        "Limits",
        "of the kit, and of a scheduler's step: each the settings of its crate",
    ),
    (
        "Load",
        "of a worker, and of a simulation: requests that there are",
    ),
    ("Outcome", "how a life ended, and how a row of a step did"),
    (
        "Output",
        "of an engine, and of OpenAI's Responses API, whose word it is",
    ),
    (
        "Piece",
        "of a sequence in a step, and of a simulated prompt: consecutive tokens",
    ),
    ("Progress", "of a start, and of a download: how far it is"),
    (
        "Report",
        "what a run came to, of a worker, the kit, a step and a simulation",
    ),
    (
        "Sequence",
        "a scheduler's, and a random one of operations in the kit",
    ),
    ("Target", "of a fuzzer, and of the router's index"),
    (
        "Vocabulary",
        "of guided decoding, and of scripted answers: the port to a tokenizer",
    ),
];

/// Public types by name, with the files that define them.
fn types() -> BTreeMap<String, BTreeSet<String>> {
    let mut types = BTreeMap::<String, BTreeSet<String>>::new();
    each_source(|_, path, source| {
        if !is_of_tests(path) {
            for name in public_types(source) {
                let files = types.entry(name).or_default();
                files.insert(path.display().to_string());
            }
        }
    });
    types
}

/// The names of the public types of a file, and of those that `named!` makes.
fn public_types(source: &str) -> Vec<String> {
    let mut is_named = false;
    let name = |line: &str| {
        is_named = line.ends_with("named! {") || (is_named && line != "}");
        let line = if is_named { line.trim_start() } else { line };
        let item = line.strip_prefix("pub ")?;
        let (kind, rest) = item.split_once(' ')?;
        let name = rest
            .split(|letter: char| !letter.is_alphanumeric())
            .next()?;
        ["struct", "enum", "trait", "type", "union"]
            .contains(&kind)
            .then(|| name.to_owned())
    };
    source.lines().filter_map(name).collect()
}

#[test]
fn a_public_types_name_is_used_once() {
    let known: BTreeMap<_, _> = SHARED.into_iter().collect();
    let types = types();
    assert!(types.len() > 300, "only {} types were found", types.len());
    let mut problems = Vec::new();
    for (name, files) in &types {
        if files.len() > 1 && !known.contains_key(name.as_str()) {
            let files = files.iter().cloned().collect::<Vec<_>>().join(", ");
            problems.push(format!(
                "{name} is defined in {files}: rename one, or add it to SHARED with a reason"
            ));
        }
    }
    for name in known.keys() {
        if types.get(*name).is_none_or(|files| files.len() < 2) {
            problems.push(format!("{name} is used once: take it out of SHARED"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn no_type_has_a_name_that_the_glossary_replaces() {
    let root = MetadataCommand::new()
        .no_deps()
        .exec()
        .unwrap()
        .workspace_root;
    let page = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let replaced = replaced(&page);
    assert!(
        replaced.len() >= 10,
        "the glossary replaces only {replaced:?}"
    );
    let types = types();
    let found: Vec<_> = replaced
        .iter()
        .filter(|name| types.contains_key(*name))
        .collect();
    assert!(
        found.is_empty(),
        "the glossary has other words for {found:?}"
    );
}

/// The words of the glossary's last column, in the form of a type name.
fn replaced(page: &str) -> BTreeSet<String> {
    let (_, table) = page
        .split_once("| word | what it is | not |")
        .unwrap_or_default();
    let rows = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let words = rows.filter_map(|row| row.split('|').nth(3));
    let capital = |word: &str| {
        let (first, rest) = word.split_at(1);
        first.to_uppercase() + &rest.to_lowercase()
    };
    words
        .map(|not| not.split_whitespace().map(capital).collect())
        .filter(|name: &String| !name.is_empty())
        .collect()
}

#[test]
fn types_and_replaced_words_are_read_as_they_stand() {
    let source = "pub struct Page(u32);\npub(crate) struct Hidden;\n    pub enum Inner {}\npub trait Door<T> {}\npub fn run() {}\ncrate::named! {\n    pub enum Color: FromStr {\n        Red = \"red\",\n    }\n}\n    pub enum Other {}";
    assert_eq!(public_types(source), ["Page", "Door", "Color"]);
    let page = "| word | what it is | not |\n|---|---|---|\n| KV block | tokens | page |\n| step | a pass |  |\n| canary | a | probe request |\n\n| other | a | table |";
    assert_eq!(
        replaced(page),
        BTreeSet::from(["Page".into(), "ProbeRequest".into()])
    );
}
