//! Creates a model with random weights, of the size of a real one: `cargo xtask make-model`.

#![expect(
    clippy::print_stderr,
    reason = "who makes a model sees on the terminal what was made"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use clap::Parser;
use genset_devtools::checkout::{self, Config, Family};
use genset_devtools::gguf::{self, GgufType};
use genset_devtools::synthetic::{SyntheticSize, make_model_of};

/// Makes a checkout, and on demand a GGUF file, with random weights and the built-in model's tokenizer.
#[derive(Debug, Parser)]
struct Cli {
    /// Weights: 100m, 500m, 1b, or tiny for a first try; or the width of its rows: w576, w640, w896, w960, w1024, w1536
    #[arg(long, value_name = "SIZE")]
    params: SyntheticSize,
    /// Makes a Qwen3 in place of a Llama
    #[arg(long)]
    qwen3: bool,
    /// Folder for the checkout; created if it is not there
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Also write DIR/model.gguf: f32, f16, bf16, q8_0, q6_k, q5_k, q4_k or q4_0
    #[arg(long, value_name = "TYPE")]
    gguf: Option<GgufType>,
    /// Decides the weights
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Folder with the tokenizer's files
    #[arg(long, default_value = "models/tiny-chat", value_name = "DIR")]
    tokenizer: PathBuf,
}

fn main() -> ExitCode {
    match make(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts an incomplete model again: files are moved into place when all of them are complete, `config.json` last.
fn make(cli: &Cli) -> anyhow::Result<()> {
    let out = &cli.out;
    let shown = out.display();
    ensure!(
        !out.join("config.json").exists(),
        "--out: {shown} holds a model already"
    );
    let unfinished = out.join(".unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    fs::create_dir_all(out).with_context(|| format!("cannot create {shown}"))?;
    // A GGUF file contains the folder's name.
    let folder = unfinished.join(out.canonicalize()?.file_name().unwrap_or_default());
    fill(cli, &folder)?;
    let entries = fs::read_dir(&folder)?.collect::<Result<Vec<_>, _>>()?;
    let mut names: Vec<_> = entries.iter().map(fs::DirEntry::file_name).collect();
    names.sort_by_key(|name| name == "config.json");
    for name in names {
        fs::rename(folder.join(&name), out.join(&name))?;
    }
    fs::remove_dir_all(&unfinished)?;
    let millions = cli.params.parameters() / 1_000_000;
    eprintln!(
        "{shown}: {millions} million weights, bf16, seed {}",
        cli.seed
    );
    Ok(())
}

fn fill(cli: &Cli, folder: &Path) -> anyhow::Result<()> {
    let family = if cli.qwen3 {
        Family::Qwen3
    } else {
        Family::Llama
    };
    make_model_of(family, folder, cli.params, cli.seed)?;
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        let from = cli.tokenizer.join(name);
        fs::copy(&from, folder.join(name))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    if let Some(kind) = cli.gguf {
        let path = folder.join("model.gguf");
        let weights = checkout::read_weights(folder)?;
        let bytes = gguf::to_bytes(&Config::read(folder)?, &weights, folder, kind)?;
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use genset_devtools::tiny_chat;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_model_is_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let cli = Cli {
            params: SyntheticSize::Tiny,
            qwen3: false,
            out: folder.path().join("made"),
            gguf: Some("q8_0".parse().unwrap()),
            seed: 7,
            tokenizer: tiny_chat::folder().into(),
        };
        let no_tokenizer = Cli {
            tokenizer: folder.path().join("none"),
            out: cli.out.clone(),
            ..cli
        };
        make(&no_tokenizer).unwrap_err();
        make(&cli).unwrap();
        assert!(cli.out.join("model.gguf").exists());
        assert!(!cli.out.join(".unfinished").exists());
        let error = make(&cli).unwrap_err().to_string();
        assert!(error.contains("holds a model already"), "{error}");
    }
}
