//! Engines in their own processes, whose programs are built from their own workspaces under `engines/`: `out=mistralrs`, which
//! needs other versions of crates than this program, and `out=libllama`, which builds llama.cpp. See the decision record
//! `docs/adr/0026`.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, LLMEngine};
use genset_engine_candle::DtypeChoice;
use genset_engine_launcher::ExtraArgs;
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};

use super::candle::{BuiltInFiles, files_of};
use super::{supervised, tiny_chat, worker_of};
use crate::args::RunConfig;

/// An engine whose program is built separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Apart {
    MistralRs,
    /// llama.cpp's library; its server is launched by `out=llamacpp`.
    LibLlama,
}

impl Apart {
    pub(crate) const ALL: [Self; 2] = [Self::MistralRs, Self::LibLlama];

    /// The word after `out=`.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::MistralRs => "mistralrs",
            Self::LibLlama => "libllama",
        }
    }

    /// The name of the engine's program.
    const fn program_name(self) -> &'static str {
        match self {
            Self::MistralRs => "genset-mistralrs",
            Self::LibLlama => "genset-llamacpp",
        }
    }

    /// The command that builds the program, in a checkout of Genset.
    pub(crate) const fn build_line(self) -> &'static str {
        match self {
            Self::MistralRs => "cargo build --release --manifest-path engines/mistralrs/Cargo.toml",
            Self::LibLlama => "cargo build --release --manifest-path engines/llamacpp/Cargo.toml",
        }
    }

    /// The message for a user if the program is missing.
    pub(crate) const fn is_missing(self) -> &'static str {
        match self {
            Self::MistralRs => {
                "there is no mistral.rs here: out=candle answers in its place, with the same models. \
                To have it, build the program genset-mistralrs in a checkout of Genset with `cargo build --release --manifest-path \
                engines/mistralrs/Cargo.toml`, and put it (engines/mistralrs/target/release/genset-mistralrs) beside genset or into PATH"
            }
            Self::LibLlama => {
                "there is no program genset-llamacpp here. To have it, build it in a checkout of Genset with `cargo build --release \
                --manifest-path engines/llamacpp/Cargo.toml`, and put it (engines/llamacpp/target/release/genset-llamacpp) beside \
                genset or into PATH; or take out=llamacpp, which runs llama-server, or out=candle"
            }
        }
    }

    /// The program's path: beside this program, or in `PATH`.
    pub(crate) fn program(self) -> Option<PathBuf> {
        let beside = env::current_exe().ok();
        let beside = beside.and_then(|own| own.parent().map(PathBuf::from));
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = beside.into_iter().chain(env::split_paths(&path));
        folders
            .map(|folder| folder.join(self.program_name()))
            .find(|program| program.is_file())
    }

    /// Flags of the candle engine that the program also has.
    pub(crate) const fn shared_flags(self) -> &'static [&'static str] {
        match self {
            Self::MistralRs => &["dtype", "max-num-seqs"],
            Self::LibLlama => &["max-num-batched-tokens", "max-num-seqs", "threads"],
        }
    }

    /// The program's arguments in addition to the model: those of our flags that it also has, and its own.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the file with its own arguments.
    fn flags(self, config: &RunConfig) -> Result<Vec<String>, EngineError> {
        let engine = &config.engine_args;
        let candle = &engine.candle;
        let text = |number: Option<u32>| number.map(|number| number.to_string());
        let dtype = (candle.dtype != DtypeChoice::Auto).then(|| candle.dtype.to_string());
        let threads = candle.threads.map(|threads| threads.to_string());
        let ours = match self {
            Self::MistralRs => vec![
                ("--dtype", dtype),
                ("--max-num-seqs", text(candle.max_num_seqs)),
            ],
            Self::LibLlama => vec![
                // llama.cpp allocates keys and values at the start, by default for less than the model's context.
                ("--max-model-len", text(config.worker.context_length)),
                (
                    "--max-num-batched-tokens",
                    text(candle.max_num_batched_tokens),
                ),
                ("--max-num-seqs", text(candle.max_num_seqs)),
                ("--threads", threads),
            ],
        };
        let given = ours
            .into_iter()
            .filter_map(|(flag, value)| Some([flag.to_owned(), value?]));
        let own = engine.launcher.extra_engine_args.as_deref();
        let own = own.map(|path| ExtraArgs::load(path)?.flags()).transpose()?;
        Ok(given.flatten().chain(own.into_iter().flatten()).collect())
    }
}

/// Builds the engine (which does not start it) and the worker's configuration.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(super) fn build(
    apart: Apart,
    config: &RunConfig,
) -> Result<(Arc<dyn LLMEngine>, WorkerConfig), EngineError> {
    let program = apart.program();
    let program = program.ok_or_else(|| EngineError::unsupported("out", apart.is_missing()))?;
    let flags = apart.flags(config)?;
    let process = |weights: PathBuf| -> Result<SubprocessEngine, EngineError> {
        let weights = weights.into_os_string().into_string().map_err(|_| {
            let problem = format!("must be a path in UTF-8 for out={}", apart.word());
            EngineError::invalid_argument("MODEL", problem)
        })?;
        let args = [weights].into_iter().chain(flags);
        let process = SubprocessConfig::new(&program).with_args(args);
        Ok(supervised(process, config))
    };
    let (folder, engine): (_, Arc<dyn LLMEngine>) = match &config.worker.model_path {
        None => {
            let files = BuiltInFiles::unpack()?;
            let engine = process(files.weights())?;
            (tiny_chat()?, Arc::new(files.served_by(engine)))
        }
        Some(path) => {
            let folder = files_of(path, config)?;
            (folder, Arc::new(process(path.clone())?))
        }
    };
    let (mut worker, context) = worker_of(folder, config)?;
    if apart == Apart::MistralRs {
        worker.context_length_tokens.get_or_insert(context);
    }
    Ok((engine, worker))
}
