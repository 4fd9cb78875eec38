//! `cargo xtask cuda-check`: whether the candle engine builds for NVIDIA GPUs, on a machine that needs none; and
//! `kernel-test`, a part of it: whether the kernels' source computes what it should, emulated on the host.
//!
//! `cuda-toolchain.sh` puts a toolkit together under `target/cuda` from NVIDIA's wheels on PyPI. Not part of CI: candle's
//! kernels take nvcc several minutes.

use std::process::Command;

use crate::process::{cargo, run as run_command};
use crate::repo::Repo;

/// Takes the environment that the script prints, and checks the engine with the feature `cuda` in it: lints, a program that
/// is linked and starts where no driver is, and the binary's code. The engine's own kernels are compiled to PTX on the way;
/// `ptxas` translates them, as a driver would.
const CHECK: &str = r#"
set -euo pipefail
environment=$(xtask/cuda-toolchain.sh "$1/cuda")
eval "$environment"
cargo clippy -p genset-engine-candle --all-targets --features cuda -- -D warnings
cargo test -p genset-engine-candle --features cuda --lib -- forward
newest=$(ls -dt "$1"/debug/build/genset-engine-candle-*/out/genset_BF16.ptx | head -1)
for module in "${newest%/*}"/genset_*.ptx; do
  for architecture in sm_80 sm_90; do
    echo "ptxas -arch=$architecture $(basename "$module")" >&2
    ptxas -arch=$architecture "$module" -o /dev/null
  done
done
cargo check -p genset --features genset/cuda
"#;

/// Tests the kernels on the host, prepares the toolkit, and checks the engine and the binary with the feature `cuda`.
///
/// # Errors
/// When a kernel computes something else, the toolkit cannot be had, or the code does not compile.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    test_kernels(repo)?;
    let mut check = Command::new("bash");
    check
        .args(["-c", CHECK, "cuda-check"])
        .arg(repo.target())
        .current_dir(repo.root());
    run_command(&mut check)
}

/// Compiles the kernels' own source for the host, and compares what it computes with the attention for main memory and
/// with candle's operations. What calls them is linted too: no other step has it in its build.
///
/// # Errors
/// When there is no C++ compiler, a test fails or a lint speaks up.
pub(crate) fn test_kernels(repo: &Repo) -> anyhow::Result<()> {
    // The whole workspace, though it is about one crate: cargo then finds every dependency built as it wants it.
    let emulated = |subcommand: &str| {
        let mut command = cargo(repo.root());
        command.args([subcommand, "--workspace"]);
        command.args(["--features", "genset-engine-candle/kernel-emulation"]);
        command
    };
    run_command(emulated("clippy").args(["--all-targets", "--", "-D", "warnings"]))?;
    run_command(emulated("test").args(["--lib", "--", "kernels", "forward"]))
}
