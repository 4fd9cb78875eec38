//! `genset tune`: finds the flags of `out=candle` that are fastest for a model on this machine.
//!
//! Each trial is its own `genset bench engine` process, because a process creates its threads only once. Flags are tried one
//! after another with the best ones so far. Flags that look faster are tried again, in turns with the best ones: they are kept if
//! their medians are faster by more than trials of the same flags differ.

mod bench;

use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

use clap::Args;
use genset_backend_common::EngineError;
use genset_engine_candle::{default_threads, load::Quantization};
use serde::Serialize;
use tokio::time::Instant;

use crate::args::quoted;
use crate::bench::CUT;
use crate::bench::engine::Measured;
use crate::hub;
use crate::input::{note, print, print_json};
use crate::signals::interrupt_token;
use crate::threads;
use bench::{Bench, Ended};

/// A smaller speedup does not count.
const BETTER: f64 = 1.03;

/// How often flags that look faster, and the best ones so far, are tried again.
const AGAIN: u32 = 2;

/// The share of the highest total rate that is enough: more concurrent sequences would only wait.
const ENOUGH: f64 = 0.95;

/// The memory of the KV cache in trials, in bytes.
const KV_MEMORY: u64 = 1 << 30;

/// Numbers of concurrent sequences in the first trial.
const SEQUENCES: [u32; 4] = [1, 4, 16, 32];

/// The approximate time limit for the prefill of a trial.
const PREFILL: Duration = Duration::from_secs(1);

/// The default device.
const ANY_DEVICE: &str = "auto";

#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// Checkout folder, GGUF file, or a model of the Hugging Face Hub
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// How long to try, in seconds; the first two trials are made in any case
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Tokens of a request and its answer together, by which the KV cache is sized [default: the model's context, at most 4096]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    context_tokens: Option<u32>,
    /// Where to compute: cpu, cuda:N, or auto
    #[arg(long, env = "GENSET_DEVICE", default_value = ANY_DEVICE, value_name = "DEVICE")]
    device: String,
    /// Quantization of float weights on the CPU, as for genset run
    #[arg(long, default_value_t, value_name = "TYPE")]
    quantize: Quantization,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl TuneArgs {
    /// The flags without which `genset run` would serve something else than was measured.
    fn flags_of_run(&self) -> Vec<String> {
        let mut flags = Vec::new();
        if self.device != ANY_DEVICE {
            flags.push(format!("--device={}", self.device));
        }
        if self.quantize != Quantization::default() {
            flags.push(format!("--quantize={}", self.quantize));
        }
        flags
    }
}

/// The results.
#[derive(Debug, Serialize)]
struct Tuned {
    model: String,
    /// The flags for `genset run`.
    flags: Vec<String>,
    /// The speedup over the defaults, as the mean of the rates' ratios.
    times_the_defaults: f64,
    /// The largest ratio between two trials of the same flags; `None` if no flags were tried twice.
    spread: Option<f64>,
    /// In the order in which they were made.
    trials: Vec<Trial>,
    /// Whether Ctrl-C ended the search early.
    is_cut: bool,
}

/// One measurement.
#[derive(Debug, Clone, Serialize)]
struct Trial {
    flags: Vec<String>,
    prefill_tokens_per_s: f64,
    one_sequence_tokens_per_s: f64,
    sequences: u32,
    sequences_tokens_per_s: f64,
}

/// Tunes and prints the results; returns the exit code.
///
/// # Errors
/// The model cannot be loaded, or refuses the lengths of the trials.
pub(crate) fn perform(args: &TuneArgs) -> Result<u8, EngineError> {
    let model = hub::of_candle(&args.model)?;
    let bench = Bench {
        args,
        model: &model,
        runtime: threads::this_one()?,
        stop: interrupt_token()?,
    };
    let tuned = match Tuning::begin(bench).and_then(Tuning::perform) {
        Ok(tuned) => tuned,
        Err(Ended::Cut) => {
            note("stopped before anything was measured");
            return Ok(CUT);
        }
        Err(Ended::Failed(error)) => return Err(error),
    };
    if args.json {
        print_json(&tuned)?;
    } else {
        print(&tuned.text(&args.model));
    }
    Ok(if tuned.is_cut { CUT } else { 0 })
}

/// The search.
struct Tuning<'a> {
    bench: Bench<'a>,
    deadline: Instant,
    /// The number of concurrent sequences that is worth running.
    sequences: u32,
    prefill_tokens: u32,
    context_tokens: u32,
    kv_bytes_per_token: u64,
    name: String,
    trials: Vec<Trial>,
}

