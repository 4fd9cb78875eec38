//! `genset bench serve`: measures how fast a server of OpenAI's API answers a load, as its clients see it.
//!
//! The loads and the figures are those of `genset simulate`, so that a simulated fleet and a measured one can be compared.

mod client;
mod drive;
mod prompts;
mod report;
mod tally;
mod target;

use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use genset_backend_common::EngineError;
use genset_simulate::{Load, Single};

use super::CUT;
use crate::bench::progress::telling_if_long;
use crate::input::{escaped, note, print, print_json};
use crate::results;
use crate::simulate::{LoadArgs, LoadKind};
use crate::threads;
use client::Client;
use drive::{Arrivals, Measured, Plan, drive};
use report::{Report, Row};
use tally::Slo;
use target::Target;

/// The exit code of a run in which requests failed.
const LOST: u8 = 1;

/// The seed of warm-up requests: they must not fill a prefix cache for the measured ones.
const WARM_UP_SEED: u64 = 0x5EED;

/// The default number of concurrent requests.
const CONCURRENCY: u32 = 8;

/// The number of requests if neither a number nor a time is given.
const REQUESTS: u64 = 100;

#[derive(Debug, Args)]
pub(crate) struct ServeBenchArgs {
    /// Servers, such as http://127.0.0.1:8080, which are measured one after the other
    #[arg(value_name = "URL", required = true)]
    urls: Vec<String>,
    /// Model to ask for [default: the only one that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// API to measure
    #[arg(long, value_enum, default_value_t = ApiName::Chat)]
    api: ApiName,
    /// API key for the server
    #[arg(
        long,
        env = "OPENAI_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    api_key: Option<Key>,
    /// Kind of load
    #[arg(long, value_enum, default_value_t = LoadKind::Single, conflicts_with = "trace")]
    load: LoadKind,
    #[command(flatten)]
    loads: LoadArgs,
    /// Requests or conversations that begin in a second, on average, whatever the server does
    #[arg(long, value_name = "RATE", conflicts_with_all = ["trace", "concurrency"])]
    rate: Option<f64>,
    /// Requests or conversations at once, each as soon as one before it has ended [default: 8, where there is no --rate or
    /// --trace]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    concurrency: Option<u32>,
    /// Requests in all [default: 100, or no end with --duration; of a trace, at most]
    #[arg(long, value_name = "COUNT")]
    requests: Option<NonZeroU64>,
    /// Seconds after which no request begins
    #[arg(long, value_name = "SECONDS")]
    duration: Option<NonZeroU32>,
    /// Requests before those that are measured
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    warm_up: u64,
    /// An answer is a good one if its first token comes within so many milliseconds
    #[arg(long, visible_alias = "slo-ttft", value_name = "MS")]
    slo_ttft_ms: Option<NonZeroU32>,
    /// And if its tokens come so many milliseconds apart, or less, on average
    #[arg(long, visible_alias = "slo-itl", value_name = "MS")]
    slo_itl_ms: Option<NonZeroU32>,
    /// Seconds of silence after which a request has failed
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    timeout: NonZeroU32,
    /// Varies load and prompts; one seed gives the same again
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// SVG file to write: the distribution of TTFT of each server
    #[arg(long, visible_alias = "svg", value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// An API of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ApiName {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions, with token ids where the server tokenizes
    Completions,
}

impl ApiName {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

/// An API key, which never appears in a log.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl From<String> for Key {
    fn from(key: String) -> Self {
        Self(key)
    }
}

/// Measures and prints; returns the exit code.
///
/// # Errors
/// `InvalidArgument`: a flag or a file is wrong, or a server cannot be measured; says what to do.
pub(super) fn perform(args: &ServeBenchArgs) -> Result<u8, EngineError> {
    let runtime = threads::of_every_core()?;
    if let Some(path) = &args.plot {
        results::check("--plot", path)?;
    }
    let report = runtime.block_on(measure(args))?;
    if args.json {
        print_json(&report)?;
    } else {
        print(&escaped(&report.to_string()));
    }
    if let Some(path) = &args.plot {
        results::write("--plot", path, &report.curves().svg())?;
    }
    let is_any = |holds: fn(&Row) -> bool| report.rows.iter().any(holds);
    Ok(if is_any(|row| row.is_cut) {
        CUT
    } else if is_any(|row| row.lost_requests() > 0) {
        LOST
    } else {
        0
    })
}

