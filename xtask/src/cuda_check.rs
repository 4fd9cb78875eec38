//! `cargo xtask cuda-check`: checks that the candle engine builds for NVIDIA GPUs, on a machine without one. The engine's unit
//! tests check the kernels' results, emulated on the host.
//!
//! `cuda-toolchain.sh` assembles a toolkit under `target/cuda` from NVIDIA's wheels on PyPI. Not part of CI: nvcc needs several
//! minutes for candle's kernels.

use std::process::Command;

use crate::process::run as run_command;
use crate::repo::Repo;

/// Loads the environment that the script prints, and checks the engine with the feature `cuda`: lints, a program that links and
/// starts without a driver, and the binary's code. This also compiles the engine's own kernels to PTX; `ptxas` translates them,
/// as a driver would.
const CHECK: &str = r#"
set -euo pipefail
environment=$(xtask/cuda-toolchain.sh "$1/cuda")
eval "$environment"
cargo clippy -p genset-engine-candle --all-targets --features cuda -- -D warnings
cargo test -p genset-engine-candle --features cuda --lib -- kernels
newest=$(ls -dt "$1"/debug/build/genset-engine-candle-*/out/genset_BF16.ptx | head -1)
for module in "${newest%/*}"/genset_*.ptx; do
  for architecture in sm_80 sm_90; do
    echo "ptxas -arch=$architecture $(basename "$module")" >&2
    ptxas -arch=$architecture "$module" -o /dev/null
  done
done
cargo check -p genset --features genset/cuda
"#;

/// Prepares the toolkit, and checks the engine and the binary with the feature `cuda`.
///
/// # Errors
/// When the toolkit cannot be installed, the code does not compile, or a kernel's result is wrong.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let mut check = Command::new("bash");
    check
        .args(["-c", CHECK, "cuda-check"])
        .arg(repo.target())
        .current_dir(repo.root());
    run_command(&mut check)
}
