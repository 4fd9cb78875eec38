//! `genset bench engine`: measures how fast the engine of `out=candle` computes a model, without tokenizer, worker and server.
//!
//! Prompts are random tokens. None was seen before, except where that is measured. Each figure is the median of several
//! measurements, which alternate, so that a slowdown of the machine affects all of them. At the end the products of a step are
//! timed alone, by kind of matrix.

mod against;
mod breakdown;
mod load;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use genset_backend_common::{EngineConfig, EngineError, LLMEngine, StartContext};
use genset_engine_candle::{CandleArgs, CandleEngine, Hardware};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::CUT;
use super::progress::{Progress, telling_if_long};
use crate::hub;
use crate::input::{escaped, note, print, print_json};
use crate::signals::{self, interrupt_token};
use crate::threads;
use against::Comparison;
use breakdown::StepTimes;
use load::{DecodeFigures, Load};

#[derive(Debug, Clone, Args)]
pub(crate) struct EngineBenchArgs {
    /// Checkout folder, GGUF file, or a model of the Hugging Face Hub
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Sequences that decode at once, each list entry a measurement
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64], value_name = "COUNTS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    sequences: Vec<u32>,
    /// Tokens in the prompt of a sequence that decodes
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context_tokens: u32,
    /// Tokens that a sequence decodes
    #[arg(long, default_value_t = 48, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(8..))]
    new_tokens: u32,
    /// Tokens in the prompt of which prefill is measured
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    prefill_tokens: u32,
    /// Tokens in the prompt that is sent twice
    #[arg(long, default_value_t = 1000, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    prefix_tokens: u32,
    /// Measurements of each kind; the median is shown
    #[arg(long, default_value_t = 3, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Whether to time a step's products by kind of matrix, and to compare them with the rate of memory; on the CPU
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    breakdown: bool,
    /// JSON of an earlier run to compare with
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// End where standard input does, as a trial of `genset tune`
    #[arg(long, hide = true)]
    ends_with_input: bool,
    #[command(flatten, next_help_heading = "Engine")]
    candle: CandleArgs,
}

/// The results; rates are medians.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The served model's name.
    pub(crate) model: String,
    #[serde(default)]
    pub(crate) setup: Setup,
    pub(crate) context_length_tokens: u32,
    /// The number of tokens that the KV cache holds.
    pub(crate) kv_cache_tokens: u64,
    pub(crate) decode: Vec<Decode>,
    pub(crate) prefill_tokens: u32,
    pub(crate) prefill_tokens_per_s: f64,
    pub(crate) prefix_tokens: u32,
    pub(crate) first_token_cold_s: f64,
    pub(crate) first_token_cached_s: f64,
    /// Where the time of a step goes, for each number of sequences; empty if that was not measured.
    #[serde(default)]
    pub(crate) steps: Vec<StepTimes>,
    /// Bytes per second that the threads of products read from memory, if that was measured.
    #[serde(default)]
    pub(crate) memory_bytes_per_s: Option<f64>,
    /// Whether Ctrl-C ended the run early.
    #[serde(default)]
    pub(crate) is_cut: bool,
}

/// With what it was measured.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Setup {
    /// The version of the program.
    pub(crate) version: String,
    /// The model as it was given.
    pub(crate) model_path: String,
    /// The processor's name, if the system tells it.
    pub(crate) processor: Option<String>,
    /// The threads of products.
    pub(crate) threads: usize,
    /// The instructions of the kernels.
    pub(crate) isa: String,
    /// Bytes of the last caches; those of a usual machine, if the system does not tell them.
    pub(crate) cache_bytes: u64,
    /// Tokens in the prompt of a sequence that decodes.
    pub(crate) context_tokens: u32,
}

/// Sequences that decode together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Decode {
    pub(crate) sequences: u32,
    pub(crate) tokens_per_s: f64,
    /// The share of a step's time outside the model: planning, sampling, delivery.
    pub(crate) outside_model: f64,
    /// The share of draft tokens that the model accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) accepted_drafts: Option<f64>,
    /// Rounds in which the sequences never all decoded at the same time. Their rate includes prefill.
    #[serde(default)]
    pub(crate) rounds_apart: usize,
}

/// Measures and prints the results; returns the exit code.
///
/// # Errors
/// The earlier run cannot be read, or the model cannot be fetched or loaded, or refuses the requested lengths.
pub(super) fn perform(args: &EngineBenchArgs) -> Result<u8, EngineError> {
    if args.ends_with_input {
        signals::end_with_input().map_err(|error| {
            EngineError::internal("standard input cannot be followed").with_source(error)
        })?;
    }
    let earlier = args.against.as_deref().map(against::read).transpose()?;
    let mut args = args.clone();
    let model_path = args.model.display().to_string();
    args.model = hub::of_candle(&args.model)?;
    hub::bring_draft(&mut args.candle)?;
    let stop = interrupt_token()?;
    let runtime = threads::of_every_core()?;
    let Some(mut measured) = runtime.block_on(measure(&args, &stop))? else {
        note("stopped before anything was measured");
        return Ok(CUT);
    };
    measured.setup.model_path = model_path;
    let compared = earlier.map(|earlier| Comparison::new(&measured, earlier));
    if args.json {
        let results = Results {
            measured: &measured,
            against: compared.as_ref(),
        };
        print_json(&results)?;
    } else {
        let compared = compared.map(|compared| format!("\n{}", compared.table()));
        let text = report::table(&measured) + &compared.unwrap_or_default();
        print(&escaped(&text));
    }
    Ok(if measured.is_cut { CUT } else { 0 })
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Results<'a> {
    #[serde(flatten)]
    measured: &'a Measured,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<&'a Comparison>,
}

