//! `cargo xtask cuda-check`: whether the candle engine builds for NVIDIA GPUs, on a machine that needs none. Whether the
//! kernels' source computes what it should, emulated on the host, is among the engine's unit tests.
//!
//! `cuda-toolchain.sh` puts a toolkit together under `target/cuda` from NVIDIA's wheels on PyPI. Not part of CI: candle's
//! kernels take nvcc several minutes.

use std::process::Command;

use crate::process::run as run_command;
use crate::repo::Repo;

/// Takes the environment that the script prints, and checks the engine with the feature `cuda` in it: lints, a program that
/// is linked and starts where no driver is, and the binary's code. The engine's own kernels are compiled to PTX on the way;
/// `ptxas` translates them, as a driver would.
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
/// When the toolkit cannot be had, the code does not compile, or a kernel computes something else.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let mut check = Command::new("bash");
    check
        .args(["-c", CHECK, "cuda-check"])
        .arg(repo.target())
        .current_dir(repo.root());
    run_command(&mut check)
}
