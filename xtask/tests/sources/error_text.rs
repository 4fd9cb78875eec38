//! No code decides by the text of an error: its kind and its place are values, and texts change.
//!
//! Reads shipped code as text, without white space. Tests, benches and the conformance kit may look at texts.

use super::{each_source, is_of_tests};

/// Code that returns an error's text.
const TEXTS: [&str; 5] = [
    ".message()",
    "error.to_string()",
    "err.to_string()",
    "problem.to_string()",
    "at.name()",
];

/// Code that inspects a text.
const LOOKS: [&str; 14] = [
    ".contains(",
    ".starts_with(",
    ".ends_with(",
    ".strip_prefix(",
    ".strip_suffix(",
    ".find(",
    ".rfind(",
    ".split(",
    ".split_once(",
    ".replace(",
    ".matches(",
    ".eq(",
    "==",
    "!=",
];

#[test]
fn no_shipped_code_looks_into_the_text_of_an_error() {
    let (mut found, mut files) = (Vec::new(), 0);
    each_source(|package, path, source| {
        if ["genset-conformance", "xtask"].contains(&package) || is_of_tests(path) {
            return;
        }
        files += 1;
        let looks = looks(source).into_iter();
        found.extend(looks.map(|look| format!("{}: {look}", path.display())));
    });
    assert!(files > 300, "only {files} files were read");
    assert!(
        found.is_empty(),
        "decide by ErrorKind, At and RequestField instead:\n{}",
        found.join("\n")
    );
}

/// The lines that ship: all except items of tests. The source is formatted by `cargo fmt`.
fn shipped(source: &str) -> Vec<&str> {
    let (mut lines, mut shipped) = (source.lines(), Vec::new());
    while let Some(line) = lines.next() {
        if line != "#[cfg(test)]" {
            shipped.push(line);
            continue;
        }
        // More attributes may come before the item.
        let item = lines.find(|line| line.starts_with(char::is_alphabetic));
        if item.is_some_and(|item| !item.ends_with([';', '}'])) {
            let _end = lines.find(|line| line.starts_with('}'));
        }
    }
    shipped
}

/// Each inspection of an error's text in shipped code.
fn looks(source: &str) -> Vec<String> {
    let code: String = shipped(source)
        .into_iter()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(str::chars)
        .filter(|letter| !letter.is_whitespace())
        .collect();
    let pairs = TEXTS
        .iter()
        .flat_map(|text| LOOKS.iter().map(move |look| format!("{text}{look}")));
    let matches = TEXTS.iter().flat_map(|text| {
        let names = ["error", "err", "problem"].map(|name| format!("match{name}{text}{{"));
        names.into_iter().chain([format!("match{text}{{")])
    });
    pairs
        .chain(matches)
        .filter(|look| code.contains(look.as_str()))
        .collect()
}

#[test]
fn a_look_into_a_text_is_found_however_it_is_laid_out() {
    for code in [
        "if error.message().contains(\"prompt\") {",
        "let rest = error\n    .message()\n    .strip_prefix(field);",
        "error.at().is_some_and(|at| at.name().starts_with(\"--\"))",
        "if error.to_string() == \"gone\" {",
        "match error.message() {",
    ] {
        assert_eq!(looks(code).len(), 1, "{code}");
    }
    let fine = "tracing::info!(message = error.message());\n// error.message().contains(x)\n";
    let tests = "#[cfg(test)]\nmod tests {\n    error.message().contains(x)\n}\n";
    let apart = "#[cfg(test)]\n#[path = \"a/tests.rs\"]\nmod tests;\n";
    assert_eq!(looks(&[fine, tests, apart].concat()), Vec::<String>::new());
    for before in [tests, apart] {
        let code = [before, "if error.message().contains(x) {"].concat();
        assert_eq!(looks(&code).len(), 1, "{code}");
    }
}
