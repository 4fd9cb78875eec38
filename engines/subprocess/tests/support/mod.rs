//! Python for the tests: the interpreter with `msgpack`, and the package of this repository. And what the conformance kit
//! needs to run it.

#![allow(dead_code, reason = "each test file uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::LLMEngine;
use genset_conformance::{ChildCommand, Subject, Supervise};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};

/// Names another interpreter than the one of `target/venv-engine`.
const PYTHON_VARIABLE: &str = "GENSET_TEST_PYTHON";

/// The folder of the Python package.
pub fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python")
}

/// An interpreter that has `msgpack`.
///
/// # Panics
/// When there is none, with how to get one.
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
                "these tests need Python 3.10 or newer with msgpack. Run `cargo xtask python-package-test`, which installs it \
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

/// The Python program at `path`, with the package in its path.
pub fn program(path: &Path) -> SubprocessConfig {
    SubprocessConfig::new(python())
        .with_args(["-B".to_owned(), path.display().to_string()])
        .with_env("PYTHONPATH", package().join("src").display().to_string())
}

/// How the checks of the conformance kit run a process.
#[derive(Debug, Clone)]
pub struct Supervised(pub SubprocessConfig);

impl Supervise for Supervised {
    fn command(&self) -> ChildCommand {
        let config = self.0.clone();
        ChildCommand {
            program: config.program,
            args: config.args,
            env: config.env,
            cwd: config.cwd,
        }
    }

    fn supervise(&self, command: ChildCommand, patience: Duration) -> Arc<dyn LLMEngine> {
        Arc::new(SubprocessEngine::new(self.config(command, patience)))
    }
}

impl Supervised {
    /// The settings for `command`.
    pub fn config(&self, command: ChildCommand, patience: Duration) -> SubprocessConfig {
        SubprocessConfig {
            program: command.program,
            args: command.args,
            env: command.env,
            cwd: command.cwd,
            hello_timeout: patience,
            start_timeout: patience,
            ..self.0.clone()
        }
    }

    /// The engine, for the conformance kit.
    pub fn subject(&self) -> Subject {
        Subject::new(SubprocessEngine::new(self.0.clone())).with_process(Arc::new(self.clone()))
    }
}
