//! Python for the tests: an interpreter with `msgpack`, and the package of this repository.

#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use genset_engine_subprocess::SubprocessConfig;

/// Selects an interpreter other than the one of `target/venv-engine`.
const PYTHON_VARIABLE: &str = "GENSET_TEST_PYTHON";

/// The folder of the Python package.
pub fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python")
}

/// An interpreter that has `msgpack`.
///
/// # Panics
/// Panics if there is none; the message says how to install it.
pub fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        let candidates = [
            std::env::var_os(PYTHON_VARIABLE).map(PathBuf::from),
            Some(target.join("venv-engine/bin/python")),
            Some(PathBuf::from("python3")),
        ];
        let found = candidates.into_iter().flatten().find(|python| has_msgpack(python));
        found.unwrap_or_else(|| {
            panic!(
                "these tests need Python 3.10 or newer with msgpack. Run `cargo xtask test python-package`, which installs it \
                 in target/venv-engine, or name an interpreter that has it in {PYTHON_VARIABLE}"
            )
        })
    })
}

fn has_msgpack(python: &Path) -> bool {
    let mut check = Command::new(python);
    check.args([
        "-c",
        "import msgpack, sys; assert sys.version_info >= (3, 10)",
    ]);
    let silent = check.stdout(Stdio::null()).stderr(Stdio::null());
    silent.status().is_ok_and(|status| status.success())
}

/// A value for `-X`: keeps Python's compiled files away from its sources.
const PYTHON_CACHE: &str = concat!("pycache_prefix=", env!("CARGO_TARGET_TMPDIR"), "/pycache");

/// The Python program at `path`, with the package in its path.
pub fn program(path: &Path) -> SubprocessConfig {
    SubprocessConfig::new(python())
        .with_args(["-X", PYTHON_CACHE])
        .with_args([path.display().to_string()])
        // Otherwise Python would compile even the standard library at every start.
        .with_env("PYTHONDONTWRITEBYTECODE", "")
        .with_env("PYTHONPATH", package().join("src").display().to_string())
}
