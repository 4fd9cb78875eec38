//! `cargo xtask author-crate`: what an engine author pays for depending on `genset-backend-common`.
//!
//! It is measured from a crate outside the workspace, as an author's would be: inside, features unify and the
//! workspace's own dependencies hide what the contract crate asks for.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, NodeDep, PackageId};

use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;
use crate::stopwatch::Stopwatch;

/// The packages an author's crate may pull in, build dependencies included: fewer than this.
const PACKAGE_LIMIT: usize = 60;

/// Counts the packages behind `genset-backend-common` on this machine's target and prints the count.
///
/// # Errors
/// When there are [`PACKAGE_LIMIT`] or more; the error names all of them.
pub(crate) fn check_package_count(repo: &Repo) -> anyhow::Result<()> {
    let folder = write_crate(repo)?;
    let metadata = MetadataCommand::new()
        .manifest_path(folder.join("Cargo.toml"))
        .other_options(["--filter-platform".to_owned(), host_target()?])
        .exec()
        .context("cannot resolve the engine author's crate")?;
    let packages = packages_built(&metadata)?;
    let count = packages.len();
    if count >= PACKAGE_LIMIT {
        let names = packages.into_iter().collect::<Vec<_>>().join(", ");
        bail!(
            "an engine author's crate pulls in {count} packages, and fewer than {PACKAGE_LIMIT} are allowed: {names}"
        );
    }
    eprintln!(
        "an engine author's crate pulls in {count} packages (fewer than {PACKAGE_LIMIT} are allowed)"
    );
    Ok(())
}

/// Builds the author's crate from nothing, in the debug profile, and prints how long that took.
///
/// Crates are fetched before the clock starts, so the time is the compiler's.
///
/// # Errors
/// When the crate does not build.
pub(crate) fn time_cold_build(repo: &Repo) -> anyhow::Result<()> {
    let folder = write_crate(repo)?;
    let target = folder.join("target");
    if target.exists() {
        fs::remove_dir_all(&target)
            .with_context(|| format!("cannot remove {}", target.display()))?;
    }
    run_command(cargo(&folder).arg("fetch"))?;
    let watch = Stopwatch::start();
    run_command(
        cargo(&folder)
            .args(["build", "--offline"])
            .arg("--target-dir")
            .arg(&target),
    )?;
    eprintln!("an engine author's cold debug build took {watch}");
    Ok(())
}

/// Writes a crate that depends on `genset-backend-common` by path alone and is a workspace of its own.
///
/// It gets our lock file, so that the versions counted are those we test with.
fn write_crate(repo: &Repo) -> anyhow::Result<PathBuf> {
    let folder = repo.target().join("author-crate");
    let source = folder.join("src");
    fs::create_dir_all(&source).with_context(|| format!("cannot create {}", source.display()))?;
    write(
        &folder.join("Cargo.toml"),
        &manifest(&repo.root().join("backend-common"))?,
    )?;
    write(&source.join("lib.rs"), "pub use genset_backend_common;\n")?;
    let lock = repo.root().join("Cargo.lock");
    fs::copy(&lock, folder.join("Cargo.lock"))
        .with_context(|| format!("cannot copy {}", lock.display()))?;
    Ok(folder)
}

fn manifest(contract: &Path) -> anyhow::Result<String> {
    // A JSON string is a TOML basic string, so this quotes whatever the path contains.
    let path = serde_json::to_string(
        contract
            .to_str()
            .context("the repository's path is not UTF-8")?,
    )?;
    Ok(format!(
        r#"[package]
name = "author-crate"
version = "0.0.0"
edition = "2024"

[dependencies]
genset-backend-common = {{ path = {path} }}

[workspace]
"#
    ))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The target triple that rustc builds for by default.
fn host_target() -> anyhow::Result<String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let text = output(Command::new(rustc).arg("-vV"))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.to_owned())
}

/// `name version` of every package that building the root package builds, the root itself left out.
fn packages_built(metadata: &Metadata) -> anyhow::Result<BTreeSet<String>> {
    let resolve = metadata
        .resolve
        .as_ref()
        .context("cargo metadata resolved nothing")?;
    let root = resolve
        .root
        .as_ref()
        .context("the author's crate is not a root package")?;
    let edges: HashMap<&PackageId, &[NodeDep]> = resolve
        .nodes
        .iter()
        .map(|node| (&node.id, node.deps.as_slice()))
        .collect();
    let mut reached = HashSet::from([root]);
    let mut open = vec![root];
    while let Some(package) = open.pop() {
        let dependencies = edges.get(package).copied().unwrap_or_default();
        open.extend(
            dependencies
                .iter()
                .filter(|dep| is_built(dep))
                .map(|dep| &dep.pkg)
                .filter(|id| reached.insert(id)),
        );
    }
    reached.remove(root);
    Ok(reached
        .into_iter()
        .map(|id| format!("{} {}", metadata[id].name, metadata[id].version))
        .collect())
}

/// Whether a plain `cargo build` compiles this dependency.
fn is_built(dependency: &NodeDep) -> bool {
    dependency
        .dep_kinds
        .iter()
        .any(|kind| matches!(kind.kind, DependencyKind::Normal | DependencyKind::Build))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_quotes_the_path_and_is_its_own_workspace() {
        let text = manifest(Path::new("/a \"b\"/c")).unwrap();
        assert!(
            text.contains(r#"genset-backend-common = { path = "/a \"b\"/c" }"#),
            "{text}"
        );
        assert!(text.ends_with("[workspace]\n"), "{text}");
    }

    #[test]
    fn host_target_is_a_triple() {
        assert!(host_target().unwrap().contains('-'));
    }
}
