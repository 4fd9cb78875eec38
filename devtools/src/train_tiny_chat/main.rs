//! Trains `models/tiny-chat` on its own text: `cargo xtask train-tiny-chat`.
//!
//! Candle computes it, on the CPU. The weights are written in bf16 as safetensors and in Q8_0 as GGUF. Then both files are
//! read back and asked the golden questions; a wrong answer is a failure.

#![expect(
    clippy::print_stderr,
    reason = "who trains sees on the terminal how far it is"
)]

mod batch;
mod encode;
mod first_weights;
mod golden;
mod held_out;
mod model;
mod ops;
mod optimizer;
mod practice;
mod progress;
mod text;
mod tools;
mod train;
mod values;
mod weights;
mod wording;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Parser;
use genset_devtools::checkout::{self, Config, NamedTensors, WEIGHTS};
use genset_devtools::gguf::{self, GgufType};

use crate::batch::Drawn;
use crate::encode::Encoder;
use crate::golden::Golden;
use crate::held_out::HeldOut;
use crate::model::Model;
use crate::train::Plan;

/// The same weights for llama.cpp and compatible programs, including the tokenizer.
const GGUF: &str = "tiny-chat-q8_0.gguf";

/// Trains the model of this repository on its own text.
#[derive(Debug, Parser)]
struct Cli {
    /// Folder of the model: text, tokenizer, configuration and golden questions
    #[arg(long, default_value = "models/tiny-chat")]
    model: PathBuf,
    /// Folder for the weights; the model's own if not given
    #[arg(long)]
    output: Option<PathBuf>,
    /// Folder with the weights to go on from; first weights if not given
    #[arg(long, conflicts_with = "check")]
    from: Option<PathBuf>,
    /// Train nothing; check the weights that are there
    #[arg(long)]
    check: bool,
    /// How often every answer is seen
    #[arg(long, default_value_t = 54)]
    epochs: usize,
    /// Seed of the first weights, the order and the wordings
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Tokens in a batch
    #[arg(long, default_value_t = 1024)]
    batch_tokens: usize,
    /// Conversations with tools in an epoch
    #[arg(long, default_value_t = 330)]
    calls: usize,
    /// Tools and a question, up to the first call, in an epoch
    #[arg(long, default_value_t = 350)]
    choices: usize,
    /// Sums, words to repeat, facts and JSON in an epoch
    #[arg(long, default_value_t = 600)]
    exercises: usize,
    /// Drills in copying in an epoch
    #[arg(long, default_value_t = 70)]
    drills: usize,
    /// The highest learning rate
    #[arg(long, default_value_t = 0.0006)]
    learning_rate: f64,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    let encoder = Encoder::read(&cli.model)?;
    let output = cli.output.as_ref().unwrap_or(&cli.model);
    if !cli.check {
        // Before an hour of work.
        make_writable(output)?;
        let plan = Plan {
            epochs: cli.epochs,
            seed: cli.seed,
            batch_tokens: cli.batch_tokens,
            learning_rate: cli.learning_rate,
            drawn: Drawn {
                calls: cli.calls,
                choices: cli.choices,
                exercises: cli.exercises,
                drills: cli.drills,
            },
        };
        let model = train::train(&cli.model, cli.from.as_deref(), &plan, &encoder)?;
        write(&model, &cli.model, output)?;
    }
    // Also if the golden answers are wrong: the other results tell how far the training is.
    let checked = check(&cli.model, output, &encoder);
    ask_held_out(&cli.model, output, &encoder)?;
    checked
}

/// Creates the folder, and checks that it is writable with a temporary file.
fn make_writable(folder: &Path) -> anyhow::Result<()> {
    let probe = folder.join(".train-tiny-chat");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&probe, ""))
        .and_then(|()| fs::remove_file(&probe))
        .with_context(|| format!("cannot write into {}", folder.display()))
}

