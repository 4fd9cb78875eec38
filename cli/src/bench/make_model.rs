//! `genset bench make-model`: a checkout, and on demand a GGUF file, with random weights and the built-in model's tokenizer.

use std::path::PathBuf;

use clap::Args;
use genset_backend_common::EngineError;
use genset_engine_candle::load::{GgufType, ModelFile};
use genset_engine_candle::synthetic::{self, SyntheticOptions, SyntheticSize};

use super::progress::Progress;
use crate::engine;
use crate::input::print;

#[derive(Debug, Args)]
pub(crate) struct MakeModelArgs {
    /// Weights: 100m, 500m, 1b, or tiny for a first try
    #[arg(long, value_name = "SIZE")]
    params: SyntheticSize,
    /// Folder for the checkout; created if it is not there
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Also write DIR/model.gguf: f32, f16, bf16, q8_0, q6_k, q5_k, q4_k or q4_0
    #[arg(long, value_name = "TYPE")]
    gguf: Option<GgufType>,
    /// Decides the weights
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

/// Makes the model and says what it made.
///
/// # Errors
/// The folder holds a model already, or a file cannot be written.
pub(super) fn perform(args: &MakeModelArgs) -> Result<(), EngineError> {
    print(&make(args)?);
    Ok(())
}

fn make(args: &MakeModelArgs) -> Result<String, EngineError> {
    if args.out.join("config.json").exists() {
        let problem = format!("{} holds a model already", args.out.display());
        return Err(EngineError::invalid_argument("--out", problem));
    }
    let tokenizer: Vec<ModelFile> = engine::TINY_CHAT
        .into_iter()
        .filter(|(name, _)| *name != "config.json")
        .map(|(name, content)| ModelFile {
            name,
            content: content.to_vec(),
        })
        .collect();
    let options = SyntheticOptions {
        size: args.params,
        seed: args.seed,
        gguf: args.gguf,
        tokenizer: &tokenizer,
    };
    let progress = Progress::of_bytes("writing weights");
    let made = synthetic::make_model(&args.out, &options, &|done| {
        progress.set(done.bytes, done.all_bytes);
    });
    progress.finish();
    let made = made.map_err(|error| EngineError::invalid_argument("--out", error))?;
    let mut text = format!(
        "{}: {} million weights, bf16, seed {}\n",
        made.folder.display(),
        made.parameters / 1_000_000,
        args.seed
    );
    if let Some(path) = &made.gguf {
        text.push_str(&format!("{}\n", path.display()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use genset_engine_candle::load::OpenModel;

    use super::*;

    #[test]
    fn a_model_is_made_once_and_can_be_opened() {
        let folder = tempfile::tempdir().unwrap();
        let args = MakeModelArgs {
            params: SyntheticSize::Tiny,
            out: folder.path().join("made"),
            gguf: Some("q8_0".parse().unwrap()),
            seed: 7,
        };
        let text = make(&args).unwrap();
        assert!(text.contains("2 million weights, bf16, seed 7"), "{text}");
        for path in [args.out.clone(), args.out.join("model.gguf")] {
            let open = OpenModel::open(&path).unwrap();
            assert_eq!(open.files(None).unwrap().len(), 4);
        }
        let error = make(&args).unwrap_err().to_string();
        assert!(
            error.contains("--out") && error.contains("holds a model already"),
            "{error}"
        );
    }
}