/// Measures until everything is measured or `stop` is cancelled; `None` if that was before the end of a round.
async fn measure(
    args: &EngineBenchArgs,
    stop: &CancellationToken,
) -> Result<Option<Measured>, EngineError> {
    let mut candle = args.candle.clone();
    let most = args.sequences.iter().copied().max().unwrap_or(1);
    candle.max_num_seqs.get_or_insert(most);
    let engine = CandleEngine::from_args(&candle, &args.model);
    let start = StartContext::detached(1);
    let metrics = start.metrics.clone();
    let started = telling_if_long(engine.start(start), || note("loading the model"));
    let started = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        started = started => Some(started),
    };
    let measured = match started {
        None => Ok(None),
        Some(Ok(config)) => match check_lengths(args, config.context_length_tokens) {
            Ok(()) => {
                let load = Load::new(&engine, &config, metrics);
                measure_all(args, &engine, load, &config, stop).await
            }
            Err(error) => Err(error),
        },
        Some(Err(error)) => Err(error),
    };
    engine.cleanup().await?;
    measured
}

/// Refuses prompts that leave no room for an answer in the model's context.
fn check_lengths(args: &EngineBenchArgs, context: u32) -> Result<(), EngineError> {
    let lengths = [
        ("--context-tokens", args.context_tokens),
        ("--prefill-tokens", args.prefill_tokens),
        ("--prefix-tokens", args.prefix_tokens),
    ];
    match lengths.into_iter().find(|(_, tokens)| *tokens >= context) {
        None => Ok(()),
        Some((flag, tokens)) => {
            let problem =
                format!("must be below the model's context of {context} tokens, and is {tokens}");
            Err(EngineError::invalid_argument(flag, problem))
        }
    }
}

/// One measurement of each kind.
struct Round {
    decodes: Vec<DecodeFigures>,
    prefill: Duration,
    cold: Duration,
    cached: Duration,
}

async fn measure_all(
    args: &EngineBenchArgs,
    engine: &CandleEngine,
    load: Load<'_>,
    config: &EngineConfig,
    stop: &CancellationToken,
) -> Result<Option<Measured>, EngineError> {
    let rounds = measure_rounds(args, load, stop).await?;
    if rounds.is_empty() {
        return Ok(None);
    }
    let mut measured = medians(args, config, &rounds);
    let hardware = Hardware::of_process();
    if args.breakdown && !stop.is_cancelled() {
        breakdown::measure(engine, &hardware, &mut measured, stop).await?;
    }
    measured.setup = Setup {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        model_path: args.model.display().to_string(),
        cache_bytes: hardware.caches(),
        processor: hardware.processor,
        threads: hardware.threads,
        isa: hardware.isa.to_owned(),
        context_tokens: args.context_tokens,
    };
    measured.is_cut = stop.is_cancelled();
    Ok(Some(measured))
}

/// The rounds that ended before `stop` was cancelled.
async fn measure_rounds(
    args: &EngineBenchArgs,
    mut load: Load<'_>,
    stop: &CancellationToken,
) -> Result<Vec<Round>, EngineError> {
    let mut progress = Progress::of_rounds("measuring");
    let all = u64::from(args.repeats) + 1;
    let mut rounds = Vec::new();
    for number in 0..all {
        progress.set(number, all);
        let round = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            round = measure_round(args, &mut load) => round?,
        };
        // The first round warms up: pages of the model's file, the processor's clock, the threads. It counts if it is the only one.
        if number == 1 {
            rounds.clear();
        }
        rounds.push(round);
    }
    Ok(rounds)
}

async fn measure_round(args: &EngineBenchArgs, load: &mut Load<'_>) -> Result<Round, EngineError> {
    let mut decodes = Vec::new();
    for sequences in &args.sequences {
        let decode = load.decode(*sequences, args.context_tokens, args.new_tokens);
        decodes.push(decode.await?);
    }
    let prefill = load.first_token(args.prefill_tokens).await?;
    let (cold, cached) = load.first_token_twice(args.prefix_tokens).await?;
    Ok(Round {
        decodes,
        prefill,
        cold,
        cached,
    })
}

