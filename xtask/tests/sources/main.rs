//! Tests that read the Rust files of the workspace as text, each for a rule that the compiler does not check.

#![expect(
    clippy::unwrap_used,
    reason = "a file that cannot be read is a failure of these tests"
)]

mod durations;
mod error_text;
mod glossary;
mod sizes;

use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::MetadataCommand;

/// Calls `read` with the package, the path and the text of each file under a package's `src`.
fn each_source(mut read: impl FnMut(&str, &Path, &str)) {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    for package in &metadata.packages {
        let mut folders: Vec<PathBuf> = vec![package.manifest_path.with_file_name("src").into()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    read(&package.name, &path, &fs::read_to_string(&path).unwrap());
                }
            }
        }
    }
}

/// Whether a file below `src` contains only tests.
fn is_of_tests(path: &Path) -> bool {
    let below = path.iter().rev().take_while(|part| *part != "src");
    let mut below = below.map(Path::new);
    below.any(|part| part.file_stem() == Some("tests".as_ref()))
}
