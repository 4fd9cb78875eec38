//! Shared by the benchmarks of the binary: `main`, processes, loads, and numbers for people.

pub(crate) mod load;
pub(crate) mod process;

use std::io::{self, Write as _};
use std::process::ExitCode;

use serde_json::Value;

/// The words after the benchmark's name on the command line.
pub(crate) struct Words(Vec<String>);

impl Words {
    pub(crate) fn has(&self, word: &str) -> bool {
        self.0.iter().any(|given| given == word)
    }
}

/// The `main` of a benchmark: measures, and prints the results as JSON with `--json`, otherwise with `table`. Run by `cargo test`
/// it does nothing.
pub(crate) fn main<F>(
    measure: impl FnOnce(Words) -> F,
    table: impl FnOnce(&Value) -> String,
) -> ExitCode
where
    F: Future<Output = io::Result<Value>>,
{
    let words = Words(std::env::args().skip(1).collect());
    if !words.has("--bench") || words.has("--test") {
        return ExitCode::SUCCESS;
    }
    let as_json = words.has("--json");
    let measured = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .and_then(|runtime| runtime.block_on(measure(words)));
    let shown = measured.and_then(|results| {
        let text = if as_json {
            format!("{results:#}\n")
        } else {
            table(&results)
        };
        io::stdout().write_all(text.as_bytes())
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "a benchmark says why it failed")]
            {
                eprintln!("error: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

/// The rate per second.
pub(crate) fn per(count: u64, seconds: f64) -> f64 {
    (count as f64 / seconds).round()
}

pub(crate) fn round(value: f64, digits: f64) -> f64 {
    (value * digits).round() / digits
}

/// A description of the machine.
pub(crate) fn hardware() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model
        .unwrap_or_default()
        .trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores, {model}")
}