/// The medians of at least one round.
fn medians(args: &EngineBenchArgs, config: &EngineConfig, rounds: &[Round]) -> Measured {
    let decode = |(index, &sequences): (usize, &u32)| {
        let all = || {
            rounds
                .iter()
                .filter_map(move |round| round.decodes.get(index))
        };
        let accepted: Vec<f64> = all().filter_map(|one| one.accepted_drafts).collect();
        Decode {
            sequences,
            tokens_per_s: median(all().map(|one| one.rate.tokens_per_s).collect()),
            outside_model: median(all().map(|one| one.outside_model).collect()),
            accepted_drafts: (!accepted.is_empty()).then(|| median(accepted)),
            rounds_apart: all().filter(|one| !one.rate.at_once).count(),
        }
    };
    let seconds = |of: fn(&Round) -> Duration| {
        median(rounds.iter().map(|round| of(round).as_secs_f64()).collect())
    };
    let block_size: u64 = (config.kv_block_size).map_or(0, |size| size.get().into());
    Measured {
        model: config.model.clone(),
        context_length_tokens: config.context_length_tokens,
        kv_cache_tokens: config.kv_total_blocks.unwrap_or(0) * block_size,
        decode: args.sequences.iter().enumerate().map(decode).collect(),
        prefill_tokens: args.prefill_tokens,
        prefill_tokens_per_s: f64::from(args.prefill_tokens) / seconds(|round| round.prefill),
        prefix_tokens: args.prefix_tokens,
        first_token_cold_s: seconds(|round| round.cold),
        first_token_cached_s: seconds(|round| round.cached),
        ..Measured::default()
    }
}

/// The median; of an even number, the mean of the two in the middle, because the upper one would flatter rates and not times.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (lower, upper) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    let middle = values.get(lower).zip(values.get(upper));
    middle.map_or(f64::NAN, |(lower, upper)| f64::midpoint(*lower, *upper))
}

/// `duration` in a readable unit.
fn readable(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1000.0;
    if ms < 1000.0 {
        format!("{ms:.1} ms")
    } else {
        format!("{:.2} s", ms / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use genset_devtools::synthetic::{SyntheticSize, make_model};
    use genset_engine_candle::SpeculationArgs;

    use super::*;

    /// Measures a small model once, with a prefill of this many tokens, and as its own draft model if `drafts`.
    fn measure_tiny(prefill_tokens: u32, drafts: bool) -> Result<Measured, EngineError> {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("m");
        make_model(&model, SyntheticSize::Tiny, 1).unwrap();
        let speculation = SpeculationArgs {
            draft_model: drafts.then(|| model.clone()),
            ..SpeculationArgs::default()
        };
        let args = EngineBenchArgs {
            model,
            sequences: vec![1, 3],
            context_tokens: 8,
            new_tokens: 8,
            prefill_tokens,
            prefix_tokens: 64,
            repeats: 1,
            breakdown: true,
            against: None,
            json: true,
            ends_with_input: false,
            candle: CandleArgs {
                speculation,
                ..CandleArgs::default()
            },
        };
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let measured = runtime.block_on(measure(&args, &CancellationToken::new()));
        measured.map(Option::unwrap)
    }

    #[test]
    fn the_median_is_the_middle_one_or_the_mean_of_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![9.0, 1.0, 4.0, 2.0]), 3.0);
        assert_eq!(median(vec![7.0]), 7.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn a_model_is_measured() {
        let measured = measure_tiny(32, false).unwrap();
        assert_eq!(measured.decode.len(), 2);
        for one in &measured.decode {
            assert!(one.tokens_per_s > 0.0, "{measured:?}");
            assert!((0.0..=1.0).contains(&one.outside_model), "{measured:?}");
        }
        assert!(measured.prefill_tokens_per_s > 0.0 && measured.first_token_cached_s > 0.0);
        let table = report::table(&measured);
        assert!(table.contains("3 sequences"), "{table}");
        // On a busy machine, sequences may never have decoded together.
        let together = measured.decode.iter().filter(|one| one.rounds_apart == 0);
        assert_eq!(measured.steps.len(), together.count());
        for step in &measured.steps {
            assert_eq!(step.kinds.len(), 6, "{step:?}");
            assert!(step.kinds.iter().all(|kind| kind.weight_bytes > 0));
        }
        assert!(!table.contains("guesses"), "{table}");
    }

    #[test]
    fn accepted_guesses_are_shown() {
        let measured = measure_tiny(32, true).unwrap();
        for one in &measured.decode {
            // As its own draft model, it guesses every token.
            assert_eq!(one.accepted_drafts, Some(1.0), "{measured:?}");
        }
        // Its steps compute several tokens of a sequence.
        assert!(measured.steps.is_empty(), "{measured:?}");
        let table = report::table(&measured);
        assert!(table.contains("100 % of guesses accepted"), "{table}");
    }

    #[test]
    fn lengths_beyond_the_context_are_refused_by_their_flag() {
        let error = measure_tiny(1_000_000, false).unwrap_err();
        assert!(
            error.to_string().starts_with("--prefill-tokens: "),
            "{error}"
        );
    }
}
