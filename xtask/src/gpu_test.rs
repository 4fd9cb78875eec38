//! `cargo xtask gpu-test`: the checks that need an NVIDIA GPU. Not part of CI, and never skipped silently: without a GPU it fails
//! and says what it looked for.
//!
//! Runs, in order: the engine's unit tests with its kernels on the GPU; logits against the reference in each number type; the
//! conformance kit; tiny-chat's golden questions through the binary; figures of a random model with a billion weights, beside
//! those of `transformers` if Python has it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::Value;

use crate::artifacts::Artifacts;
use crate::golden_questions;
use crate::process::{output, run as run_command, succeeds};
use crate::repo::Repo;

/// Tells tests which device to use.
const DEVICE_VARIABLE: &str = "GENSET_TEST_DEVICE";
/// In bf16, a resumed answer differs so much from an uninterrupted one that samples differ.
const KIT_DTYPE: (&str, &str) = ("GENSET_TEST_DTYPE", "f16");
/// Each check starts engines, and the kit limits the time of a start.
const KIT_THREADS: usize = 4;
/// Starts an engine with every kind of kernel, alone. The driver translates a kernel on first use and caches the result; all
/// engines of the process wait for that, longer than the kit allows.
const FIRST_CHECK: &str = "with_drafts::CC01";
/// Names an interpreter with torch and transformers, if `python3` lacks them.
const PYTHON_VARIABLE: &str = "GENSET_TORCH_PYTHON";
/// Numbers GPUs as `nvidia-smi` does.
const ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
/// Builds programs in a third of the time; what a GPU computes takes just as long.
const BUILD: [(&str, &str); 2] = [
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
];

/// Sequences that decode concurrently in the figures.
const MANY: u64 = 64;
const CONTEXT_TOKENS: &str = "128";
const NEW_TOKENS: &str = "256";
const PREFILL_TOKENS: &str = "512";

/// Peak memory bandwidth in GB/s by a part of the GPU's name. The first match counts.
const BANDWIDTHS: [(&str, f64); 12] = [
    ("B200", 8000.0),
    ("GH200", 4000.0),
    ("H200", 4800.0),
    ("H100 PCIe", 2000.0),
    ("H100 NVL", 3900.0),
    ("H100", 3350.0),
    ("A100-SXM4-80GB", 2039.0),
    ("A100 80GB", 1935.0),
    ("A100", 1555.0),
    ("L40S", 864.0),
    ("L4", 300.0),
    ("RTX 4090", 1008.0),
];

// No doc comment: it would replace the help of the task.
#[derive(Debug, Args)]
pub(crate) struct GpuTest {
    /// The GPU's number in nvidia-smi
    #[arg(long, default_value_t = 0)]
    pub(crate) gpu: usize,
    /// What the GPU's memory gives at most, in GB/s, where the GPU is not a known one
    #[arg(long, value_name = "GB/S")]
    pub(crate) memory_bandwidth: Option<f64>,
    /// Tests alone, no figures
    #[arg(long)]
    pub(crate) without_bench: bool,
    /// Build the programs into this folder and run nothing, for a machine that has the GPU and no Rust
    #[arg(long, value_name = "FOLDER", conflicts_with = "programs")]
    pub(crate) build_into: Option<PathBuf>,
    /// The compute capability that `--build-into` builds for, without its point
    #[arg(
        long,
        value_name = "NUMBER",
        default_value = "90",
        requires = "build_into"
    )]
    pub(crate) compute_capability: String,
    /// Run the programs that `--build-into` left in this folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) programs: Option<PathBuf>,
}

/// Builds the programs of the test into a folder, for a GPU of this compute capability, such as 90. Needs no GPU.
///
/// # Errors
/// When there is no toolkit, or something does not build.
fn build(repo: &Repo, folder: &Path, compute_cap: &str) -> anyhow::Result<()> {
    let toolkit = Toolkit::to_build(repo, compute_cap.to_owned())?;
    Programs::build(repo, &toolkit, folder)?;
    eprintln!(
        "Built into {}. Where the GPU is, in a copy of this repository:\n    cargo xtask gpu-test --programs {}",
        folder.display(),
        folder.display()
    );
    Ok(())
}

