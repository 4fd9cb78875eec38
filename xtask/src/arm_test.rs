//! `cargo xtask arm-test`: checks that the candle engine computes correct results on 64-bit ARM, in QEMU on any machine. Not part
//! of CI, which must not download the target's standard library.
//!
//! Runs, in order: the tests of the kernels and of the model on a processor with every instruction set that has kernels; the tests
//! of the matrix products on processors with fewer; tiny-chat's golden questions through the binary. Prints how long each part took,
//! builds apart.

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
/// The folder in which Debian installs the target's libraries.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";
const KERNELS: &str = "genset-kernels";
const ENGINE: &str = "genset-engine-candle";
/// Processors, and the modules tested on them. The first has i8mm and also runs the narrower kernels. The others show that
/// the kernels use no instructions they lack: i8mm (ARMv8.2), and also the 8-bit dot product (a processor of 2012).
const TESTS: [(&str, &str, &[&str]); 6] = [
    ("max", KERNELS, &[]),
    ("max", ENGINE, &["model::"]),
    ("neoverse-n1", KERNELS, &["products::"]),
    ("neoverse-n1", ENGINE, &["model::linear::"]),
    ("cortex-a53", KERNELS, &["products::"]),
    ("cortex-a53", ENGINE, &["model::linear::"]),
];

/// Runs all parts; stops at the first failure.
///
/// # Errors
/// When a program or the target's standard library is missing and cannot be installed, a build fails, or a result is wrong.
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
    let tests = |processor: &str, package: &str| {
        let mut tests = command(repo, "test", processor);
        tests.args(["-p", package, "--lib"]);
        tests
    };
    timed("the tests' build", || {
        run_command(tests("max", KERNELS).arg("--no-run"))?;
        run_command(tests("max", ENGINE).arg("--no-run"))
    })?;
    for (processor, package, modules) in TESTS {
        timed(&format!("{package} {modules:?} on {processor}"), || {
            run_command(tests(processor, package).arg("--").args(modules))
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

/// Runs a part and prints how long it took.
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
