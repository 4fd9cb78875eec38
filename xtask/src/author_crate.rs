//! `cargo xtask author-crate`: what a dependency on `genset-backend-common` costs an engine author.
//!
//! Measured from a crate outside the workspace, like an author's crate. Inside it, feature unification and the workspace's own
//! dependencies hide what the contract crate pulls in.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use cargo_metadata::DependencyKind;

use crate::crate_graph;
use crate::files::write;
use crate::process::{cargo, run as run_command};
use crate::repo::Repo;
use crate::stopwatch::Stopwatch;

/// An author's crate must pull in fewer packages than this, build dependencies included.
const PACKAGE_LIMIT: usize = 60;

/// Counts the packages behind `genset-backend-common` on this machine's target and prints the count.
///
/// # Errors
/// When there are [`PACKAGE_LIMIT`] or more; the error names all of them.
pub(crate) fn check_package_count(repo: &Repo) -> anyhow::Result<()> {
    let folder = write_crate(repo)?;
    let metadata = crate_graph::resolve(&folder.join("Cargo.toml"))?;
    // What a plain `cargo build` compiles.
    let kinds = [DependencyKind::Normal, DependencyKind::Build];
    let packages = crate_graph::behind_root(&metadata, &kinds)?;
    let count = packages.len();
    if count >= PACKAGE_LIMIT {
        let names = packages
            .iter()
            .map(|package| format!("{} {}", package.name, package.version));
        let names = names.collect::<Vec<_>>().join(", ");
        bail!(
            "an engine author's crate pulls in {count} packages, and fewer than {PACKAGE_LIMIT} are allowed: {names}"
        );
    }
    eprintln!(
        "an engine author's crate pulls in {count} packages (fewer than {PACKAGE_LIMIT} are allowed)"
    );
    Ok(())
}

/// Builds the author's crate from scratch, in the debug profile, and prints how long that took.
///
/// Fetches crates before the clock starts, so the time is the compiler's.
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
}
