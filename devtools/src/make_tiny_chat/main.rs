//! Creates the files of `models/tiny-chat` from its corpus alone: `cargo xtask make-tiny-chat`.
//!
//! The same corpus yields the same bytes on every machine, so the files are committed and a test compares them. It does not
//! create weights: `cargo xtask train-tiny-chat` trains them.

#![expect(
    clippy::print_stderr,
    reason = "who makes the files sees on the terminal what was made"
)]

mod config;
mod tokenizer;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Parser;
use genset_devtools::corpus::text_files;

/// Makes the tokenizer, the chat template and the configurations of this repository's model from its corpus.
#[derive(Debug, Parser)]
struct Cli {
    /// Folder of the model, with its corpus
    #[arg(long, default_value = "models/tiny-chat", value_name = "DIR")]
    model: PathBuf,
    /// Write nothing; fail if a file is not as the corpus makes it
    #[arg(long)]
    check: bool,
}

/// A file of the model: its name in the model's folder and its content.
struct ModelFile {
    name: &'static str,
    content: String,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let run = if cli.check { check } else { write };
    match make(&cli.model.join("corpus")).and_then(|files| run(&cli.model, &files)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn make(corpus: &Path) -> anyhow::Result<Vec<ModelFile>> {
    let tokenizer = tokenizer::train(&read_corpus(corpus)?)?;
    let ids = tokenizer::SpecialIds::look_up(&tokenizer)?;
    let text = tokenizer
        .to_string(true)
        .map_err(anyhow::Error::from_boxed)?;
    Ok(vec![
        ModelFile {
            name: "tokenizer.json",
            content: text + "\n",
        },
        ModelFile {
            name: "tokenizer_config.json",
            content: pretty(&config::tokenizer_config(&ids))?,
        },
        ModelFile {
            name: "config.json",
            content: pretty(&config::model_config(&ids))?,
        },
        ModelFile {
            name: "generation_config.json",
            content: pretty(&config::generation_config(&ids))?,
        },
    ])
}

/// The texts of the corpus in the order of their file names.
fn read_corpus(folder: &Path) -> anyhow::Result<Vec<String>> {
    let read = |path: &PathBuf| {
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    text_files(folder)?.iter().map(read).collect()
}

fn pretty(value: &serde_json::Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

fn write(folder: &Path, files: &[ModelFile]) -> anyhow::Result<()> {
    for ModelFile { name, content } in files {
        let path = folder.join(name);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("wrote {name} ({} bytes)", content.len());
    }
    Ok(())
}

fn check(folder: &Path, files: &[ModelFile]) -> anyhow::Result<()> {
    let is_stale = |file: &&ModelFile| {
        fs::read(folder.join(file.name)).ok().as_deref() != Some(file.content.as_bytes())
    };
    let stale: Vec<_> = files
        .iter()
        .filter(is_stale)
        .map(|file| file.name)
        .collect();
    if !stale.is_empty() {
        bail!(
            "not as the corpus makes them: {}; run: cargo xtask make-tiny-chat",
            stale.join(", ")
        );
    }
    eprintln!(
        "models/tiny-chat is as its corpus makes it ({} files)",
        files.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests;