impl<'a> Tuning<'a> {
    /// Measures the model's speed with few and with many sequences.
    fn begin(bench: Bench<'a>) -> Result<Self, Ended> {
        let args = bench.args;
        let deadline = Instant::now() + Duration::from_secs(args.seconds);
        note(format_args!(
            "measuring {} for about {} s",
            bench.model.display(),
            args.seconds
        ));
        let first = bench.measure(&[], &SEQUENCES, 64)?;
        let rate = first.prefill_tokens_per_s * PREFILL.as_secs_f64();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is clamped to a context"
        )]
        let prefill_tokens =
            (rate as u32).clamp(64, (first.context_length_tokens / 2).clamp(64, 2048));
        let context = first.context_length_tokens;
        if args.context_tokens.is_some_and(|tokens| tokens > context) {
            let problem = format!("the model's context holds {context} tokens");
            return Err(EngineError::invalid_argument("--context-tokens", problem).into());
        }
        Ok(Self {
            sequences: worth_running(&first),
            prefill_tokens,
            context_tokens: args.context_tokens.unwrap_or(context.min(4096)),
            kv_bytes_per_token: KV_MEMORY / first.kv_cache_tokens.max(1),
            name: first.model,
            deadline,
            trials: Vec::new(),
            bench,
        })
    }

    fn perform(mut self) -> Result<Tuned, Ended> {
        let begun = Instant::now();
        let mut found = Found {
            best: Contender(vec![self.trial(Vec::new())?]),
            times: 1.0,
            spread: None,
        };
        let is_cut = match self.search(&mut found, begun.elapsed()) {
            Ok(()) => false,
            Err(Ended::Cut) => true,
            Err(failed @ Ended::Failed(_)) => return Err(failed),
        };
        let mut flags = self.bench.args.flags_of_run();
        flags.extend_from_slice(found.best.flags());
        flags.push(format!("--max-num-seqs={}", self.sequences));
        flags.push(format!("--kv-cache-memory={}", self.kv_memory()));
        Ok(Tuned {
            model: self.name,
            flags,
            times_the_defaults: found.times,
            spread: found.spread,
            trials: self.trials,
            is_cut,
        })
    }

    /// Tries flags until all are tried or the time is over; a trial takes about as long as `took`.
    fn search(&mut self, found: &mut Found, took: Duration) -> Result<(), Ended> {
        let processors = available_parallelism().map_or(1, usize::from);
        let threads = candidates_of(processors, default_threads())
            .into_iter()
            .map(|count| ("threads", count));
        let batches = [256, 1024, 2048]
            .into_iter()
            .filter(|count| *count <= self.prefill_tokens as usize);
        let batches = batches.map(|count| ("max-num-batched-tokens", count));
        let further: Vec<_> = threads.chain(batches).chain([("block-size", 32)]).collect();
        for (name, value) in further {
            if !self.has_time(took) {
                break;
            }
            let mut flags = found.best.flags().to_vec();
            let prefix = format!("--{name}=");
            flags.retain(|flag| !flag.starts_with(&prefix));
            flags.push(format!("{prefix}{value}"));
            let mut other = Contender(vec![self.trial(flags)?]);
            if other.times(&found.best) > BETTER {
                if !self.try_again(&mut found.best, &mut other, took)? {
                    note("there is no time left to try these again, so they are not kept");
                    break;
                }
                let differ = found.best.spread().max(other.spread());
                found.spread = Some(found.spread.map_or(differ, |spread| spread.max(differ)));
                if other.is_faster(&found.best) {
                    found.times *= other.times(&found.best);
                    found.best = other;
                }
            }
        }
        Ok(())
    }

    fn has_time(&self, took: Duration) -> bool {
        Instant::now() + took <= self.deadline
    }

    /// Tries both again, in turns, so that what else the machine does meets both; `false` if the time does not suffice.
    fn try_again(
        &mut self,
        best: &mut Contender,
        other: &mut Contender,
        took: Duration,
    ) -> Result<bool, Ended> {
        for _ in 0..AGAIN {
            for contender in [&mut *best, &mut *other] {
                if !self.has_time(took) {
                    return Ok(false);
                }
                let trial = self.trial(contender.flags().to_vec())?;
                contender.0.push(trial);
            }
        }
        Ok(true)
    }

    fn trial(&mut self, flags: Vec<String>) -> Result<Trial, Ended> {
        let sequences = self.sequences;
        let both: &[u32] = match sequences {
            1 => &[1],
            _ => &[1, sequences],
        };
        let measured = self.bench.measure(&flags, both, self.prefill_tokens)?;
        let rate = |wanted: u32| {
            let found = measured
                .decode
                .iter()
                .find(|decode| decode.sequences == wanted);
            found.map_or(f64::NAN, |decode| decode.tokens_per_s)
        };
        let trial = Trial {
            flags,
            prefill_tokens_per_s: measured.prefill_tokens_per_s,
            one_sequence_tokens_per_s: rate(1),
            sequences,
            sequences_tokens_per_s: rate(sequences),
        };
        note(trial.line());
        self.trials.push(trial.clone());
        Ok(trial)
    }

    /// The memory for that number of sequences, as text.
    fn kv_memory(&self) -> String {
        let tokens = u64::from(self.sequences) * u64::from(self.context_tokens);
        let mib = (tokens * self.kv_bytes_per_token).div_ceil(1 << 20).max(1);
        format!("{mib}MiB")
    }
}