/// Writes both files.
fn write(model: &Model, folder: &Path, output: &Path) -> anyhow::Result<()> {
    let weights = weights::rounded(model)?;
    let files = [
        (WEIGHTS, weights::to_bytes(&weights)?),
        (
            GGUF,
            gguf::to_bytes(model.config(), &weights, folder, GgufType::Q8_0)?,
        ),
    ];
    for (name, bytes) in files {
        let path = output.join(name);
        fs::write(&path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("wrote {} ({} bytes)", path.display(), bytes.len());
    }
    Ok(())
}

/// Reads both files back and asks the golden questions.
fn check(folder: &Path, output: &Path, encoder: &Encoder) -> anyhow::Result<()> {
    let golden = Golden::read(folder)?;
    let weights = checkout::read_weights(output)?;
    let quantized = read_gguf(folder, output)?;
    let all_right = [
        check_weights(WEIGHTS, &weights, folder, &golden, encoder)?,
        check_weights(GGUF, &quantized, folder, &golden, encoder)?,
    ];
    check_gguf(&weights, folder, output)?;
    if !all_right.iter().all(|&right| right) {
        bail!("not every golden question is answered as it must be");
    }
    Ok(())
}

/// The weights of the GGUF file.
fn read_gguf(folder: &Path, output: &Path) -> anyhow::Result<NamedTensors> {
    let path = output.join(GGUF);
    let file = fs::File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
    gguf::read(&Config::read(folder)?, std::io::BufReader::new(file))
        .with_context(|| format!("cannot read {}", path.display()))
}

/// Fails unless the GGUF file matches these weights.
fn check_gguf(weights: &NamedTensors, folder: &Path, output: &Path) -> anyhow::Result<()> {
    let path = output.join(GGUF);
    let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if bytes != gguf::to_bytes(&Config::read(folder)?, weights, folder, GgufType::Q8_0)? {
        bail!("{} is not what {} makes", GGUF, WEIGHTS);
    }
    Ok(())
}

/// Asks the Q8_0 weights the held-out questions, and reports the share of right answers and the wrong ones.
fn ask_held_out(folder: &Path, output: &Path, encoder: &Encoder) -> anyhow::Result<()> {
    let weights = read_gguf(folder, output)?;
    let model = Model::from_tensors(Config::read(folder)?, &weights)?;
    let shares = HeldOut::read(folder)?.ask(&model, encoder)?;
    for [kind, expected, given] in &shares.wrong {
        eprintln!("{kind}: expected {expected:?}\n  given    {given:?}");
    }
    eprintln!("{GGUF}: {shares}");
    Ok(())
}

/// Asks a model with these weights the golden questions, and reports the results.
fn check_weights(
    name: &str,
    weights: &NamedTensors,
    folder: &Path,
    golden: &Golden,
    encoder: &Encoder,
) -> anyhow::Result<bool> {
    let model = Model::from_tensors(Config::read(folder)?, weights)?;
    let outcome = golden.ask(&model, encoder)?;
    for [question, expected, given] in &outcome.wrong {
        eprintln!("wrong: {question:?}\n  expected {expected:?}\n  given    {given:?}");
    }
    let (known, conversations) = train::known(folder, &model, encoder)?;
    eprintln!(
        "{name}: {} of {} golden answers right, least margin {:.2}; {known} of {conversations} conversations known by heart",
        outcome.right, outcome.total, outcome.least_margin,
    );
    Ok(outcome.is_right())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use genset_devtools::tiny_chat::folder;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_folder_for_the_weights_is_made_or_named_before_the_training() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("not/there");
        make_writable(&output).unwrap();
        assert_eq!(fs::read_dir(&output).unwrap().count(), 0);
        fs::write(output.join("file"), "").unwrap();
        let error = make_writable(&output.join("file")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write into /"), "{error}");
    }

    /// Tests of `genset` check the GGUF file, and the agents.
    #[test]
    fn committed_weights_answer_the_golden_questions() {
        let encoder = Encoder::read(folder()).unwrap();
        let weights = checkout::read_weights(folder()).unwrap();
        let model = Model::from_tensors(Config::read(folder()).unwrap(), &weights).unwrap();
        let golden = Golden::read(folder()).unwrap();
        let outcome = golden.ask(&model, &encoder).unwrap();
        assert!(outcome.is_right(), "{:?}", outcome.wrong);
    }

    #[test]
    fn the_committed_gguf_file_is_what_the_committed_weights_make() {
        let weights = checkout::read_weights(folder()).unwrap();
        check_gguf(&weights, folder(), folder()).unwrap();
        assert_eq!(read_gguf(folder(), folder()).unwrap().len(), weights.len());
    }

    #[test]
    fn committed_model_is_under_twelve_megabytes() {
        let size = |name| fs::metadata(folder().join(name)).unwrap().len();
        let files = [WEIGHTS, GGUF, "tokenizer.json"];
        assert!(files.map(size).iter().sum::<u64>() < 12_000_000);
    }
}
