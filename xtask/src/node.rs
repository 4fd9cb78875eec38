//! What the JavaScript steps need: Node.js, and a folder with pinned npm packages.
//!
//! The only such folder is `target/ai-sdk`, for the AI SDK's agent of `python-tests/test_agents_ai_sdk.py`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::files::{copy, fresh};
use crate::process::{output, run as run_command, succeeds};
use crate::repo::Repo;
use crate::system_packages;

/// The oldest major version of Node.js that the AI SDK supports. Debian 12 has it.
const OLDEST_NODE: u32 = 18;

/// The folder with the pinned AI SDK and the script that uses it.
///
/// Writes the copy of the lock file last: an interrupted installation has no copy and starts again.
///
/// # Errors
/// When Node.js or a package cannot be installed.
pub(crate) fn ai_sdk(repo: &Repo) -> anyhow::Result<PathBuf> {
    ensure_node()?;
    let source = repo.root().join("python-tests/ai_sdk");
    let folder = repo.target().join("ai-sdk");
    let lock = source.join("package-lock.json");
    let installed = folder.join("installed-lock.json");
    if !is_same(&lock, &installed)? {
        fresh(&folder)?;
        for name in ["package.json", "package-lock.json"] {
            copy(&source.join(name), &folder.join(name))?;
        }
        let mut npm = Command::new("npm");
        npm.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]);
        run_command(npm.current_dir(&folder))
            .context("cannot install the AI SDK; see that npm reaches its registry")?;
        copy(&lock, &installed)?;
    }
    copy(&source.join("agent.mjs"), &folder.join("agent.mjs"))?;
    Ok(folder)
}

/// Whether the installed file equals the wanted one.
fn is_same(wanted: &Path, installed: &Path) -> anyhow::Result<bool> {
    let wanted =
        fs::read_to_string(wanted).with_context(|| format!("cannot read {}", wanted.display()))?;
    Ok(fs::read_to_string(installed).is_ok_and(|text| text == wanted))
}

/// Ensures that npm and a new enough Node.js are installed, through apt-get if that needs no interaction.
fn ensure_node() -> anyhow::Result<()> {
    let missing: Vec<_> = [("node", "nodejs"), ("npm", "npm")]
        .into_iter()
        .filter(|(program, _)| !succeeds(Command::new(program).arg("--version")))
        .map(|(_, package)| package)
        .collect();
    if !missing.is_empty() {
        system_packages::install(&missing)
            .with_context(|| format!("Node.js {OLDEST_NODE} or newer and its npm are needed"))?;
    }
    let version = output(Command::new("node").arg("--version"))?;
    let version = version.trim();
    if major(version).is_none_or(|major| major < OLDEST_NODE) {
        bail!(
            "the AI SDK needs Node.js {OLDEST_NODE} or newer, and `node --version` says {version}; install a newer one, from \
             https://nodejs.org or as nodejs and npm of Debian 12 or later"
        );
    }
    Ok(())
}

/// Parses the major version: 20 of `v20.19.2`.
fn major(version: &str) -> Option<u32> {
    version.strip_prefix('v')?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn major_version_is_the_first_number() {
        assert_eq!(major("v20.19.2"), Some(20));
        assert_eq!(major("v9.0.0-pre"), Some(9));
        assert_eq!(major("20.19.2"), None);
        assert_eq!(major("vain"), None);
    }

    #[test]
    fn nothing_installed_is_not_what_is_wanted() {
        let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        assert!(is_same(&lock, &lock).unwrap());
        assert!(!is_same(&lock, &lock.with_extension("missing")).unwrap());
        assert!(is_same(&lock.with_extension("missing"), &lock).is_err());
    }
}
