//! [`Comparison`]: how a run compares with an earlier one (`--against`).

use std::fmt::{Display, Write as _};
use std::path::Path;

use genset_backend_common::EngineError;
use genset_backend_common::text_file::read_text;
use serde::Serialize;

use super::breakdown::sequences;
use super::{Measured, Setup};

/// The largest file of an earlier run that is read. One has a few kilobytes.
const MAX_BYTES: u64 = 1 << 20;

/// Reads an earlier run.
///
/// # Errors
/// `InvalidArgument`: the file cannot be read, or has something else.
pub(super) fn read(path: &Path) -> Result<Measured, EngineError> {
    let bad = |problem: &dyn Display| {
        let problem = format!("{}: {problem}", path.display());
        EngineError::invalid_argument("--against", problem)
    };
    let text = read_text(path, MAX_BYTES).map_err(|error| bad(&error))?;
    serde_json::from_str(&text).map_err(|error| {
        bad(&format!(
            "this is not what genset bench engine --json prints: {error}"
        ))
    })
}

/// A run beside an earlier one.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    /// What differs beside the figures.
    differs: Vec<Difference>,
    /// The figures that both runs have, unless the earlier one is 0.
    figures: Vec<Pair>,
    earlier: Measured,
}

/// Something that was not the same in the two runs.
#[derive(Debug, Serialize)]
struct Difference {
    what: &'static str,
    now: String,
    earlier: String,
}

/// A figure of both runs.
#[derive(Debug, Serialize)]
struct Pair {
    figure: String,
    now: f64,
    earlier: f64,
    /// The figure now, divided by the earlier one.
    ratio: f64,
}

impl Comparison {
    pub(super) fn new(now: &Measured, earlier: Measured) -> Self {
        let before = figures(&earlier);
        let pair = |(figure, now): (String, f64)| {
            let (_, earlier) = before.iter().find(|(name, _)| *name == figure)?;
            let ratio = now / earlier;
            // What a step takes beyond its products may be nothing.
            ratio.is_finite().then_some(Pair {
                figure,
                now,
                earlier: *earlier,
                ratio,
            })
        };
        Self {
            differs: differences(&now.setup, &earlier.setup),
            figures: figures(now).into_iter().filter_map(pair).collect(),
            earlier,
        }
    }

    /// A line for each difference, and one for each figure.
    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let or_unknown = |value: &str| match value {
            "" => "unknown".to_owned(),
            known => known.to_owned(),
        };
        for Difference { what, now, earlier } in &self.differs {
            let (now, earlier) = (or_unknown(now), or_unknown(earlier));
            let _ = writeln!(text, "  another {what}: now {now}, earlier {earlier}");
        }
        let names = self.figures.iter().map(|pair| pair.figure.chars().count());
        let width = names.max().unwrap_or(0);
        let _ = writeln!(
            text,
            "  {:<width$} {:>10} {:>10} {:>8}",
            "", "now", "earlier", "ratio"
        );
        for pair in &self.figures {
            let (now, earlier) = (readable(pair.now), readable(pair.earlier));
            let Pair { figure, ratio, .. } = pair;
            let _ = writeln!(
                text,
                "  {figure:<width$} {now:>10} {earlier:>10} {ratio:>8.2}"
            );
        }
        if self.figures.is_empty() {
            text.push_str("  the earlier run has none of these figures\n");
        }
        text
    }
}

/// What must be the same for figures to say something about the program alone.
fn differences(now: &Setup, earlier: &Setup) -> Vec<Difference> {
    let of = |setup: &Setup| {
        let processor = setup.processor.clone().unwrap_or_default();
        [
            ("version", setup.version.clone()),
            ("model", setup.model_path.clone()),
            ("processor", processor),
            ("number of threads", setup.threads.to_string()),
            ("--isa", setup.isa.clone()),
            ("--context-tokens", setup.context_tokens.to_string()),
        ]
    };
    let both = of(now).into_iter().zip(of(earlier));
    both.filter(|((_, now), (_, earlier))| now != earlier)
        .map(|((what, now), (_, earlier))| Difference { what, now, earlier })
        .collect()
}

