//! `cargo xtask train-tiny-chat`: builds the trainer of `models/tiny-chat` with optimization and runs it.

use std::ffi::OsString;

use crate::process;
use crate::repo::Repo;

/// Runs the trainer with these arguments; its output is this program's, so a terminal shows its progress.
///
/// # Errors
/// When the trainer cannot be built, or does not exit with 0.
pub(crate) fn run(repo: &Repo, args: &[OsString]) -> anyhow::Result<()> {
    let mut command = process::cargo(repo.root());
    command
        .args(["run", "--profile", "train"])
        .args(["--package", "genset-train-tiny-chat", "--"])
        .args(args);
    // Candle's threads for sums wait by spinning, which costs more than they save at this size. Matrices have others.
    command.env("CANDLE_NUM_THREADS", "1");
    process::run(&mut command)
}
