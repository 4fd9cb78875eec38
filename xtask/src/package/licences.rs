//! The licences of everything in the binary: whoever redistributes a program must pass them on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use cargo_metadata::{DependencyKind, Package};

use crate::crate_graph;
use crate::repo::Repo;

/// Prefixes of file names that hold a licence or a notice to pass on.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// How deep folders are searched: some packages contain parts of others.
const DEPTH: usize = 8;

/// The text of MIT's licence below its copyright line.
const MIT: &str = "\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files (the
\"Software\"), to deal in the Software without restriction, including without limitation the rights to use, copy, modify, merge, publish,
distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to
the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH
THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.";

/// Lists each third-party package with its licence, then each text once with the packages it belongs to.
///
/// # Errors
/// When the packages cannot be resolved, or a file cannot be read.
pub(super) fn third_party(repo: &Repo) -> anyhow::Result<String> {
    let metadata = crate_graph::resolve(&repo.root().join("cli/Cargo.toml"))?;
    let packages = crate_graph::behind_root(&metadata, &[DependencyKind::Normal])?;
    let mut list = String::from("The genset binary contains these packages of others:\n\n");
    let own = fs::read_to_string(repo.root().join("LICENSE")).context("cannot read LICENSE")?;
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut bare = String::new();
    // Packages of this repository have no source.
    for package in packages.iter().filter(|package| package.source.is_some()) {
        let name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref().unwrap_or("see its text below");
        writeln!(list, "{name}: {licence}")?;
        let mut found = texts_of(package)?;
        if found.is_empty() {
            writeln!(bare, "{name}: {licence}")?;
            let holders = match package.authors.join(", ") {
                unknown if unknown.is_empty() => format!("the authors of {}", package.name),
                authors => authors,
            };
            found.extend(declared_text(&own, licence, &holders));
        }
        for text in found {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    if !bare.is_empty() {
        let say = "These of them bring no file with their licence. Where they declare Apache-2.0 or MIT, its usual text is below:";
        write!(list, "\n{say}\n\n{bare}")?;
    }
    for (text, names) in texts {
        let line = "-".repeat(78);
        write!(list, "\n{line}\n{}\n\n{text}\n", names.join(", "))?;
    }
    Ok(list)
}

/// The text of a licence that a package declares but does not include; `own` is this repository's, Apache-2.0.
fn declared_text(own: &str, licence: &str, holders: &str) -> Option<String> {
    let declares = |name: &str| {
        let mut names = licence.split([' ', '/', '(', ')']);
        names.any(|declared| declared == name)
    };
    if declares("Apache-2.0") {
        return Some(own.trim().to_owned());
    }
    declares("MIT").then(|| format!("MIT License\n\nCopyright (c) {holders}\n\n{MIT}"))
}

/// The texts in a package, each once.
fn texts_of(package: &Package) -> anyhow::Result<BTreeSet<String>> {
    let folder = package.manifest_path.parent();
    let folder = folder.with_context(|| format!("{} lies nowhere", package.name))?;
    let mut files = Vec::new();
    find_licences(folder.as_std_path(), DEPTH, &mut files)?;
    let read = |path: PathBuf| Ok(String::from_utf8_lossy(&fs::read(path)?).trim().to_owned());
    files.into_iter().map(read).collect()
}

/// Collects the files that hold a licence, in a folder and its subfolders.
fn find_licences(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let entries = fs::read_dir(folder);
    for entry in entries.with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let (kind, path) = (entry.file_type()?, entry.path());
        let name = entry.file_name().to_string_lossy().to_uppercase();
        let is_named = NAMES.iter().any(|start| name.starts_with(start));
        if kind.is_dir() && depth > 0 {
            find_licences(&path, depth - 1, found)?;
        } else if kind.is_file() && is_named && !name.ends_with(".RS") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_of_parts_are_found_in_the_folders_below() {
        let package = tempfile::tempdir().unwrap();
        let below = |path: &str| package.path().join(path);
        fs::create_dir_all(below("c_src/allocator/v3")).unwrap();
        for file in [
            "LICENSE-MIT",
            "c_src/allocator/v3/License",
            "license.rs",
            "a.c",
        ] {
            fs::write(below(file), file).unwrap();
        }
        let mut found = Vec::new();
        find_licences(package.path(), DEPTH, &mut found).unwrap();
        found.sort();
        assert_eq!(
            found,
            [below("LICENSE-MIT"), below("c_src/allocator/v3/License")]
        );
        let mut near = Vec::new();
        find_licences(package.path(), 2, &mut near).unwrap();
        assert_eq!(near, [below("LICENSE-MIT")]);
    }

    #[test]
    fn a_package_without_a_file_is_passed_on_with_the_usual_text() {
        let text = |licence| declared_text("own text\n", licence, "A. Uthor");
        assert_eq!(text("MIT/Apache-2.0").as_deref(), Some("own text"));
        let mit = text("(MIT)").unwrap();
        assert!(mit.starts_with("MIT License\n\nCopyright (c) A. Uthor\n\nPermission"));
        assert_eq!(text("MIT-0"), None);
    }
}