/// Runs all parts, stopping at the first failure; or only builds, with `--build-into`.
///
/// # Errors
/// When there is no GPU, something does not build, or a test fails.
pub(crate) fn run(repo: &Repo, test: &GpuTest) -> anyhow::Result<()> {
    if let Some(folder) = &test.build_into {
        return build(repo, folder, &test.compute_capability);
    }
    let gpu = Gpu::find(test.gpu)?;
    eprintln!(
        "{}, compute capability {}",
        gpu.name, gpu.compute_capability
    );
    let compute_cap = gpu.compute_capability.replace('.', "");
    let (toolkit, programs) = match &test.programs {
        Some(folder) => {
            let root = repo.root().to_owned();
            let toolkit = Toolkit::new(root, String::new(), compute_cap);
            (toolkit, Programs::in_folder(&folder.canonicalize()?))
        }
        None => {
            let toolkit = Toolkit::to_build(repo, compute_cap)?;
            let folder = repo.target().join("gpu-test");
            let programs = Programs::build(repo, &toolkit, &folder)?;
            (toolkit, programs)
        }
    };
    let toolkit = toolkit.with_libraries()?;
    let device = format!("cuda:{}", test.gpu);
    let threads = format!("--test-threads={KIT_THREADS}");
    let runs: [(&Path, &[&str]); 3] = [
        (&programs.tests, &[]),
        (&programs.kit, &["--exact", FIRST_CHECK]),
        (&programs.kit, &[&threads]),
    ];
    for (tests, arguments) in runs {
        let mut command = toolkit.command(tests);
        command
            .args(arguments)
            .current_dir(repo.root().join("engines/candle"))
            .env(DEVICE_VARIABLE, &device)
            .env(KIT_DTYPE.0, KIT_DTYPE.1);
        run_command(&mut command)?;
    }
    // On a GPU, an answer may depend on other sequences in its batch.
    let options = ["--device", &device, "--batch-concurrency", "1"];
    golden_questions::ask(repo, toolkit.command(&programs.genset), &options)?;
    if test.without_bench {
        return Ok(());
    }
    let bandwidth = test.memory_bandwidth.or_else(|| gpu.bandwidth());
    measure(repo, &toolkit, &programs, &device, bandwidth)
}

/// The programs to run, one file each.
#[derive(Debug)]
struct Programs {
    /// The engine's unit tests.
    tests: PathBuf,
    kit: PathBuf,
    genset: PathBuf,
    make_model: PathBuf,
}

impl Programs {
    fn in_folder(folder: &Path) -> Self {
        Self {
            tests: folder.join("candle-tests"),
            kit: folder.join("candle-kit"),
            genset: folder.join("genset"),
            make_model: folder.join("make-model"),
        }
    }

    /// Builds them with one set of options, so that candle's kernels are compiled once: nvcc needs minutes for them.
    fn build(repo: &Repo, toolkit: &Toolkit, folder: &Path) -> anyhow::Result<Self> {
        let programs = Self::in_folder(folder);
        fs::create_dir_all(folder)?;
        let mut tests = toolkit.cargo("test");
        tests.args(["--release", "--no-run", "--package", "genset-engine-candle"]);
        tests.args(["--features", "genset-engine-candle/cuda"]);
        tests.args(["--lib", "--test", "conformance"]);
        let built = Artifacts::of(&mut tests)?;
        for (name, to) in [
            ("genset-engine-candle", &programs.tests),
            ("genset-engine-candle tests/conformance", &programs.kit),
        ] {
            let program = built.tests().find(|program| program.name == name);
            let program = program.with_context(|| format!("cargo built no tests of {name}"))?;
            fs::copy(program.command.get_program(), to)?;
        }
        let mut binaries = toolkit.cargo("build");
        binaries.args(["--release", "--package", "genset"]);
        binaries.args(["--package", "genset-devtools"]);
        run_command(binaries.args(["--features", "genset/cuda"]))?;
        let release = repo.target().join("release");
        fs::copy(release.join("genset"), &programs.genset)?;
        fs::copy(release.join("make-model"), &programs.make_model)?;
        Ok(programs)
    }
}