/// The figures of a run, each with its unit in the name.
fn figures(run: &Measured) -> Vec<(String, f64)> {
    let mut figures = Vec::new();
    for decode in &run.decode {
        let name = format!("decode, {}, tokens/s", sequences(decode.sequences));
        figures.push((name, decode.tokens_per_s));
    }
    let name = format!("prefill, {} tokens, tokens/s", run.prefill_tokens);
    figures.push((name, run.prefill_tokens_per_s));
    let first = format!("first token, prompt of {}", run.prefix_tokens);
    figures.push((format!("{first}, ms"), run.first_token_cold_s * 1e3));
    let cached = format!("{first}, the second time, ms");
    figures.push((cached, run.first_token_cached_s * 1e3));
    for step in &run.steps {
        let of = sequences(step.sequences);
        let parts = step.parts();
        figures.extend(
            parts.map(|(part, _, seconds)| (format!("step of {of}: {part}, ms"), seconds * 1e3)),
        );
    }
    let memory = run.memory_bytes_per_s;
    figures.extend(memory.map(|rate| ("memory, GB/s".to_owned(), rate / 1e9)));
    figures
}

/// With three digits or more.
fn readable(figure: f64) -> String {
    if figure >= 100.0 {
        format!("{figure:.0}")
    } else if figure >= 10.0 {
        format!("{figure:.1}")
    } else {
        format!("{figure:.3}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::breakdown::tests::example;
    use super::*;

    #[test]
    fn a_run_compared_with_itself_has_no_differences_and_ratios_of_one() {
        let mut run = example();
        run.prefill_tokens_per_s = 100.0;
        run.first_token_cold_s = 0.5;
        run.first_token_cached_s = 0.1;
        run.steps[0].rest_s = 0.0;
        let compared = Comparison::new(&run, run.clone());
        assert!(compared.differs.is_empty());
        let names: Vec<&str> = compared
            .figures
            .iter()
            .map(|pair| pair.figure.as_str())
            .collect();
        assert!(
            names.contains(&"step of 1 sequence: gate, up (Q4_K), ms"),
            "{names:?}"
        );
        assert!(names.contains(&"memory, GB/s"), "{names:?}");
        assert!(compared.figures.iter().all(|pair| pair.ratio == 1.0));
    }

    #[test]
    fn what_differs_is_told_and_what_one_run_lacks_is_left_out() {
        let mut now = example();
        now.prefill_tokens_per_s = 150.0;
        let mut earlier = example();
        earlier.prefill_tokens_per_s = 100.0;
        earlier.memory_bytes_per_s = None;
        earlier.setup.threads = 1;
        earlier.setup.model_path = "n.gguf".to_owned();
        now.setup.processor = None;
        earlier.setup.processor = Some("a processor".to_owned());
        let table = Comparison::new(&now, earlier).table();
        for expected in [
            "another model: now m.gguf, earlier n.gguf",
            "another number of threads: now 2, earlier 1",
            "another processor: now unknown, earlier a processor",
        ] {
            assert!(table.contains(expected), "{table}");
        }
        let prefill = table.lines().find(|line| line.contains("prefill"));
        let columns: Vec<&str> = prefill.unwrap().split_whitespace().rev().take(3).collect();
        assert_eq!(columns, ["1.50", "100", "150"]);
        assert!(!table.contains("memory"), "{table}");
    }

    #[test]
    fn a_run_of_before_there_was_a_breakdown_is_read_and_another_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("earlier.json");
        let old = r#"{"model": "m", "context_length_tokens": 8, "kv_cache_tokens": 8, "decode": [], "prefill_tokens": 1,
            "prefill_tokens_per_s": 2.0, "prefix_tokens": 1, "first_token_cold_s": 1.0, "first_token_cached_s": 0.5}"#;
        std::fs::write(&path, old).unwrap();
        assert_eq!(read(&path).unwrap().prefill_tokens_per_s, 2.0);
        std::fs::write(&path, r#"{"model": "m"}"#).unwrap();
        let error = read(&path).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--against"));
        assert!(error.message().contains("missing field"), "{error}");
    }
}
