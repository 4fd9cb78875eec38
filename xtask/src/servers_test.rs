//! `cargo xtask servers-test`: real vLLM, llama-server and SGLang behind the real `genset` binary, on the CPU. Not part of CI:
//! they are large, or built from source.
//!
//! The checks are in `engines/launcher/tests/servers/`.

mod install;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};

use crate::process::run as run_command;
use crate::python::ensure_python;
use crate::repo::Repo;

/// A server that is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServerName {
    /// llama-server, by tokens and by text: 8 minutes of building, 15 MB
    Llamacpp,
    /// vLLM: 2.4 GiB to download, 5.9 GB on disk
    Vllm,
    /// SGLang without its kernels: 2.6 GiB to download, 9.5 GB on disk
    Sglang,
}

/// A part of what is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// What it answers
    Questions,
    /// How it starts, ends and is killed
    Life,
    /// Its LoRA adapters, where it has some
    Adapters,
    /// Chats with images, where it takes them
    Media,
    /// What operators ask, what it tells of itself, and an answer that goes on at another worker
    Operated,
    /// The conformance kit on a live worker
    Kit,
}

// No doc comment: it would replace the help of the task.
#[derive(Debug, Args)]
pub(crate) struct ServersTest {
    /// The servers; all without one
    #[arg(value_enum)]
    pub(crate) servers: Vec<ServerName>,
    /// Only this; may be repeated
    #[arg(long, value_enum, value_name = "PART")]
    pub(crate) only: Vec<Part>,
    /// Only checks of the kit whose ids start with these
    #[arg(long, value_name = "IDS")]
    pub(crate) checks: Option<String>,
    /// The binary [default: target/release/genset]
    #[arg(long)]
    pub(crate) binary: Option<PathBuf>,
}

impl ServerName {
    /// The ways in which Genset drives it.
    fn ways(self) -> &'static [&'static str] {
        match self {
            Self::Llamacpp => &["llamacpp", "llamacpp-text"],
            Self::Vllm => &["vllm"],
            Self::Sglang => &["sglang"],
        }
    }
}

/// Installs what is missing, tries each server, and prints a table for each.
///
/// # Errors
/// When a server cannot be installed, or a row of a table is wrong; returned after all were tried.
pub(crate) fn run(repo: &Repo, test: &ServersTest) -> anyhow::Result<()> {
    let release = || repo.target().join("release/genset");
    let binary = test.binary.clone().unwrap_or_else(release);
    let binary = std::path::absolute(&binary)?;
    if !binary.is_file() {
        bail!("there is no {}: cargo build --release", binary.display());
    }
    ensure_python()?;
    let all = ServerName::value_variants();
    let servers = match test.servers.as_slice() {
        [] => all,
        some => some,
    };
    let folder = repo.target().join("servers");
    let mut failed = Vec::new();
    for server in servers {
        let programs = install::server(repo, &folder, *server)
            .with_context(|| format!("{server:?} cannot be installed"))?;
        for way in server.ways() {
            let mut tried = Command::new("python3");
            tried
                .arg("-B")
                .arg(repo.root().join("engines/launcher/tests/servers"))
                .args([way, "--genset"])
                .arg(&binary)
                .arg("--model")
                .arg(repo.root().join("models/tiny-chat"))
                .arg("--bin")
                .arg(&programs)
                .arg("--out")
                .arg(folder.join("out"));
            for part in &test.only {
                let value = part.to_possible_value();
                tried.args(value.map(|value| format!("--only={}", value.get_name())));
            }
            if let Some(checks) = &test.checks {
                tried.args(["--checks", checks]);
            }
            if run_command(&mut tried).is_err() {
                failed.push(*way);
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    let logs = folder.join("out");
    bail!("failed: {}; logs in {}", failed.join(", "), logs.display())
}