/// What `nvidia-smi` reports about a GPU.
#[derive(Debug)]
struct Gpu {
    name: String,
    /// Such as `9.0`.
    compute_capability: String,
}

impl Gpu {
    fn find(number: usize) -> anyhow::Result<Self> {
        let mut list = Command::new("nvidia-smi");
        list.args(["--query-gpu=name,compute_cap", "--format=csv,noheader"]);
        let listed = list.stderr(Stdio::null()).output();
        let said = match &listed {
            Err(error) => format!("`nvidia-smi` cannot be run ({error})"),
            Ok(output) if !output.status.success() => {
                format!("`nvidia-smi` failed ({})", output.status)
            }
            Ok(output) => {
                let lines = String::from_utf8_lossy(&output.stdout).into_owned();
                match lines.lines().nth(number).and_then(Self::parse) {
                    Some(gpu) => return Ok(gpu),
                    None => format!("`nvidia-smi` lists no GPU {number}"),
                }
            }
        };
        let file = Path::new("/dev/nvidia0");
        let is = if file.exists() { "is" } else { "is not" };
        bail!(
            "no NVIDIA GPU to test on: {said}, and {} {is} there. This task needs a GPU with its driver; \
             `cargo xtask cuda-check` does what can be done without one",
            file.display()
        );
    }

    /// Parses a line of `nvidia-smi`, such as `NVIDIA H200, 9.0`.
    fn parse(line: &str) -> Option<Self> {
        let (name, compute_capability) = line.rsplit_once(',')?;
        Some(Self {
            name: name.trim().to_owned(),
            compute_capability: compute_capability.trim().to_owned(),
        })
    }

    fn bandwidth(&self) -> Option<f64> {
        let known = BANDWIDTHS.iter().find(|(name, _)| self.name.contains(name));
        known.map(|(_, bandwidth)| *bandwidth)
    }
}

/// Where `nvcc` and the CUDA libraries come from.
#[derive(Debug)]
struct Toolkit {
    root: PathBuf,
    /// The shell commands that set up the environment.
    environment: String,
    compute_cap: String,
}

impl Toolkit {
    fn new(root: PathBuf, environment: String, compute_cap: String) -> Self {
        Self {
            root,
            environment,
            compute_cap,
        }
    }

    /// The machine's toolkit, or one assembled from wheels.
    fn to_build(repo: &Repo, compute_cap: String) -> anyhow::Result<Self> {
        let root = repo.root().to_owned();
        if succeeds(Command::new("nvcc").arg("--version")) {
            return Ok(Self::new(root, String::new(), compute_cap));
        }
        eprintln!("there is no nvcc on the PATH: building with a toolkit from NVIDIA's wheels");
        let mut script = Command::new(root.join("xtask/cuda-toolchain.sh"));
        script
            .arg(repo.target().join("cuda"))
            .env("CUDA_COMPUTE_CAP", &compute_cap);
        let environment = output(&mut script)?;
        Ok(Self::new(root, environment, compute_cap))
    }

    /// Adds the CUDA libraries of Python's packages, if the machine has none installed.
    fn with_libraries(mut self) -> anyhow::Result<Self> {
        if !has_libraries() {
            let libraries = libraries_of_wheels()?;
            self.environment.push_str(&format!(
                "export LD_LIBRARY_PATH='{libraries}'\"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n"
            ));
        }
        Ok(self)
    }

    fn cargo(&self, subcommand: &str) -> Command {
        let mut command = self.command(Path::new("cargo"));
        command.arg(subcommand);
        for (name, value) in BUILD {
            command.env(name, value);
        }
        command
    }

    /// A command for a program that finds the toolkit and its libraries.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("bash");
        let script = format!("{}exec \"$0\" \"$@\"", self.environment);
        command.arg("-c").arg(script).arg(program);
        command
            .current_dir(&self.root)
            .env("CUDA_COMPUTE_CAP", &self.compute_cap)
            .env(ORDER.0, ORDER.1);
        command
    }
}

