//! `cargo xtask llamacpp-check`: a real llama.cpp behind the real `genset` binary. Not part of CI: it builds llama.cpp from
//! source.
//!
//! The assertions are in `engines/launcher/tests/llamacpp_check.py`.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use clap::ValueEnum;

use crate::artifacts;
use crate::process::run as run_command;
use crate::python::virtual_environment_built_with;
use crate::repo::Repo;

/// Names an interpreter that already has `llama_cpp.server`.
const PYTHON_VARIABLE: &str = "GENSET_LLAMACPP_PYTHON";

/// Prepares an interpreter with `llama_cpp.server`, builds the binary and runs the script.
///
/// # Errors
/// When llama.cpp cannot be installed, the binary does not build, or an answer is wrong.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let tests = tests(repo);
    let python = python_with_llamacpp(repo, Instructions::Widest)?;
    let genset = artifacts::binary(repo, "genset")?;
    let mut check = Command::new(python);
    check
        .arg("-B")
        .arg(tests.join("llamacpp_check.py"))
        .arg(genset)
        .arg(repo.root().join("models/tiny-chat/tiny-chat-q8_0.gguf"));
    run_command(&mut check)
}

/// What llama.cpp may compute with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Instructions {
    /// The widest that this processor has.
    #[default]
    #[value(name = "auto")]
    Widest,
    /// AVX2 and what comes with it.
    Avx2,
}

impl Instructions {
    /// The value of the candle engine's `--isa`.
    pub(crate) fn isa(self) -> &'static str {
        match self {
            Self::Widest => "auto",
            Self::Avx2 => "avx2",
        }
    }

    /// The name of the virtual environment.
    fn folder(self) -> &'static str {
        match self {
            Self::Widest => "venv-llamacpp",
            Self::Avx2 => "venv-llamacpp-avx2",
        }
    }

    /// Environment variables for the build of llama.cpp.
    fn build(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Widest => &[],
            Self::Avx2 => &[
                (
                    "CMAKE_ARGS",
                    "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
                ),
                // Otherwise pip would take the build of another folder from its cache.
                ("PIP_NO_CACHE_DIR", "1"),
            ],
        }
    }
}

/// The interpreter that `GENSET_LLAMACPP_PYTHON` names, whose llama.cpp may use any instructions, or one for which llama.cpp is
/// built from source.
///
/// # Errors
/// When llama.cpp cannot be installed.
pub(crate) fn python_with_llamacpp(
    repo: &Repo,
    instructions: Instructions,
) -> anyhow::Result<PathBuf> {
    if instructions == Instructions::Widest
        && let Some(python) = env::var_os(PYTHON_VARIABLE)
    {
        return Ok(PathBuf::from(python));
    }
    let requirements = tests(repo).join("llamacpp-requirements.txt");
    let (folder, build) = (instructions.folder(), instructions.build());
    virtual_environment_built_with(repo, folder, &requirements, "llama_cpp, uvicorn", build)
}

fn tests(repo: &Repo) -> PathBuf {
    repo.root().join("engines/launcher/tests")
}
