//! The guides' tables of flags match the definitions: the existing flags, their variables and their defaults.

use std::collections::BTreeSet;
use std::fs;

use clap::{Arg, ArgAction, Command};

use crate::args::command;

/// Guides with tables of flags, and the commands that have these flags.
const GUIDES: [(&str, &[&str]); 7] = [
    ("operations.md", &["run"]),
    ("candle-engine.md", &["run"]),
    ("embeddings.md", &["run"]),
    ("lora.md", &["run"]),
    ("routing.md", &["run"]),
    ("benchmarks.md", &["bench", "serve"]),
    ("simulate.md", &["simulate"]),
];

/// A row of a table whose first column lists flags.
struct Row {
    flags: Vec<String>,
    /// `None` if the table has no such column.
    environment: Option<String>,
    default: Option<String>,
}

fn rows(page: &str) -> Vec<Row> {
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    for line in page.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).skip(1).collect();
        if cells.first() == Some(&"flag") {
            columns = cells;
        } else if cells.is_empty() {
            columns.clear();
        } else if !columns.is_empty() && cells[0].starts_with("`--") {
            let cell = |name| {
                let place = columns.iter().position(|column| *column == name)?;
                Some(cells[place].to_owned())
            };
            rows.push(Row {
                flags: codes(cells[0]),
                environment: cell("environment"),
                default: cell("default"),
            });
        }
    }
    rows
}

/// The texts in backticks.
fn codes(cell: &str) -> Vec<String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn read(guide: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/");
    fs::read_to_string(format!("{folder}{guide}")).unwrap()
}

fn subcommand(words: &[&str]) -> Command {
    let whole = command();
    let inner = words
        .iter()
        .try_fold(&whole, |command, word| command.find_subcommand(word));
    inner.unwrap().clone()
}

fn find<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    let name = flag.strip_prefix("--")?;
    command
        .get_arguments()
        .find(|arg| arg.get_long() == Some(name))
}

/// The values in a default column for `count` flags, separated by commas. `None` if it has other words outside of brackets.
fn values(cell: &str, count: usize) -> Option<Vec<String>> {
    let cell = cell.split(" (").next()?;
    let values: Vec<_> = cell
        .split(", ")
        .map(|value| value.trim_matches('`').to_owned())
        .collect();
    let is_value = |value: &String| !value.is_empty() && !value.contains([' ', '`', '[']);
    (values.len() == count && values.iter().all(is_value)).then_some(values)
}

fn problems(guide: &str, row: &Row, command: &Command) -> Vec<String> {
    let mut problems = Vec::new();
    let variables = row.environment.as_deref().map(codes);
    let values = row
        .default
        .as_deref()
        .and_then(|cell| values(cell, row.flags.len()));
    for (place, flag) in row.flags.iter().enumerate() {
        let Some(arg) = find(command, flag) else {
            problems.push(format!("{guide}: there is no {flag}"));
            continue;
        };
        if let Some(variables) = &variables {
            let variable = arg
                .get_env()
                .map(|name| name.to_string_lossy().into_owned());
            let said = variables.get(place).cloned();
            if said != variable && !said.as_ref().is_some_and(|said| said.starts_with("...")) {
                problems.push(format!("{guide}: {flag} has {variable:?}, not {said:?}"));
            }
        }
        if let Some(values) = &values {
            let own = arg
                .get_default_values()
                .iter()
                .map(|value| value.to_string_lossy());
            let own = own.collect::<Vec<_>>().join(",");
            let said = if values[place] == "none" {
                ""
            } else {
                values[place].as_str()
            };
            let is_switch = matches!(arg.get_action(), ArgAction::SetTrue) && said == "false";
            // Some defaults have no text: an engine sets them.
            if !own.is_empty() && own != said && !is_switch {
                problems.push(format!(
                    "{guide}: the default of {flag} is {own:?}, not {said:?}"
                ));
            }
        }
    }
    problems
}

#[test]
fn tables_of_flags_say_what_the_definitions_say() {
    let (mut found, mut count) = (Vec::new(), 0);
    for (guide, words) in GUIDES {
        let command = subcommand(words);
        for row in rows(&read(guide)) {
            count += row.flags.len();
            found.extend(problems(guide, &row, &command));
        }
    }
    assert!(count > 150, "only {count} flags were found");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_flag_of_run_stands_in_a_guide() {
    let text = GUIDES.map(|(guide, _)| read(guide)).join("\n") + &read("command-line.md");
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-');
    let words: BTreeSet<&str> = words.collect();
    let run = subcommand(&["run"]);
    let shown = run.get_arguments().filter(|arg| !arg.is_hide_set());
    let shown = shown.filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
    let missing: Vec<String> = shown
        .filter(|flag| !words.contains(flag.as_str()))
        .collect();
    assert!(missing.is_empty(), "no guide has {missing:?}");
}

#[test]
fn tables_are_read() {
    let page = "| flag | environment | default | |\n|---|---|---|---|\n| `--a`, `--b` | `A`, `..._B` | `1`, 2 | x |\n\n| `--c` | | | |\n";
    let rows = rows(page);
    assert_eq!((rows.len(), rows[0].flags.len()), (1, 2));
    assert_eq!(values("`1`, 2", 2), Some(vec!["1".into(), "2".into()]));
    assert_eq!(values("`259` (30 days)", 1), Some(vec!["259".into()]));
    assert_eq!(values("the folder's name", 1), None);
}