/// Whether the loader finds the CUDA libraries by itself.
fn has_libraries() -> bool {
    let known = Command::new("ldconfig").arg("-p").output();
    known.is_ok_and(|known| String::from_utf8_lossy(&known.stdout).contains("libcublas.so.13"))
}

/// The folder with `libcublas.so.13` and the other libraries that a build with trampolines opens at run time.
fn libraries_of_wheels() -> anyhow::Result<String> {
    const FIND: &str = "import glob, site, sysconfig\n\
        folders = site.getsitepackages() + [site.getusersitepackages(), sysconfig.get_path('purelib')]\n\
        print(*[found for folder in folders for found in glob.glob(folder + '/nvidia/cu13/lib')][:1])";
    let found = output(Command::new(python()).args(["-c", FIND]))?;
    let found = found.trim();
    ensure!(
        !found.is_empty(),
        "no CUDA libraries: there is neither a CUDA toolkit nor, among Python's packages, a folder nvidia/cu13/lib; \
         `python3 -m pip install nvidia-cublas nvidia-curand nvidia-cuda-nvrtc` makes one, and so does a PyTorch for CUDA 13"
    );
    Ok(found.to_owned())
}

fn python() -> String {
    std::env::var(PYTHON_VARIABLE).unwrap_or_else(|_| "python3".to_owned())
}

/// Figures of a random model in bf16, and those of `transformers` for the same files.
fn measure(
    repo: &Repo,
    toolkit: &Toolkit,
    programs: &Programs,
    device: &str,
    bandwidth: Option<f64>,
) -> anyhow::Result<()> {
    let model = repo.target().join("bench/1b");
    if !model.join("model.safetensors").exists() {
        let mut make = Command::new(&programs.make_model);
        run_command(make.args(["--params", "1b", "--out"]).arg(&model))?;
    }
    let mut bench = toolkit.command(&programs.genset);
    bench
        .args(["bench", "engine"])
        .arg(&model)
        .args(["--device", device, "--json"]);
    bench.args([
        "--sequences",
        &format!("1,{MANY}"),
        "--context-tokens",
        CONTEXT_TOKENS,
    ]);
    bench.args([
        "--new-tokens",
        NEW_TOKENS,
        "--prefill-tokens",
        PREFILL_TOKENS,
    ]);
    let ours: Value = serde_json::from_str(&output(&mut bench)?)?;
    let ours = Figures {
        one: decode(&ours, 1)?,
        many: decode(&ours, MANY)?,
        prefill: ours["prefill_tokens_per_s"]
            .as_f64()
            .context("no figure of prefill")?,
    };
    let theirs = measure_transformers(repo, &model, device)?;
    let bytes = bytes_a_token(&model)?;
    eprint!("{}", report(&ours, theirs.as_ref(), bytes, bandwidth));
    Ok(())
}

/// Tokens per second.
#[derive(Debug)]
struct Figures {
    /// One sequence decodes.
    one: f64,
    /// [`MANY`] sequences decode together.
    many: f64,
    prefill: f64,
}

fn decode(measured: &Value, sequences: u64) -> anyhow::Result<f64> {
    let all = measured["decode"].as_array();
    let found = all.and_then(|all| all.iter().find(|one| one["sequences"] == sequences));
    found
        .and_then(|one| one["tokens_per_s"].as_f64())
        .with_context(|| format!("no figure of {sequences} sequences in {measured}"))
}

/// Returns `None`, and says so, if Python has no torch with a GPU.
fn measure_transformers(
    repo: &Repo,
    model: &Path,
    device: &str,
) -> anyhow::Result<Option<Figures>> {
    const HAS: &str = "import torch, transformers; assert torch.cuda.is_available()";
    let python = python();
    if !succeeds(Command::new(&python).args(["-c", HAS])) {
        eprintln!(
            "not compared: {python} has no transformers with a torch that sees the GPU; {PYTHON_VARIABLE} names another"
        );
        return Ok(None);
    }
    let mut bench = Command::new(&python);
    bench.env(ORDER.0, ORDER.1);
    bench
        .arg(
            repo.root()
                .join("engines/candle/benches/transformers_gpu.py"),
        )
        .arg(model);
    bench.args([
        device,
        &MANY.to_string(),
        CONTEXT_TOKENS,
        NEW_TOKENS,
        PREFILL_TOKENS,
    ]);
    let measured: Value = serde_json::from_str(&output(&mut bench)?)?;
    let figure = |name: &str| {
        measured[name]
            .as_f64()
            .with_context(|| format!("no figure {name}"))
    };
    Ok(Some(Figures {
        one: figure("one")?,
        many: figure("many")?,
        prefill: figure("prefill")?,
    }))
}

