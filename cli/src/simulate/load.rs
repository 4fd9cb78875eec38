//! [`LoadArgs`]: the flags of a load, for simulated fleets and for measured servers.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use genset_backend_common::EngineError;
use genset_simulate::{Kind, Lengths, Load, Single, Synthetic};

use super::read;

/// Rarer requests would come at times that no clock has.
const MIN_RATE: f64 = 1e-6;

/// What a load is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadKind {
    /// People who chat, with one of many system prompts
    Chat,
    /// Agents that call tools, with one of a few long prompts
    Agent,
    /// Requests that know nothing of each other
    Single,
}

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// Tokens of a single request's prompt: a number, a range such as 100-400, or sharegpt
    #[arg(long, value_name = "LENGTHS", conflicts_with = "trace")]
    input_tokens: Option<Lengths>,
    /// Tokens of its answer
    #[arg(long, value_name = "LENGTHS", conflicts_with = "trace")]
    output_tokens: Option<Lengths>,
    /// Tokens in front of a single request's prompt that it shares with others
    #[arg(long, value_name = "TOKENS", conflicts_with = "trace", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prefix_tokens: Option<u32>,
    /// Different beginnings of that length
    #[arg(long, value_name = "COUNT", requires = "prefix_tokens", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    prefixes: Option<u64>,
    /// JSON lines with requests that were recorded, in Mooncake's format
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl LoadArgs {
    /// Whether requests arrive at their recorded times.
    pub(crate) fn is_trace(&self) -> bool {
        self.trace.is_some()
    }

    /// The load: the trace, or `requests` generated requests that arrive at `rate` per second.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag or the file.
    pub(crate) fn load(
        &self,
        kind: LoadKind,
        rate: f64,
        requests: u64,
    ) -> Result<Load, EngineError> {
        if let Some(path) = &self.trace {
            return Load::read_trace(&read("--trace", path)?, requests);
        }
        if !(rate.is_finite() && rate >= MIN_RATE) {
            let problem = format!("must be a finite number from {MIN_RATE} on, got {rate}");
            return Err(EngineError::invalid_argument("--rate", problem));
        }
        let conversations = |kind| {
            Load::Synthetic(Synthetic {
                kind,
                sessions_per_s: rate,
                requests,
            })
        };
        match kind {
            LoadKind::Single => Ok(Load::Single(Single {
                requests,
                requests_per_s: rate,
                input: self.input_tokens.unwrap_or(Lengths::ShareGpt),
                output: self.output_tokens.unwrap_or(Lengths::ShareGpt),
                prefix_tokens: self.prefix_tokens.unwrap_or(0),
                prefixes: self.prefixes.unwrap_or(1),
            })),
            LoadKind::Chat => self.without_lengths().map(|()| conversations(Kind::Chat)),
            LoadKind::Agent => self.without_lengths().map(|()| conversations(Kind::Agent)),
        }
    }

    /// Refuses lengths, because conversations have their own.
    fn without_lengths(&self) -> Result<(), EngineError> {
        let given = [
            ("--input-tokens", self.input_tokens.is_some()),
            ("--output-tokens", self.output_tokens.is_some()),
            ("--prefix-tokens", self.prefix_tokens.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Err(EngineError::invalid_argument(
                flag,
                "is for single requests; add --load single",
            )),
            None => Ok(()),
        }
    }
}
