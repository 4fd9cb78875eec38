//! `cargo xtask test browser`: a real headless browser against the real `genset` binary. Tests what web pages may do to it, and
//! what people do with its own pages.
//!
//! The assertions are in `python-tests/browser.py` and `web_page.py`, which need only Python's standard library and Chromium.

use crate::artifacts;
use crate::process::run as run_command;
use crate::python;
use crate::repo::Repo;

/// Builds the binary and runs the scripts.
///
/// # Errors
/// When the binary does not build, the browser is missing, or a page can do something that it should not.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let genset = artifacts::binary(repo, "genset")?;
    for name in ["python-tests/browser.py", "python-tests/web_page.py"] {
        let mut script = python::command(repo, "python3");
        script
            .arg(name)
            .env("GENSET_BIN", &genset)
            .current_dir(repo.root());
        run_command(&mut script)?;
    }
    Ok(())
}
