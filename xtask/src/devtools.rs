//! `cargo xtask make-tiny-chat`, `train-tiny-chat` and `make-model`: builds a program of the crate `genset-devtools` with
//! optimization and runs it. As part of xtask, the programs' dependencies would be built before every other task.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use crate::process;
use crate::repo::Repo;

/// Runs the trainer of `models/tiny-chat` with these arguments. It writes to this program's output, so a terminal shows its
/// progress.
///
/// # Errors
/// When the trainer cannot be built, or does not exit with 0.
pub(crate) fn train_tiny_chat(repo: &Repo, args: &[OsString]) -> anyhow::Result<()> {
    let mut command = program(repo, "train-tiny-chat");
    // Candle's threads for sums busy-wait, which costs more than they save at this size. Matrix products use other threads.
    command.args(args).env("CANDLE_NUM_THREADS", "1");
    // The program runs only here, so it may use everything that this processor has.
    command.env("RUSTFLAGS", "-C target-cpu=native");
    // Each step allocates the same memory again. Returning it to the system in between costs a tenth of the time.
    for (name, bytes) in [("MMAP_THRESHOLD", 1u64 << 30), ("TRIM_THRESHOLD", 1 << 32)] {
        command.env(format!("MALLOC_{name}_"), bytes.to_string());
    }
    process::run(&mut command)
}

/// Makes the files of `models/tiny-chat` except its weights; with `check`, compares the existing files.
///
/// # Errors
/// When the program cannot be built, or does not exit with 0.
pub(crate) fn make_tiny_chat(repo: &Repo, check: bool) -> anyhow::Result<()> {
    let mut command = program(repo, "make-tiny-chat");
    process::run(command.args(check.then_some("--check")))
}

/// Makes a model with random weights; `--help` among the arguments lists the options.
///
/// # Errors
/// When the program cannot be built, or does not exit with 0.
pub(crate) fn make_model(repo: &Repo, args: &[OsString]) -> anyhow::Result<()> {
    process::run(program(repo, "make-model").args(args))
}

/// Makes a model of `params` weights in `folder`, and a GGUF file of the given type, if any.
///
/// # Errors
/// Those of [`make_model`].
pub(crate) fn make_model_in(
    repo: &Repo,
    folder: &Path,
    params: &str,
    gguf: Option<&str>,
) -> anyhow::Result<()> {
    let gguf = gguf.map(|kind| ["--gguf", kind]);
    let words = ["--params", params]
        .into_iter()
        .chain(gguf.into_iter().flatten());
    let place = [OsStr::new("--out"), folder.as_os_str()];
    let words = words.map(OsStr::new).chain(place);
    make_model(repo, &words.map(OsStr::to_owned).collect::<Vec<_>>())
}

fn program(repo: &Repo, name: &str) -> Command {
    let mut command = process::cargo(repo.root());
    let package = ["--package", "genset-devtools", "--bin", name, "--"];
    command.args(["run", "--profile", "train"]).args(package);
    command
}
