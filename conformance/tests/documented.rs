//! Every engine shown in a document meets the contract: the kit runs on the same code.

use std::fs;
use std::path::Path;

use genset_conformance::{Scenario, run_conformance};

/// The first example of `LLMEngine`'s documentation.
#[allow(unreachable_pub, reason = "it is shown as an engine of a library")]
#[path = "../../backend-common/doc/zeros.rs"]
mod zeros;

#[test]
fn the_engine_of_the_traits_documentation() {
    run_conformance(|_: &Scenario| zeros::Zeros::default()).assert_conformant();
}

/// The readme shows the code of the sample engine, on which the kit runs elsewhere.
#[test]
fn the_engine_of_the_readme_is_the_sample_engine() {
    let readme = include_str!("../../README.md");
    let sample = include_str!("../../engines/sample/src/lib.rs");
    let shown = readme
        .split("```rust\n")
        .filter_map(|block| block.split("```").next())
        .find(|block| block.contains("impl LLMEngine for"));
    let missing: Vec<&str> = shown
        .unwrap_or_default()
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with("use ") && !sample.contains(line))
        .collect();
    assert!(shown.is_some(), "the readme shows no engine");
    assert!(missing.is_empty(), "not in the sample engine: {missing:?}");
}

/// No other document may show an engine that the kit does not run on.
#[test]
fn no_other_document_shows_an_engine_in_rust() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut shown = Vec::new();
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).unwrap_or_default();
                if text.contains("LLMEngine for ") {
                    shown.push(path);
                }
            }
        }
    }
    assert!(shown.is_empty(), "the kit runs on no engine of {shown:?}");
}
