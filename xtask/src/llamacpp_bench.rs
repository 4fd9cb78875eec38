//! `cargo xtask llamacpp-bench`: compares the candle engine with llama.cpp on the same GGUF file, in turns, in one run.
//!
//! `genset bench engine` measures ours and `engines/candle/benches/llamacpp.py` measures llama.cpp, both in release builds with
//! as many threads as the machine has. Rates are medians over the rounds; their ratio is the result. Runs one model or a whole
//! [`suite`].

mod suite;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::Context as _;
use serde_json::Value;

use crate::devtools;
use crate::llamacpp_check::{Instructions, python_with_llamacpp};
use crate::process::{cargo, output, run as run_command};
use crate::repo::Repo;

pub(crate) use suite::run as run_suite;

const SEQUENCES: [u32; 4] = [1, 4, 16, 64];
const CONTEXT_TOKENS: u32 = 128;
const NEW_TOKENS: u32 = 128;
const PREFILL_TOKENS: u32 = 512;

/// What to compare.
#[derive(Debug)]
pub(crate) struct Comparison<'a> {
    /// Size of the random model, as `cargo xtask make-model` takes it.
    pub(crate) params: &'a str,
    /// Type of its matrices in GGUF.
    pub(crate) gguf: &'a str,
    /// The instructions that both may use.
    pub(crate) isa: Instructions,
    pub(crate) rounds: u32,
}

/// Rates of one round, or their medians, in tokens a second: decode at each number of sequences, then prefill.
type Rates = Vec<f64>;

/// Builds both, makes the model if it is missing, measures, and prints a table.
///
/// # Errors
/// When llama.cpp cannot be installed, something does not build, or either engine cannot load the model.
pub(crate) fn run(repo: &Repo, comparison: &Comparison<'_>) -> anyhow::Result<()> {
    let engines = Engines::build(repo, comparison.isa, &SEQUENCES, NEW_TOKENS)?;
    let model = model(repo, comparison)?;
    let (ours, theirs) = engines.measure(&model, comparison.rounds)?;
    let table = table(comparison, &engines.threads, &ours, &theirs);
    std::io::stdout().write_all(table.as_bytes())?;
    Ok(())
}

/// Both engines, built, and the settings of the measurement.
struct Engines {
    genset: PathBuf,
    /// The interpreter with llama.cpp.
    python: PathBuf,
    /// The script that measures llama.cpp.
    script: PathBuf,
    instructions: Instructions,
    threads: String,
    /// Numbers of sequences that decode concurrently, separated by commas.
    sequences: String,
    new_tokens: String,
}

impl Engines {
    fn build(
        repo: &Repo,
        instructions: Instructions,
        sequences: &[u32],
        new_tokens: u32,
    ) -> anyhow::Result<Self> {
        let python = python_with_llamacpp(repo, instructions)?;
        run_command(cargo(repo.root()).args(["build", "--release", "-p", "genset"]))?;
        let sequences: Vec<_> = sequences.iter().map(u32::to_string).collect();
        Ok(Self {
            genset: repo.target().join("release/genset"),
            python,
            script: repo.root().join("engines/candle/benches/llamacpp.py"),
            instructions,
            threads: available_parallelism().map_or(1, usize::from).to_string(),
            sequences: sequences.join(","),
            new_tokens: new_tokens.to_string(),
        })
    }

