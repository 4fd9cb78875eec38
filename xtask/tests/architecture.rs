//! The dependencies between our crates match the table in `docs/architecture.md`.
//!
//! Checks normal dependencies only, including optional ones and those of other platforms; a crate may test with what it must not
//! ship with. Fails in both directions, so that the table lists exactly the actual dependencies.

#![expect(
    clippy::expect_used,
    reason = "a page without a well-formed table is a failure of these tests"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// For each crate, those of our crates that it depends on.
type Edges = BTreeMap<String, BTreeSet<String>>;

const BEGIN: &str = "<!-- edges:begin -->";
const END: &str = "<!-- edges:end -->";

#[test]
fn edges_between_crates_are_those_of_the_table() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let page = fs::read_to_string(metadata.workspace_root.join("docs/architecture.md")).unwrap();
    let differences = differences(&planned(&page), &actual(&metadata));
    assert!(
        differences.is_empty(),
        "docs/architecture.md and cargo metadata disagree:\n{}",
        differences.join("\n")
    );
}

#[test]
fn folders_of_crates_are_those_of_the_table() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let page = fs::read_to_string(metadata.workspace_root.join("docs/architecture.md")).unwrap();
    for [name, folder, _] in rows(&page) {
        let manifest = metadata.workspace_root.join(&folder).join("Cargo.toml");
        let has_crate = |package: &&cargo_metadata::Package| package.manifest_path == manifest;
        let found = metadata
            .packages
            .iter()
            .find(has_crate)
            .map(|package| package.name.as_str());
        assert_eq!(found, Some(name.as_str()), "the crate in {folder}");
    }
}

/// The most names at the root of the contract, which an engine author sees first. The rest is in its modules.
const MOST_NAMES_AT_THE_ROOT: usize = 30;

#[test]
fn the_root_of_the_contract_has_few_names() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    let root = metadata.workspace_root.join("backend-common/src/lib.rs");
    let text = fs::read_to_string(root).unwrap();
    let lists = text.split("pub use ").skip(1);
    let names: usize = lists.map(|list| names_of(list).count()).sum();
    assert!(
        (20..=MOST_NAMES_AT_THE_ROOT).contains(&names),
        "{names} names, and at most {MOST_NAMES_AT_THE_ROOT} are wanted"
    );
}

/// The names of a `pub use`; `list` begins after these words.
fn names_of(list: &str) -> impl Iterator<Item = &str> {
    let list = list.split(';').next().unwrap_or_default();
    let names = list.split_once('{').map_or(list, |(_, names)| names);
    let names = names.split([',', '}']).map(str::trim);
    names.filter(|name| !name.is_empty())
}

/// A workspace does not inherit the profiles of another one, so each workspace with a program sets them itself.
#[test]
fn releases_of_every_workspace_check_arithmetic() {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    for folder in ["", "engines/mistralrs", "engines/llamacpp"] {
        let manifest = metadata.workspace_root.join(folder).join("Cargo.toml");
        let text = fs::read_to_string(manifest).unwrap();
        let (_, release) = text.split_once("\n[profile.release]\n").unwrap();
        let (release, _) = release.split_once("\n[").unwrap();
        assert!(
            release.lines().any(|line| line == "overflow-checks = true"),
            "{folder}: {release}"
        );
    }
}

#[test]
fn a_differing_edge_is_named_in_both_directions() {
    let page = format!(
        "{BEGIN}\n| crate | folder | sees |\n|---|---|---|\n| `a` | `a/` | `b`, `c` |\n| `b` | `b/` | nothing |\n{END}"
    );
    let actual = Edges::from([
        ("a".into(), BTreeSet::from(["b".into()])),
        ("b".into(), BTreeSet::from(["a".into()])),
        ("d".into(), BTreeSet::new()),
    ]);
    let expected = [
        "a sees c in the table, not in Cargo.toml",
        "b sees a in Cargo.toml, not in the table",
        "d is a crate of the workspace and not in the table",
    ];
    assert_eq!(differences(&planned(&page), &actual), expected);
}

/// The rows of the table as crate, folder and sees, without backticks.
fn rows(page: &str) -> Vec<[String; 3]> {
    let table = page
        .split_once(BEGIN)
        .and_then(|(_, rest)| rest.split_once(END))
        .expect("the page has an edge table")
        .0;
    let lines = table.lines().filter(|line| line.starts_with('|')).skip(2);
    lines
        .map(|line| {
            let cells: Vec<_> = line
                .trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().replace('`', ""))
                .collect();
            <[String; 3]>::try_from(cells).expect("a row has three cells")
        })
        .collect()
}

fn planned(page: &str) -> Edges {
    let names = |sees: &str| match sees {
        "nothing" => BTreeSet::new(),
        some => some.split(',').map(|name| name.trim().to_owned()).collect(),
    };
    rows(page)
        .into_iter()
        .map(|[name, _, sees]| (name, names(&sees)))
        .collect()
}

fn actual(metadata: &Metadata) -> Edges {
    let ours: BTreeSet<_> = metadata
        .workspace_packages()
        .into_iter()
        .map(|package| package.name.to_string())
        .collect();
    let seen = |package: &&cargo_metadata::Package| {
        let normal = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.kind == DependencyKind::Normal);
        normal
            .map(|dependency| dependency.name.clone())
            .filter(|name| ours.contains(name))
            .collect()
    };
    metadata
        .workspace_packages()
        .iter()
        .map(|package| (package.name.to_string(), seen(package)))
        .collect()
}

fn differences(planned: &Edges, actual: &Edges) -> Vec<String> {
    let mut differences = Vec::new();
    for name in planned.keys().chain(actual.keys()).collect::<BTreeSet<_>>() {
        match (planned.get(name), actual.get(name)) {
            (Some(planned), Some(actual)) => {
                let missing = planned.difference(actual);
                differences.extend(
                    missing
                        .map(|seen| format!("{name} sees {seen} in the table, not in Cargo.toml")),
                );
                let extra = actual.difference(planned);
                differences.extend(
                    extra.map(|seen| format!("{name} sees {seen} in Cargo.toml, not in the table")),
                );
            }
            (Some(_), None) => differences.push(format!(
                "{name} is in the table and not a crate of the workspace"
            )),
            (None, _) => differences.push(format!(
                "{name} is a crate of the workspace and not in the table"
            )),
        }
    }
    differences
}
