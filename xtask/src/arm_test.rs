//! `cargo xtask arm-test`: whether the candle engine computes on 64-bit ARM what it should, in QEMU on any machine. Not part of
//! CI, which must not download the target's standard library.
//!
//! In order: the model's tests on a processor that has all instructions that there are kernels for, and those of the products on
//! processors that have fewer; tiny-chat's golden questions through the binary. How long each took is told, the builds apart.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::golden_questions;
use crate::process::{cargo, output, run as run_command, succeeds};
use crate::repo::Repo;
use crate::stopwatch::Stopwatch;
use crate::system_packages;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Where Debian has the target's libraries.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";
/// Processors, and the modules of the engine that are tested on them. The first has i8mm and runs the narrower kernels as well;
/// what the others show is that nothing is used that they lack: i8mm (ARMv8.2), the 8-bit dot product too (a processor of 2012).
const TESTS: [(&str, &str); 3] = [
    ("max", "model::"),
    ("neoverse-n1", "model::linear::"),
    ("cortex-a53", "model::linear::"),
];

/// Runs everything, and stops at the first failure.
///
/// # Errors
/// When a program or the target's standard library is missing and cannot be installed, something does not build, or a number is wrong.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let is_here = |name: &str| succeeds(Command::new(name).arg("--version").stdout(Stdio::null()));
    if !is_here(LINKER) || !is_here(EMULATOR) {
        system_packages::install(&[
            "gcc-aarch64-linux-gnu",
            "libc6-dev-arm64-cross",
            "qemu-user",
        ])?;
    }
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let library = Path::new(sysroot.trim()).join("lib/rustlib").join(TARGET);
    if !library.exists() {
        run_command(Command::new("rustup").args(["target", "add", TARGET]))
            .with_context(|| format!("the toolchain has no {}", library.display()))?;
    }
    let tests = |processor: &str| {
        let mut tests = command(repo, "test", processor);
        tests.args(["-p", "genset-engine-candle", "--lib"]);
        tests
    };
    timed("the tests' build", || {
        run_command(tests("max").arg("--no-run"))
    })?;
    for (processor, modules) in TESTS {
        timed(&format!("{modules} on {processor}"), || {
            run_command(tests(processor).args(["--", modules]))
        })?;
    }
    timed("the binary's build", || {
        run_command(command(repo, "build", "max").args(["-p", "genset", "--bin", "genset"]))
    })?;
    let genset = repo.target().join(TARGET).join("debug/genset");
    ensure!(genset.exists(), "{} was not built", genset.display());
    let mut emulated = Command::new(EMULATOR);
    emulated.args(["-L", LIBRARIES]).arg(&genset);
    timed("the golden questions", || {
        golden_questions::ask(repo, emulated, &[])
    })
}

/// Tells how long a part took.
fn timed(what: &str, run: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let watch = Stopwatch::start();
    run()?;
    eprintln!("arm-test: {what} took {watch}");
    Ok(())
}

fn command(repo: &Repo, subcommand: &str, processor: &str) -> Command {
    let mut command = cargo(repo.root());
    command
        .args([subcommand, "--target", TARGET])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -cpu {processor} -L {LIBRARIES}"),
        );
    command
}
