//! Tasks of this repository: `cargo xtask --help` lists them.
//!
//! Not part of what Genset ships: no crate of ours depends on this one, and it depends on none of ours. People call it
//! through the alias in `.cargo/config.toml`; CI calls `cargo xtask test` and nothing else.

mod author_crate;
mod cuda_check;
mod deny;
mod disk_space;
mod gpu_test;
mod llamacpp_bench;
mod llamacpp_check;
mod openai_client;
mod process;
mod python;
mod python_kit;
mod python_package;
mod readme;
mod repo;
mod stopwatch;
mod system_packages;
mod test_command;
mod tiny_chat;
mod train_tiny_chat;
mod wire_client;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::repo::Repo;
use crate::tiny_chat::Mode;

/// Tasks of the Genset repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run everything CI runs, in CI's order, and stop at the first failure
    ///
    /// Format, lints, the Python package, tests, docs, licences, the engine author's package count, the
    /// Python OpenAI client and a Python client of the wire protocol. What a step needs and the machine lacks is
    /// installed: under target/ (cargo-deny, Python venvs), or with apt-get (protoc, etcd, a C++ compiler and
    /// nats-server; as root, or through a sudo that asks no password).
    Test {
        /// Also check dependencies for security advisories; fetches the advisory database from GitHub
        #[arg(long)]
        advisories: bool,
    },
    /// Write the tokenizer, chat template and configurations of models/tiny-chat from its corpus
    MakeTinyChat {
        /// Write nothing; fail and name the files that differ from what would be written
        #[arg(long)]
        check: bool,
    },
    /// Train models/tiny-chat on its own text, and write its weights as safetensors and as GGUF
    ///
    /// Takes up to half an hour on two cores. Fails if a question of golden.json is answered otherwise.
    /// `-- --help` lists what can be chosen; `-- --check` trains nothing and asks the weights that are there.
    TrainTinyChat {
        /// Arguments of the trainer
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Copy the source files that README.md shows into it, between their markers
    Readme {
        /// Write nothing; fail and name the files that are shown in an old version
        #[arg(long)]
        check: bool,
    },
    /// Count the packages that an engine author's own crate pulls in, and fail if there are too many
    AuthorCrate {
        /// Also build that crate from nothing, without optimization, and print the seconds
        #[arg(long)]
        time: bool,
    },
    /// Run python-tests/: the official OpenAI client against the real genset binary
    OpenaiClientTest,
    /// Run examples/python-wire-client/: a client written from docs/wire-protocol.md against a real worker
    WireClientTest,
    /// Check python/: the package's types with mypy, its tests, and its wheel
    PythonPackageTest,
    /// Run the conformance kit from pytest on the engines in Python: the sample, and examples/python/
    PythonKitTest,
    /// Run a real llama.cpp behind the real binary; builds it from source, which takes long, unless
    /// `GENSET_LLAMACPP_PYTHON` names an interpreter that has it
    LlamacppCheck,
    /// Measure the candle engine beside llama.cpp, on the same random GGUF file, in turns; llama.cpp as for
    /// `llamacpp-check`
    LlamacppBench {
        /// Size of the model: tiny, 100m, 500m or 1b
        #[arg(long, default_value = "100m")]
        params: String,
        /// Type of its matrices in GGUF
        #[arg(long, default_value = "q4_k")]
        gguf: String,
        /// Rounds, of which the medians are shown
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
    /// Check that the candle engine builds for NVIDIA GPUs, and test its kernels on the host; needs no GPU, and
    /// takes a quarter of an hour the first time
    CudaCheck,
    /// Test the kernels for GPUs on the host: their own source, emulated; needs a C++ compiler
    KernelTest,
    /// Test and measure the candle engine on an NVIDIA GPU; fails where there is none
    GpuTest {
        /// The GPU's number in nvidia-smi
        #[arg(long, default_value_t = 0)]
        gpu: usize,
        /// What the GPU's memory gives at most, in GB/s, where the GPU is not a known one
        #[arg(long, value_name = "GB/S")]
        memory_bandwidth: Option<f64>,
        /// Tests alone, no figures
        #[arg(long)]
        without_bench: bool,
    },
    /// Install protoc, etcd, nats-server and a C++ compiler with apt-get, where they are missing
    InstallPrograms,
    /// Check licences, banned crates and sources with cargo-deny
    Deny {
        /// Also check for security advisories; fetches the advisory database from GitHub
        #[arg(long)]
        advisories: bool,
    },
}

fn main() -> ExitCode {
    match run(&Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: &Task) -> anyhow::Result<()> {
    let repo = Repo::locate()?;
    match task {
        Task::Test { advisories } => {
            test_command::run(&repo, deny::Advisories::from_flag(*advisories))
        }
        Task::MakeTinyChat { check } => {
            tiny_chat::run(&repo, if *check { Mode::Check } else { Mode::Write })
        }
        Task::TrainTinyChat { args } => train_tiny_chat::run(&repo, args),
        Task::Readme { check } => readme::run(
            &repo,
            if *check {
                readme::Mode::Check
            } else {
                readme::Mode::Write
            },
        ),
        Task::AuthorCrate { time } => {
            author_crate::check_package_count(&repo)?;
            if *time {
                author_crate::time_cold_build(&repo)
            } else {
                Ok(())
            }
        }
        Task::OpenaiClientTest => openai_client::run(&repo),
        Task::WireClientTest => wire_client::run(&repo),
        Task::PythonPackageTest => python_package::run(&repo),
        Task::PythonKitTest => python_kit::run(&repo),
        Task::LlamacppCheck => llamacpp_check::run(&repo),
        Task::LlamacppBench {
            params,
            gguf,
            rounds,
        } => {
            let rounds = *rounds;
            let comparison = llamacpp_bench::Comparison {
                params,
                gguf,
                rounds,
            };
            llamacpp_bench::run(&repo, &comparison)
        }
        Task::CudaCheck => cuda_check::run(&repo),
        Task::KernelTest => cuda_check::test_kernels(&repo),
        Task::GpuTest {
            gpu,
            memory_bandwidth,
            without_bench,
        } => {
            let test = gpu_test::GpuTest {
                gpu: *gpu,
                memory_bandwidth: *memory_bandwidth,
                without_bench: *without_bench,
            };
            gpu_test::run(&repo, &test)
        }
        Task::InstallPrograms => system_packages::ensure_programs(),
        Task::Deny { advisories } => deny::run(&repo, deny::Advisories::from_flag(*advisories)),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
