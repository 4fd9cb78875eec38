//! The help of `genset run`, short unless the full help is requested; completions and man pages, generated from the same grammar.

use std::path::Path;

use clap_complete::Shell;
use genset_backend_common::EngineError;

/// The flags that `--help` shows. The others are in `--help-all`, completions, man pages and the guide.
const USUAL: &[&str] = &[
    "adapter",
    "api-keys",
    "batch-concurrency",
    "chat-template",
    "config",
    "context-length",
    "device",
    "discovery-backend",
    "engine-cmd",
    "etcd-endpoints",
    "extra-engine-args",
    "grace",
    "help",
    "help-all",
    "http-host",
    "http-port",
    "http-tls-cert",
    "http-tls-key",
    "kv-cache-memory",
    "max-num-seqs",
    "migration-limit",
    "model-config",
    "model-name",
    "namespace",
    "nats-server",
    "print-config",
    "quantize",
    "reasoning-parser",
    "request-plane",
    "router-mode",
    "script",
    "status-port",
    "tensor-parallel-size",
    "threads",
    "tool-parser",
    "ui",
    "verbose",
    "wire-host",
];

/// `run`, with rarely needed flags left to `--help-all`.
pub(super) fn shortened(run: clap::Command) -> clap::Command {
    run.mut_args(|arg| {
        let is_usual = arg.get_long().is_none_or(|name| USUAL.contains(&name));
        arg.hide_short_help(!is_usual)
    })
}

/// The script that completes commands and flags.
pub(super) fn completions(mut command: clap::Command, shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "genset", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes a man page for each command; returns a text that says where they are.
///
/// # Errors
/// `InvalidArgument`, naming the folder, when it cannot be written to.
pub(super) fn man(command: clap::Command, folder: &Path) -> Result<String, EngineError> {
    let bad = |error: std::io::Error| {
        let problem = format!("{}: {error}", folder.display());
        EngineError::invalid_argument("FOLDER", problem)
    };
    std::fs::create_dir_all(folder).map_err(bad)?;
    clap_mangen::generate_to(command, folder).map_err(bad)?;
    Ok(format!(
        "the pages are in {}; `man -l {}` shows the first\n",
        folder.display(),
        folder.join("genset.1").display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_usual_flag_is_one() {
        let command = super::super::command();
        let run = command.find_subcommand("run").unwrap();
        let known: Vec<&str> = run
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .collect();
        for name in USUAL {
            assert!(known.contains(name), "{name}");
        }
    }
}