/// Numbers of threads other than the default, which is one per core. They may be faster on a machine with two threads per core,
/// or with cores of two kinds.
fn candidates_of(processors: usize, default: usize) -> Vec<usize> {
    let mut candidates: Vec<usize> = [
        processors / 2,
        processors * 3 / 4,
        processors.saturating_sub(1),
        processors,
    ]
    .into_iter()
    .filter(|count| *count > 0 && *count != default)
    .collect();
    candidates.sort_unstable();
    candidates.dedup();
    candidates
}

/// The smallest number of sequences whose rate is close to the highest.
fn worth_running(first: &Measured) -> u32 {
    let most = first
        .decode
        .iter()
        .map(|decode| decode.tokens_per_s)
        .fold(0.0, f64::max);
    let enough = first
        .decode
        .iter()
        .find(|decode| decode.tokens_per_s >= ENOUGH * most);
    enough.map_or(1, |decode| decode.sequences)
}

/// What the search has found so far.
struct Found {
    best: Contender,
    /// The speedup over the defaults.
    times: f64,
    /// The largest ratio between two trials of the same flags.
    spread: Option<f64>,
}

/// Trials of the same flags, at least one.
struct Contender(Vec<Trial>);

impl Contender {
    fn flags(&self) -> &[String] {
        self.0.first().map_or(&[], |trial| &trial.flags)
    }

    /// The speedup over `other`: the geometric mean of the ratios of its rates, each the median of its trials.
    fn times(&self, other: &Self) -> f64 {
        self.rate() / other.rate()
    }

    /// The geometric mean of its rates.
    fn rate(&self) -> f64 {
        mean([
            self.median(|trial| trial.prefill_tokens_per_s),
            self.median(|trial| trial.one_sequence_tokens_per_s),
            self.median(|trial| trial.sequences_tokens_per_s),
        ])
    }

    fn median(&self, rate: fn(&Trial) -> f64) -> f64 {
        let mut rates: Vec<f64> = self.0.iter().map(rate).collect();
        rates.sort_unstable_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// The ratio of its fastest trial to its slowest.
    fn spread(&self) -> f64 {
        let rates = self.0.iter().map(Trial::rate);
        let (slowest, fastest) = rates.fold((f64::INFINITY, 0.0_f64), |(low, high), rate| {
            (low.min(rate), high.max(rate))
        });
        fastest / slowest
    }

    /// Whether its speedup is larger than the differences between trials of the same flags.
    fn is_faster(&self, other: &Self) -> bool {
        self.times(other) > BETTER.max(self.spread()).max(other.spread())
    }
}

/// The geometric mean.
fn mean(rates: [f64; 3]) -> f64 {
    rates.iter().product::<f64>().cbrt()
}

impl Trial {
    /// The geometric mean of its rates.
    fn rate(&self) -> f64 {
        mean([
            self.prefill_tokens_per_s,
            self.one_sequence_tokens_per_s,
            self.sequences_tokens_per_s,
        ])
    }

