//! `cargo xtask engines-test`: runs the conformance kit on engines that wrap other projects' engines, each in its own workspace.
//! Not part of CI: each builds hundreds of packages that nothing else needs.
//!
//! The assertions are in `engines/NAME/tests` and in the kit.

mod llamacpp;

use clap::ValueEnum;

use crate::devtools::make_model;
use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// An engine in a workspace of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    Mistralrs,
    Llamacpp,
}

impl EngineName {
    fn name(self) -> &'static str {
        match self {
            Self::Mistralrs => "mistralrs",
            Self::Llamacpp => "llamacpp",
        }
    }

    /// The folders of its models with random weights, and the arguments that make each.
    fn models(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Mistralrs => &[("qwen3", "--qwen3")],
            Self::Llamacpp => &[
                ("llama", "--gguf f32"),
                ("qwen3-gguf", "--qwen3 --gguf f32"),
            ],
        }
    }
}

/// Tells a test the folder of these models, in addition to `models/`.
const MODELS_VARIABLE: &str = "GENSET_TEST_MODELS";

/// Builds each engine in its own target folder, and runs the kit on its program.
///
/// # Errors
/// When something does not build, or the kit fails an engine.
pub(crate) fn run(repo: &Repo, engines: &[EngineName]) -> anyhow::Result<()> {
    let engines = match engines {
        [] => EngineName::value_variants(),
        some => some,
    };
    let models = repo.target().join("engines/models");
    for engine in engines {
        for (folder, words) in engine.models() {
            let folder = models.join(folder);
            if !folder.join("config.json").exists() {
                let words = words.split(' ').chain(["--params", "tiny", "--out"]);
                let words = words.map(Into::into).chain([folder.into()]);
                make_model(repo, &words.collect::<Vec<_>>())?;
            }
        }
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
        match engine {
            EngineName::Mistralrs => {}
            EngineName::Llamacpp => llamacpp::add_build_tools(repo, &mut test)?,
        }
        run_command(&mut test)?;
    }
    Ok(())
}
