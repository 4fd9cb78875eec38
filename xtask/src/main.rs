//! Tasks of this repository: `cargo xtask --help` lists them.
//!
//! Not part of what Genset ships: no crate of ours depends on this one, and it depends on none of ours. People call it
//! through the alias in `.cargo/config.toml`; CI calls `cargo xtask test` and nothing else.

#![expect(
    clippy::print_stderr,
    reason = "a task for people at a terminal says there how far it is"
)]

mod arm_test;
mod artifacts;
mod attack;
mod author_crate;
mod browser;
mod chaos;
mod crate_graph;
mod cuda_check;
mod deny;
mod devtools;
mod disk_space;
mod engines_test;
mod files;
mod fuzz;
mod golden_questions;
mod gpu_test;
mod http;
mod llamacpp_bench;
mod llamacpp_check;
mod mutants;
mod node;
mod openai_client;
mod package;
mod process;
mod python;
mod python_kit;
mod python_package;
mod quick;
mod readme;
mod real_model;
mod repo;
mod rust_tests;
mod served;
mod servers_test;
mod side_by_side;
mod soak;
mod stopwatch;
mod system_packages;
mod test_command;
mod tools;
mod wheel;
mod wire_client;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::repo::Repo;

/// Tasks of the Genset repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run everything CI runs, or some steps of it, in CI's order, and stop at the first failure
    ///
    /// Format, lints, the Python package, tests, docs, licences, the engine author's package count, the
    /// Python OpenAI client and a Python client of the wire protocol. From the tests on, steps run side by side, each with a
    /// log under target/test-logs. What a step needs and the machine lacks is
    /// installed: under target/ (cargo-deny, Python venvs, packages of npm), or with apt-get (etcd, nats-server, a C++
    /// compiler, Chromium and Node.js; as root, or through a sudo that asks no password).
    Test {
        /// The steps to run; all of them where none is named
        #[arg(value_name = "STEP", value_parser = test_command::names())]
        steps: Vec<String>,
        /// What to run before a commit: the format, and lints and unit tests of the crates that changed
        #[arg(long, conflicts_with_all = ["steps", "advisories"])]
        quick: bool,
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
    /// Takes some 50 minutes on two cores. Fails if a question of golden.json is answered otherwise.
    /// `-- --help` lists what can be chosen; `-- --check` trains nothing and asks the weights that are there.
    TrainTinyChat {
        /// Arguments of the trainer
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Make a model with random weights, of the size of a real one: `-- --params 100m --out DIR [--gguf q8_0]`
    MakeModel {
        /// Arguments of the program
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
    /// Build the wheel of the Python package, with the native module and the genset binary, into dist/
    Wheel {
        /// Pack what the tests built, into target/wheels
        #[arg(long)]
        debug: bool,
        /// The profile of cargo's to build with
        #[arg(
            long,
            value_name = "NAME",
            default_value = "dist",
            conflicts_with = "debug"
        )]
        profile: String,
    },
    /// Build a Debian package and a tarball of the binary, with units, completions, man pages and licences, into dist/
    Package {
        /// Pack what the tests built, into target/packages
        #[arg(long)]
        debug: bool,
    },
    /// Run a real llama.cpp behind the real binary; builds it from source, which takes long, unless
    /// `GENSET_LLAMACPP_PYTHON` names an interpreter that has it
    LlamacppCheck,
    /// Run real vLLM, llama-server and SGLang on the CPU behind a built genset binary: what they answer, how they end, their
    /// adapters, chats with images, and the conformance kit
    ///
    /// They are installed in target/servers, once a version: llama-server is built, the others are large. Needs no GPU. It prints
    /// a table for each, and fails if a row of it does.
    ServersTest(servers_test::ServersTest),
    /// Run the conformance kit on engines that are built apart, those around mistral.rs and llama.cpp, with small models
    ///
    /// Each is a workspace of its own under engines/, and is built in target/engines: hundreds of packages, or llama.cpp, which take
    /// long the first time.
    EnginesTest {
        /// The engines; all without one
        #[arg(value_enum)]
        engines: Vec<engines_test::EngineName>,
    },
    /// Compare a real, trained model with what transformers computes of it; installs the model's package (253 MB)
    RealModelTest,
    /// Measure the candle engine beside llama.cpp, on the same random GGUF file, in turns; llama.cpp as for
    /// `llamacpp-check`
    LlamacppBench {
        /// Measure the widths of real models in eight types each, and Gemma 3 270M, in place of one model; 9 GB under
        /// target/bench, a package of 253 MB, and ten minutes a round
        #[arg(long, conflicts_with_all = ["params", "gguf"])]
        suite: bool,
        /// Models of the suite: those whose row's name has this part, such as w896 or q4_k_m
        #[arg(long, value_name = "PART", requires = "suite")]
        only: Option<String>,
        /// Instructions that both may use: auto for the widest, or avx2, for which another llama.cpp is built
        #[arg(long, value_enum, default_value_t)]
        isa: llamacpp_check::Instructions,
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
    /// Test the candle engine on 64-bit ARM, in QEMU; takes a quarter of an hour the first time
    ///
    /// The model's tests, with i8mm, with the dot product and with neither, and tiny-chat's golden questions. A cross compiler and QEMU are
    /// installed with apt-get, and the target's standard library with rustup, where they are missing.
    ArmTest,
    /// Test and measure the candle engine on an NVIDIA GPU; fails where there is none
    GpuTest(gpu_test::GpuTest),
    /// Attack a built genset binary in ways that are known, and show what each attack costs it and other clients
    ///
    /// Every attack has servers of its own, on loopback. It fails if one of them broke a promise: memory beyond 8 times
    /// what was sent and 16 MB, a `/live` that takes long, a stream of another client that does not end well.
    Attack(attack::AttackOptions),
    /// Fuzz every parser that reads what is not trusted, each for a while; needs a C++ compiler
    ///
    /// It fails if an input makes a target panic, take 3 GB, or take 20 seconds, and says where that input lies.
    Fuzz(fuzz::FuzzOptions),
    /// Change an engine's code in one place after another, and say which changes the conformance kit does not see
    ///
    /// cargo-mutants makes the changes, in a copy of the tree, and the kit is the only test. Whole, it takes many hours;
    /// `-- --list` counts the changes, and `-- --shard 0/80 --sharding round-robin` takes every 80th.
    Mutants {
        /// Packages to change; all four without one
        #[arg(value_name = "PACKAGE", value_parser = mutants::names())]
        packages: Vec<String>,
        /// Arguments of cargo-mutants
        #[arg(last = true)]
        args: Vec<OsString>,
    },
    /// Send a built genset binary many mixed requests, leave a third of them in the middle, and see whether its memory
    /// stays flat after the first tenth
    Soak(soak::SoakOptions),
    /// Send fleets of real processes many requests while their workers are killed, frozen, drained, cut off, slowed and lose discovery; no answer may be lost
    ///
    /// It needs etcd and nats-server for two of the three fleets. It prints the seed.
    Chaos(chaos::ChaosOptions),
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
        Task::Test { quick: true, .. } => quick::run(&repo),
        Task::Test {
            steps, advisories, ..
        } => test_command::run(&repo, steps, deny::Advisories::from_flag(*advisories)),
        Task::MakeTinyChat { check } => devtools::make_tiny_chat(&repo, *check),
        Task::TrainTinyChat { args } => devtools::train_tiny_chat(&repo, args),
        Task::MakeModel { args } => devtools::make_model(&repo, args),
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
        Task::Wheel { debug, profile } => {
            let wheel = if *debug {
                wheel::of_the_tests(&repo)?
            } else {
                wheel::for_older_systems(&repo, profile)?
            };
            eprintln!("{}", wheel.display());
            Ok(())
        }
        Task::Package { debug } => {
            let profile = if *debug {
                package::Profile::Debug
            } else {
                package::Profile::Dist
            };
            let made = package::build(&repo, profile)?;
            eprintln!("{}\n{}", made.deb.display(), made.tarball.display());
            Ok(())
        }
        Task::LlamacppCheck => llamacpp_check::run(&repo),
        Task::ServersTest(test) => servers_test::run(&repo, test),
        Task::EnginesTest { engines } => engines_test::run(&repo, engines),
        Task::RealModelTest => real_model::run(&repo),
        Task::LlamacppBench {
            suite,
            only,
            isa,
            params,
            gguf,
            rounds,
        } => {
            let (isa, rounds) = (*isa, *rounds);
            if *suite {
                return llamacpp_bench::run_suite(&repo, isa, only.as_deref(), rounds);
            }
            let comparison = llamacpp_bench::Comparison {
                params,
                gguf,
                isa,
                rounds,
            };
            llamacpp_bench::run(&repo, &comparison)
        }
        Task::CudaCheck => cuda_check::run(&repo),
        Task::ArmTest => arm_test::run(&repo),
        Task::GpuTest(test) => gpu_test::run(&repo, test),
        Task::Attack(options) => attack::run(&repo, options),
        Task::Fuzz(options) => fuzz::run(&repo, options),
        Task::Mutants { packages, args } => mutants::run(&repo, packages, args),
        Task::Soak(options) => soak::run(&repo, options),
        Task::Chaos(options) => chaos::run(&repo, options),
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::Cli;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn chaos_takes_a_fleet_that_there_is() {
        let parsed = |fleet| Cli::try_parse_from(["cargo xtask", "chaos", "--fleet", fleet]);
        assert!(parsed("file_and_tcp").is_ok());
        assert!(parsed("file_and_tpc").is_err());
    }
}
