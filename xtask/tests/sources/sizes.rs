//! A struct has at most 15 fields, so that a reader can keep it in mind. Structs that list settings, or mirror a layout that is
//! not ours, may have more. Clippy's own lint limits functions to seven parameters.

use std::collections::BTreeMap;

use super::each_source;

const MOST_FIELDS: usize = 15;

/// Structs that may have more, and why.
const LONGER: [(&str, &str); 17] = [
    ("AttendArguments", "the layout that a GPU kernel reads"),
    ("CandleArgs", "settings"),
    (
        "Capabilities",
        "a map of the wire protocol, which others write too",
    ),
    ("FrontendConfig", "settings"),
    ("HeadArguments", "the layout that a GPU kernel reads"),
    ("LauncherConfig", "settings"),
    ("MockerArgs", "settings"),
    (
        "ModelCard",
        "the record of the wire protocol, which others write too",
    ),
    ("ModelConfig", "settings of a model, from its files"),
    ("ModelSpec", "settings that Python gives"),
    ("NetworkArgs", "settings"),
    ("Raw", "a model's `config.json`"),
    ("ServeBenchArgs", "settings"),
    ("SubprocessConfig", "settings"),
    ("WireConfig", "settings"),
    ("WorkerArgs", "settings"),
    ("WorkerConfig", "settings"),
];

/// The structs of a file with named fields, and the number of fields of each. The source is formatted by `cargo fmt`.
fn structs(source: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut open: Option<(String, String, usize)> = None;
    for line in source.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if let Some((name, margin, fields)) = &mut open {
            if *indent == **margin && line.trim_start().starts_with('}') {
                found.push((name.clone(), *fields));
                open = None;
            } else if indent.len() == margin.len() + 4 && is_field(line) {
                *fields += 1;
            }
        } else if let Some(name) = begun(line) {
            open = Some((name, indent.to_owned(), 0));
        }
    }
    found
}

/// The name of the struct that starts on this line.
fn begun(line: &str) -> Option<String> {
    let item = without_visibility(line).strip_prefix("struct ")?;
    let name = item.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    line.ends_with('{')
        .then(|| name.into_iter().next())?
        .map(str::to_owned)
}

fn is_field(line: &str) -> bool {
    let name = without_visibility(line).split(':').next().unwrap_or("");
    line.contains(':')
        && !name.is_empty()
        && name
            .chars()
            .all(|letter| letter.is_alphanumeric() || letter == '_')
}

/// The rest of a line after `pub` and `pub(...)`.
fn without_visibility(line: &str) -> &str {
    let line = line.trim_start();
    match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with(' ') => rest.trim_start(),
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or(line, |(_, item)| item),
        _ => line,
    }
}

#[test]
fn a_struct_has_few_fields() {
    let mut longest = BTreeMap::<String, (usize, String)>::new();
    each_source(|_, path, source| {
        for (name, fields) in structs(source) {
            let row = longest.entry(name).or_default();
            *row = row.clone().max((fields, path.display().to_string()));
        }
    });
    longest.retain(|_, (fields, _)| *fields > MOST_FIELDS);
    let problems: Vec<String> = { longest.iter() }
        .filter(|(name, _)| !LONGER.iter().any(|(known, _)| known == name))
        .map(|(name, (fields, path))| format!("{name} in {path} has {fields} fields"))
        .chain(
            { LONGER.iter() }
                .filter(|(name, _)| !longest.contains_key(*name))
                .map(|(name, _)| {
                    format!("{name} has {MOST_FIELDS} fields or fewer: take it off the list")
                }),
        )
        .collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn fields_are_counted() {
    let source = "pub(crate) struct A<T> {\n    /// One: it counts once.\n    pub(super) one: T,\n    #[serde(rename = \"x\")]\n    two: fn(\n        three: u8,\n    ),\n}\n\nstruct B;\nstruct C(u8);\nstruct D {\n}\n";
    assert_eq!(structs(source), [("A".to_owned(), 2), ("D".to_owned(), 0)]);
}