async fn measure(args: &ServeBenchArgs) -> Result<Report, EngineError> {
    let plan = args.plan()?;
    let mut targets = Vec::new();
    for url in &args.urls {
        // The future is large.
        let found = Box::pin(args.find(url, &plan.load));
        let found = telling_if_long(found, || note("waiting for the first answers of a server"));
        targets.push(Arc::new(found.await?));
    }
    let mut rows = Vec::new();
    for target in &targets {
        if args.urls.len() > 1 {
            note(format_args!("measuring {}", target.client.shown()));
        }
        if args.warm_up > 0 {
            let warm = drive(target, &plan.warm_up(args.warm_up), "warming up").await?;
            if warm.is_cut {
                rows.push(Row::new(target, Measured::nothing(), plan.slo));
                break;
            }
        }
        let measured = drive(target, &plan, "measuring").await?;
        rows.push(Row::new(target, measured, plan.slo));
        if rows.iter().any(|row| row.is_cut) {
            break;
        }
    }
    Ok(Report {
        load: plan.load.name(),
        arrivals: args.arrivals_in_words(plan.arrivals),
        api: args.api.path(),
        seed: args.seed,
        slo_ttft_ms: args.slo_ttft_ms.map(|ms| ms.get().into()),
        slo_itl_ms: args.slo_itl_ms.map(|ms| ms.get().into()),
        rows,
    })
}

impl ServeBenchArgs {
    fn plan(&self) -> Result<Plan, EngineError> {
        let arrivals = match (self.concurrency, self.rate) {
            (Some(concurrency), _) => Arrivals::Closed(concurrency),
            (None, Some(_)) => Arrivals::Open,
            (None, None) if self.loads.is_trace() => Arrivals::Open,
            (None, None) => Arrivals::Closed(CONCURRENCY),
        };
        let requests = match (self.requests, self.duration) {
            (Some(requests), _) => Some(requests.get()),
            (None, Some(_)) => None,
            (None, None) if self.loads.is_trace() => None,
            (None, None) => Some(REQUESTS),
        };
        let rate = self.rate.unwrap_or(1.0);
        let load = (self.loads).load(self.load, rate, requests.unwrap_or(u64::MAX))?;
        let is_counted = requests.is_some() || self.duration.is_none();
        let ms = |ms: Option<NonZeroU32>| ms.map(|ms| Duration::from_millis(ms.get().into()));
        Ok(Plan {
            requests: is_counted.then(|| load.requests()),
            load: Arc::new(load),
            seed: self.seed,
            arrivals,
            duration: self.duration.map(|it| Duration::from_secs(it.get().into())),
            slo: Slo {
                ttft: ms(self.slo_ttft_ms),
                itl: ms(self.slo_itl_ms),
            },
        })
    }

    async fn find(&self, url: &str, load: &Load) -> Result<Target, EngineError> {
        let silence = Duration::from_secs(self.timeout.get().into());
        let key = self.api_key.as_ref().map(|key| key.0.clone());
        let client = Client::try_new(url, key, silence)?;
        let is_conversation = matches!(load, Load::Synthetic(_));
        Target::find(client, self.model.as_deref(), self.api, is_conversation).await
    }

    fn arrivals_in_words(&self, arrivals: Arrivals) -> String {
        match (arrivals, self.rate) {
            (Arrivals::Closed(1), _) => "one at a time".into(),
            (Arrivals::Closed(concurrency), _) => format!("{concurrency} at once"),
            (Arrivals::Open, Some(rate)) => format!("{rate} a second"),
            (Arrivals::Open, None) => "at the times of the trace".into(),
        }
    }
}

impl Plan {
    /// The warm-up requests: short ones, because they warm connections and code.
    fn warm_up(&self, requests: u64) -> Self {
        let single = Single {
            requests,
            requests_per_s: 1.0,
            input: genset_simulate::Lengths::Fixed(32),
            output: genset_simulate::Lengths::Fixed(8),
            prefix_tokens: 0,
            prefixes: 1,
        };
        let at_once = match self.arrivals {
            Arrivals::Closed(concurrency) => concurrency,
            Arrivals::Open => CONCURRENCY,
        };
        Self {
            load: Arc::new(Load::Single(single)),
            seed: self.seed ^ WARM_UP_SEED,
            arrivals: Arrivals::Closed(at_once),
            duration: None,
            requests: Some(requests),
            slo: Slo::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: ServeBenchArgs,
    }

    #[test]
    fn a_run_whose_requests_are_counted_shows_how_many_are_left() {
        let trace = tempfile::NamedTempFile::new().unwrap();
        let line = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#;
        std::fs::write(trace.path(), format!("{line}\n{line}\n")).unwrap();
        let trace = format!("--trace={}", trace.path().display());
        let cases: [(&[&str], Option<u64>); 6] = [
            (&[], Some(REQUESTS)),
            (&["--duration=9"], None),
            (&[&trace], Some(2)),
            (&[&trace, "--requests=1"], Some(1)),
            (&[&trace, "--requests=7"], Some(2)),
            (&[&trace, "--duration=9"], None),
        ];
        for (flags, expected) in cases {
            let words = [&["bench", "http://a"][..], flags].concat();
            let plan = Line::parse_from(words).bench.plan().unwrap();
            assert_eq!(plan.requests, expected, "{flags:?}");
            assert_eq!(plan.warm_up(3).requests, Some(3));
        }
    }
}
