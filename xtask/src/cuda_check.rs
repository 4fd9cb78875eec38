//! `cargo xtask cuda-check`: whether the candle engine builds for NVIDIA GPUs, on a machine that needs none.
//!
//! `cuda-toolchain.sh` puts a toolkit together under `target/cuda` from NVIDIA's wheels on PyPI. Not part of CI: candle's
//! kernels take nvcc several minutes.

use std::process::Command;

use crate::process::run as run_command;
use crate::repo::Repo;

/// Takes the environment that the script prints, and checks the binary with the feature `cuda` in it.
const CHECK: &str = r#"
set -euo pipefail
environment=$(xtask/cuda-toolchain.sh target/cuda)
eval "$environment"
exec cargo clippy -p genset -p genset-engine-candle --features genset/cuda -- -D warnings
"#;

/// Prepares the toolkit and checks the engine and the binary with the feature `cuda`.
///
/// # Errors
/// When the toolkit cannot be had, or the code does not compile.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<()> {
    let mut check = Command::new("bash");
    check.args(["-c", CHECK]).current_dir(repo.root());
    run_command(&mut check)
}
