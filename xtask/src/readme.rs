//! `cargo xtask readme`: copies the source files that README.md shows in full into it, between their markers.
//!
//! The files are the source of truth; `tests/readme.rs` fails if the page differs. Only the blocks below are changed.

use std::fs;

use anyhow::{Context as _, bail};

use crate::repo::Repo;

/// A marker's name, and the file shown between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
const BLOCKS: [(&str, &str); 2] = [
    ("sample", "engines/sample/src/lib.rs"),
    ("sample-worker", "examples/sample-worker/src/main.rs"),
];

/// What to do with a page that shows stale code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Write the current code into it.
    Write,
    /// Fail, and name the files whose copies are stale.
    Check,
}

/// Copies the files into README.md, or checks that it already shows them.
///
/// # Errors
/// When a file cannot be read or written, a marker is missing, or, for [`Mode::Check`], a block is stale.
pub(crate) fn run(repo: &Repo, mode: Mode) -> anyhow::Result<()> {
    let path = repo.root().join("README.md");
    let mut page =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut stale = Vec::new();
    for (name, file) in BLOCKS {
        let code = fs::read_to_string(repo.root().join(file))
            .with_context(|| format!("cannot read {file}"))?;
        let refreshed = with_block(&page, name, &code)?;
        if refreshed != page {
            stale.push(file);
        }
        page = refreshed;
    }
    if stale.is_empty() {
        eprintln!("README.md shows the present code");
        return Ok(());
    }
    let stale = stale.join(", ");
    if mode == Mode::Check {
        bail!("README.md shows an old version of {stale}; run: cargo xtask readme");
    }
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("README.md shows {stale} anew");
    Ok(())
}

/// `page` with `code` as the Rust block between the markers of `name`.
fn with_block(page: &str, name: &str, code: &str) -> anyhow::Result<String> {
    let (begin, end) = (
        format!("<!-- {name}:begin -->"),
        format!("<!-- {name}:end -->"),
    );
    let (before, rest) = page
        .split_once(&begin)
        .with_context(|| format!("README.md has no {begin}"))?;
    let (_, after) = rest
        .split_once(&end)
        .with_context(|| format!("README.md has no {end} after {begin}"))?;
    let code = code.trim_end();
    Ok(format!(
        "{before}{begin}\n```rust\n{code}\n```\n{end}{after}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_replaced_and_the_rest_stays() {
        let page = "top\n<!-- a:begin -->\nold\n<!-- a:end -->\nbottom\n";
        let expected = "top\n<!-- a:begin -->\n```rust\nfn new() {}\n```\n<!-- a:end -->\nbottom\n";
        let refreshed = with_block(page, "a", "fn new() {}\n").unwrap();
        assert_eq!(refreshed, expected);
        assert_eq!(
            with_block(&refreshed, "a", "fn new() {}\n").unwrap(),
            expected
        );
    }

    #[test]
    fn a_missing_marker_is_named() {
        let error = with_block("<!-- a:begin -->", "a", "").unwrap_err();
        assert!(error.to_string().contains("<!-- a:end -->"), "{error}");
    }
}