    /// Returns the medians of our engine and of llama.cpp, measured in turns.
    fn measure(&self, model: &Path, rounds: u32) -> anyhow::Result<(Rates, Rates)> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 1..=rounds {
            eprintln!("{}: round {round} of {rounds}", model.display());
            ours.push(self.measure_genset(model)?);
            theirs.push(self.measure_llamacpp(model)?);
        }
        Ok((medians(&ours), medians(&theirs)))
    }

    fn measure_genset(&self, model: &Path) -> anyhow::Result<Rates> {
        let mut bench = Command::new(&self.genset);
        bench.args(["bench", "engine", "--json", "--breakdown=false"]);
        bench.args(["--repeats", "1"]);
        bench.args(["--sequences", &self.sequences]);
        bench.args(["--context-tokens", &CONTEXT_TOKENS.to_string()]);
        bench.args(["--new-tokens", &self.new_tokens]);
        bench.args(["--prefill-tokens", &PREFILL_TOKENS.to_string()]);
        bench.args(["--isa", self.instructions.isa()]);
        bench.args(["--threads", &self.threads]).arg(model);
        let figures = json(&mut bench)?;
        let decode = figures["decode"].as_array().context("no decode figures")?;
        rates(decode.iter().map(|one| &one["tokens_per_s"]), &figures)
    }

    fn measure_llamacpp(&self, model: &Path) -> anyhow::Result<Rates> {
        let mut bench = Command::new(&self.python);
        bench.arg(&self.script).arg(model);
        bench.args([&self.threads, &self.sequences]);
        let (context, prefill) = (CONTEXT_TOKENS.to_string(), PREFILL_TOKENS.to_string());
        bench.args([&context, &self.new_tokens, &prefill]);
        let figures = json(&mut bench)?;
        let decode = figures["decode"].as_array().context("no decode figures")?;
        rates(decode.iter(), &figures)
    }
}

fn model(repo: &Repo, comparison: &Comparison<'_>) -> anyhow::Result<PathBuf> {
    let name = format!("{}-{}", comparison.params, comparison.gguf);
    let folder = repo.target().join("bench").join(name);
    let gguf = folder.join("model.gguf");
    if !gguf.exists() {
        devtools::make_model_in(repo, &folder, comparison.params, Some(comparison.gguf))?;
    }
    Ok(gguf)
}

fn json(command: &mut Command) -> anyhow::Result<Value> {
    let text = output(command)?;
    serde_json::from_str(&text).with_context(|| format!("{command:?} printed no JSON: {text}"))
}

fn rates<'a>(decode: impl Iterator<Item = &'a Value>, figures: &'a Value) -> anyhow::Result<Rates> {
    let all = decode.chain([&figures["prefill_tokens_per_s"]]);
    all.map(|rate| rate.as_f64().context("a rate that is no number"))
        .collect()
}

fn medians(rounds: &[Rates]) -> Rates {
    let columns = rounds.first().map_or(0, Vec::len);
    let median = |column: usize| {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[column]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (0..columns).map(median).collect()
}

fn table(comparison: &Comparison<'_>, threads: &str, ours: &Rates, theirs: &Rates) -> String {
    let mut text = format!(
        "| {} {}, {threads} threads, tokens/s | genset | llama.cpp | ratio |\n|---|---|---|---|\n",
        comparison.params, comparison.gguf
    );
    let decode = SEQUENCES.map(|count| format!("decode, {count} at once"));
    let names = decode
        .into_iter()
        .chain([format!("prefill, {PREFILL_TOKENS} tokens")]);
    for ((name, ours), theirs) in names.zip(ours).zip(theirs) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {name} | {ours:.0} | {theirs:.0} | {:.2} |",
            ours / theirs
        );
    }
    if let (Some(one), Some(sixteen)) = (ours.first(), ours.get(2)) {
        let _ = writeln!(
            text,
            "\n16 at once give {:.1} times the tokens of one.",
            sixteen / one
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_medians_and_their_ratio() {
        let comparison = Comparison {
            params: "100m",
            gguf: "q4_k",
            isa: Instructions::Widest,
            rounds: 3,
        };
        let ours = medians(&[
            vec![9.0, 1.0, 30.0, 1.0, 5.0],
            vec![10.0, 1.0, 40.0, 1.0, 6.0],
            vec![99.0, 1.0, 90.0, 1.0, 7.0],
        ]);
        assert_eq!(ours, [10.0, 1.0, 40.0, 1.0, 6.0]);
        let table = table(&comparison, "2", &ours, &vec![5.0, 1.0, 1.0, 1.0, 12.0]);
        assert!(
            table.contains("| decode, 1 at once | 10 | 5 | 2.00 |"),
            "{table}"
        );
        assert!(
            table.contains("| prefill, 512 tokens | 6 | 12 | 0.50 |"),
            "{table}"
        );
        assert!(table.contains("give 4.0 times"), "{table}");
    }
}
