//! The packages that a package depends on.

use std::collections::{HashMap, HashSet};
use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, NodeDep, Package, PackageId};

use crate::process::output;

/// Resolves a package for this machine's target.
///
/// # Errors
/// When cargo fails.
pub(crate) fn resolve(manifest: &Path) -> anyhow::Result<Metadata> {
    MetadataCommand::new()
        .manifest_path(manifest)
        .other_options(["--filter-platform".to_owned(), host_target()?])
        .exec()
        .with_context(|| format!("cannot resolve {}", manifest.display()))
}

/// The target triple that rustc builds for by default.
///
/// # Errors
/// When there is no rustc.
pub(crate) fn host_target() -> anyhow::Result<String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let text = output(Command::new(rustc).arg("-vV"))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`rustc -vV` names no host")?.to_owned())
}

/// All packages that the root package depends on through these kinds of dependencies, by name, without the root itself.
///
/// # Errors
/// When there is no root package.
pub(crate) fn behind_root<'a>(
    metadata: &'a Metadata,
    kinds: &[DependencyKind],
) -> anyhow::Result<Vec<&'a Package>> {
    let resolve = metadata
        .resolve
        .as_ref()
        .context("cargo metadata resolved nothing")?;
    let root = resolve.root.as_ref().context("there is no root package")?;
    let edges: HashMap<&PackageId, &[NodeDep]> = resolve
        .nodes
        .iter()
        .map(|node| (&node.id, node.deps.as_slice()))
        .collect();
    let mut reached = HashSet::from([root]);
    let mut open = vec![root];
    while let Some(package) = open.pop() {
        let dependencies = edges.get(package).copied().unwrap_or_default();
        let of_kind = |dep: &&NodeDep| dep.dep_kinds.iter().any(|kind| kinds.contains(&kind.kind));
        open.extend(
            dependencies
                .iter()
                .filter(of_kind)
                .map(|dep| &dep.pkg)
                .filter(|id| reached.insert(id)),
        );
    }
    reached.remove(root);
    let mut packages: Vec<&Package> = reached.into_iter().map(|id| &metadata[id]).collect();
    packages.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_target_is_a_triple() {
        assert!(host_target().unwrap().contains('-'));
    }
}
