//! `cargo xtask engines-test`: engines around other projects' engines, each in a workspace of its own, under the conformance kit. Not part
//! of CI: each builds hundreds of packages that nothing else needs.
//!
//! Whatever is asserted stands in `engines/NAME/tests` and in the kit.

use clap::ValueEnum;

use crate::devtools::make_model;
use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// An engine in a workspace of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    Mistralrs,
}

impl EngineName {
    fn name(self) -> &'static str {
        match self {
            Self::Mistralrs => "mistralrs",
        }
    }
}

/// Names the folder of models to a test, beside `models/`.
const MODELS_VARIABLE: &str = "GENSET_TEST_MODELS";

/// Builds each engine in a target folder of its own, and runs the kit on its program.
///
/// # Errors
/// When something does not build, or the kit fails an engine.
pub(crate) fn run(repo: &Repo, engines: &[EngineName]) -> anyhow::Result<()> {
    let engines = match engines {
        [] => EngineName::value_variants(),
        some => some,
    };
    let models = repo.target().join("engines/models");
    let qwen3 = models.join("qwen3");
    if !qwen3.join("config.json").exists() {
        let words = ["--params", "tiny", "--qwen3", "--out"].map(Into::into);
        make_model(repo, &[&words[..], &[qwen3.into()]].concat())?;
    }
    for engine in engines {
        let name = engine.name();
        let manifest = repo.root().join(format!("engines/{name}/Cargo.toml"));
        let target = repo.target().join(format!("engines/{name}"));
        let mut test = cargo(repo.root());
        test.args(["test", "--locked", "--manifest-path"])
            .arg(manifest)
            .arg("--target-dir")
            .arg(&target)
            .args(["--", "--nocapture", "--test-threads=1"])
            .env(MODELS_VARIABLE, &models);
        run_command(&mut test)?;
    }
    Ok(())
}
