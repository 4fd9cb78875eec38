//! The licences of everything that is in the binary: who redistributes a program must pass them on.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anyhow::Context as _;
use cargo_metadata::{DependencyKind, Package};

use crate::crate_graph;
use crate::repo::Repo;

/// How the files begin that hold a licence, or what it wants passed on.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];

/// Each package of others with its licence, then the texts, each once with those it belongs to.
///
/// # Errors
/// When the packages cannot be resolved, or a file cannot be read.
pub(super) fn third_party(repo: &Repo) -> anyhow::Result<String> {
    let metadata = crate_graph::resolve(&repo.root().join("cli/Cargo.toml"))?;
    let packages = crate_graph::behind_root(&metadata, &[DependencyKind::Normal])?;
    let mut list = String::from("The genset binary contains these packages of others:\n\n");
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // Packages of this repository have no source.
    for package in packages.iter().filter(|package| package.source.is_some()) {
        let name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref().unwrap_or("see its text below");
        writeln!(list, "{name}: {licence}")?;
        for text in texts_of(package)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    for (text, names) in texts {
        let line = "-".repeat(78);
        write!(list, "\n{line}\n{}\n\n{text}\n", names.join(", "))?;
    }
    Ok(list)
}

fn texts_of(package: &Package) -> anyhow::Result<Vec<String>> {
    let folder = package.manifest_path.parent();
    let folder = folder.with_context(|| format!("{} lies nowhere", package.name))?;
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {folder}"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_licence = NAMES
            .iter()
            .any(|start| name.to_uppercase().starts_with(start));
        if is_licence && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    let read = |path| Ok(String::from_utf8_lossy(&fs::read(path)?).trim().to_owned());
    files.into_iter().map(read).collect()
}