/// The bytes of weights that one decode row reads: all except an embedding that is not also the output matrix.
fn bytes_a_token(model: &Path) -> anyhow::Result<f64> {
    let config: Value = serde_json::from_str(&fs::read_to_string(model.join("config.json"))?)?;
    let size = |name: &str| {
        config[name]
            .as_f64()
            .with_context(|| format!("no {name} in config.json"))
    };
    let embedding = if config["tie_word_embeddings"].as_bool() == Some(true) {
        0.0
    } else {
        size("vocab_size")? * size("hidden_size")? * 2.0
    };
    #[expect(clippy::cast_precision_loss, reason = "a file's size, for a figure")]
    let file = fs::metadata(model.join("model.safetensors"))?.len() as f64;
    Ok(file - embedding)
}

fn report(ours: &Figures, theirs: Option<&Figures>, bytes: f64, bandwidth: Option<f64>) -> String {
    let line = |what: &str, of: fn(&Figures) -> f64| {
        let beside = theirs.map_or(String::new(), |theirs| {
            format!(
                "; transformers {:.0}, {:.2} times",
                of(theirs),
                of(ours) / of(theirs)
            )
        });
        format!("  {what:<22} {:.0} tokens/s{beside}\n", of(ours))
    };
    let read = bytes * ours.one / 1e9;
    let share = bandwidth.map_or(
        "of an unknown limit (--memory-bandwidth)".to_owned(),
        |limit| {
            format!(
                "{:.0} % of {limit:.0} GB/s (aim: 70 %)",
                100.0 * read / limit
            )
        },
    );
    [
        line("decode, 1 sequence", |figures| figures.one),
        format!("  {:<22} {read:.0} GB/s of weights, {share}\n", ""),
        line(&format!("decode, {MANY} sequences"), |figures| figures.many),
        format!(
            "  {:<22} {:.1} times one (aim: 20)\n",
            "",
            ours.many / ours.one
        ),
        line(&format!("prefill, {PREFILL_TOKENS}"), |figures| {
            figures.prefill
        }),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_nvidia_smi_is_read() {
        let gpu = Gpu::parse("NVIDIA H200, 9.0").unwrap();
        assert_eq!(
            (gpu.name.as_str(), gpu.compute_capability.as_str()),
            ("NVIDIA H200", "9.0")
        );
        assert_eq!(gpu.bandwidth(), Some(4800.0));
        assert!(Gpu::parse("No devices were found").is_none());
        assert_eq!(
            Gpu::parse("NVIDIA GH200 480GB, 9.0").unwrap().bandwidth(),
            Some(4000.0)
        );
        assert_eq!(Gpu::parse("Tesla T4, 7.5").unwrap().bandwidth(), None);
    }

    #[test]
    fn the_report_names_shares_ratios_and_aims() {
        let ours = Figures {
            one: 1000.0,
            many: 25_000.0,
            prefill: 90_000.0,
        };
        let theirs = Figures {
            one: 50.0,
            many: 2000.0,
            prefill: 45_000.0,
        };
        let text = report(&ours, Some(&theirs), 2.4e9, Some(4800.0));
        assert!(text.contains("50 % of 4800 GB/s (aim: 70 %)"), "{text}");
        assert!(text.contains("25.0 times one"), "{text}");
        assert!(text.contains("transformers 50, 20.00 times"), "{text}");
        assert!(report(&ours, None, 2.4e9, None).contains("unknown limit"));
    }
}
