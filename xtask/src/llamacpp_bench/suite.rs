//! The models that people use, by the widths and types of their matrices: a trained model, and Llamas with random weights of those
//! widths. llama.cpp itself quantizes the Llamas, so that each file has the mix of types of a real file.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::{Engines, Rates};
use crate::devtools;
use crate::llamacpp_check::Instructions;
use crate::process::run as run_command;
use crate::real_model;
use crate::repo::Repo;

const WIDTHS: [&str; 6] = ["w576", "w640", "w896", "w960", "w1024", "w1536"];

/// As llama.cpp's quantizer names them.
const TYPES: [&str; 8] = [
    "q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "q3_k_m", "q2_k", "iq4_xs",
];

/// The row of the trained model.
const TRAINED: &str = "gemma3-270m q4_k_m";

const SEQUENCES: [u32; 2] = [1, 16];
const NEW_TOKENS: u32 = 64;

/// Measures each model and prints its row at once. At the end, prints the smallest and the median ratio of each column.
///
/// # Errors
/// When llama.cpp or the trained model cannot be installed, something does not build, or either engine cannot load a model.
pub(crate) fn run(
    repo: &Repo,
    instructions: Instructions,
    only: Option<&str>,
    rounds: u32,
) -> anyhow::Result<()> {
    let engines = Engines::build(repo, instructions, &SEQUENCES, NEW_TOKENS)?;
    let mut out = std::io::stdout().lock();
    let isa = instructions.isa();
    writeln!(
        out,
        "{} threads, --isa {isa}; tokens/s: genset, llama.cpp, ratio\n",
        engines.threads
    )?;
    writeln!(
        out,
        "| model | decode, 1 at once | decode, 16 at once | prefill, 512 tokens |\n|---|---|---|---|"
    )?;
    let is_wanted = |name: &str| only.is_none_or(|only| name.contains(only));
    let mut ratios = Vec::new();
    let mut measure = |name: &str, file: &Path| -> anyhow::Result<()> {
        let (ours, theirs) = engines.measure(file, rounds)?;
        writeln!(out, "{}", row(name, &ours, &theirs))?;
        let pairs = ours.iter().zip(&theirs);
        ratios.push(pairs.map(|(ours, theirs)| ours / theirs).collect());
        Ok(())
    };
    if is_wanted(TRAINED) {
        measure(TRAINED, &real_model::file(repo)?)?;
    }
    for width in WIDTHS {
        for kind in TYPES {
            let name = format!("{width} {kind}");
            if is_wanted(&name) {
                measure(&name, &quantized(repo, &engines.python, width, kind)?)?;
            }
        }
    }
    ensure!(
        !ratios.is_empty(),
        "--only: no row has this part in its name; rows are such as `w896 q4_k_m` and `{TRAINED}`"
    );
    writeln!(out, "{}", summary(&ratios))?;
    Ok(())
}

/// The file of this width and type. Makes it if it is missing.
fn quantized(repo: &Repo, python: &Path, width: &str, kind: &str) -> anyhow::Result<PathBuf> {
    let folder = repo.target().join("bench").join(width);
    let file = folder.join(format!("{kind}.gguf"));
    if file.exists() {
        return Ok(file);
    }
    let floats = folder.join("model.gguf");
    if !floats.exists() {
        devtools::make_model_in(repo, &folder, width, Some("bf16"))?;
    }
    // Renamed when it is complete.
    let unfinished = folder.join(format!("{kind}.unfinished"));
    let script = repo.root().join("engines/candle/benches/quantize.py");
    run_command(
        Command::new(python)
            .arg(script)
            .args([&floats, &unfinished])
            .arg(kind),
    )?;
    fs::rename(&unfinished, &file).with_context(|| format!("cannot make {}", file.display()))?;
    Ok(file)
}

fn row(name: &str, ours: &Rates, theirs: &Rates) -> String {
    let pairs = ours.iter().zip(theirs);
    let cells = pairs.map(|(ours, theirs)| format!("{ours:.0}, {theirs:.0}, {:.2}", ours / theirs));
    format!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "))
}

fn summary(ratios: &[Rates]) -> String {
    let columns = ratios.first().map_or(0, Vec::len);
    let cell = |column: usize| {
        let mut values: Vec<f64> = ratios.iter().map(|row| row[column]).collect();
        values.sort_by(f64::total_cmp);
        let (least, middle) = (values[0], values[values.len() / 2]);
        format!("{least:.2}, {middle:.2}")
    };
    let cells: Vec<_> = (0..columns).map(cell).collect();
    format!("| smallest ratio, median | {} |", cells.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_ratios_and_the_last_one_the_smallest_and_the_median() {
        let shown = row(
            "w576 q4_0",
            &vec![30.0, 300.0, 90.0],
            &vec![20.0, 200.0, 100.0],
        );
        let cells = "30, 20, 1.50 | 300, 200, 1.50 | 90, 100, 0.90";
        assert_eq!(shown, format!("| w576 q4_0 | {cells} |"));
        let ratios = [vec![1.5, 0.9], vec![1.2, 1.1], vec![1.9, 1.0]];
        let last = "| smallest ratio, median | 1.20, 1.50 | 0.90, 1.00 |";
        assert_eq!(summary(&ratios), last);
    }
}