    fn line(&self) -> String {
        let flags = match self.flags.is_empty() {
            true => "defaults".to_owned(),
            false => self.flags.join(" "),
        };
        format!(
            "{flags}: prefill {:.0}/s, decode {:.0}/s alone, {:.0}/s for {}",
            self.prefill_tokens_per_s,
            self.one_sequence_tokens_per_s,
            self.sequences_tokens_per_s,
            self.sequences
        )
    }
}

impl Tuned {
    fn text(&self, model: &Path) -> String {
        let verdict = match self.times_the_defaults > BETTER {
            true => format!("{:.2} times as fast as the defaults", self.times_the_defaults),
            false => "no flag of speed makes it faster than the defaults by more than measurements differ".into(),
        };
        let differ = self.spread.map(|spread| {
            let percent = (spread - 1.0) * 100.0;
            format!("; trials of the same flags differ by up to {percent:.0} %")
        });
        let words: Vec<String> = self.flags.iter().map(|flag| quoted(flag)).collect();
        let cut = match self.is_cut {
            true => "stopped before the end; so far: ",
            false => "",
        };
        format!(
            "{cut}{verdict}{}\n\n  genset run {} {}\n",
            differ.unwrap_or_default(),
            quoted(&model.display().to_string()),
            words.join(" ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::engine::Decode;

    #[test]
    fn threads_are_tried_up_to_the_processors() {
        assert!(candidates_of(1, 1).is_empty());
        assert_eq!(candidates_of(2, 2), [1]);
        assert_eq!(candidates_of(16, 16), [8, 12, 15]);
        assert_eq!(candidates_of(16, 8), [12, 15, 16]);
    }

    #[test]
    fn more_sequences_are_worth_it_while_they_bring_more() {
        let decode = |(sequences, tokens_per_s)| Decode {
            sequences,
            tokens_per_s,
            outside_model: 0.0,
            accepted_drafts: None,
            rounds_apart: 0,
        };
        let rates = [(1, 10.0), (4, 30.0), (16, 60.0), (32, 62.0)];
        let first = Measured {
            decode: rates.map(decode).into(),
            ..Measured::default()
        };
        assert_eq!(worth_running(&first), 16);
    }

    #[test]
    fn the_command_serves_what_was_measured() {
        let measured = |device: &str, quantize| TuneArgs {
            model: "my model.gguf".into(),
            seconds: 1,
            context_tokens: None,
            device: device.to_owned(),
            quantize,
            json: false,
        };
        let by_default = measured(ANY_DEVICE, Quantization::default());
        assert!(by_default.flags_of_run().is_empty());
        let args = measured("cpu", Quantization::Q4K);
        let tuned = Tuned {
            model: "my model".into(),
            flags: args.flags_of_run(),
            times_the_defaults: 2.0,
            spread: Some(1.25),
            trials: Vec::new(),
            is_cut: false,
        };
        let expected = "2.00 times as fast as the defaults; trials of the same flags differ by up to 25 %\n\n  \
             genset run 'my model.gguf' --device=cpu --quantize=q4_k\n";
        assert_eq!(tuned.text(&args.model), expected);
    }

    /// Trials whose prefill has these rates.
    fn tried(rates: &[f64]) -> Contender {
        let trial = |rate: &f64| Trial {
            flags: Vec::new(),
            prefill_tokens_per_s: *rate,
            one_sequence_tokens_per_s: 1.0,
            sequences: 4,
            sequences_tokens_per_s: 1.0,
        };
        Contender(rates.iter().map(trial).collect())
    }

    #[test]
    fn flags_are_as_fast_as_the_medians_of_their_rates_together() {
        assert!((tried(&[8.0]).times(&tried(&[1.0])) - 2.0).abs() < 1e-9);
        let other = tried(&[7.0, 8.0, 64.0]);
        assert!((other.times(&tried(&[1.0, 0.1, 2.0])) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn flags_that_were_fast_once_are_not_faster() {
        let best = tried(&[1.0, 1.0, 1.0]);
        assert!(!tried(&[8.0, 1.0, 1.0]).is_faster(&best));
        // Twice as fast, where the same flags differ as much.
        assert!(!tried(&[8.0, 8.0, 1.0]).is_faster(&best));
        assert!(tried(&[8.0, 8.0, 8.1]).is_faster(&best));
    }
}
