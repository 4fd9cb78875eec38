//! Runs, replays and reads reports.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::card::MAX_ARTIFACT_BYTES;
use genset_backend_common::text_file::read_text;
use genset_backend_common::{EngineError, LLMEngine, StartContext};
use genset_conformance::{
    Detokenize, Options, Report, Scenario, SequenceFailure, SequenceOptions, SequenceReport,
    SkipReason, Subject, Verdict, Waivers, replay_sequence_with, run_conformance_observed,
    run_sequences,
};
use genset_engine_candle::CandleArgs;
use genset_engine_echo::{EchoArgs, EchoCore, EchoFull};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel, TimeModel};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_engine_subprocess::SupervisedProcess;
use genset_frontend::text::TextTokenizer;
use genset_runtime::{EndpointName, Reach, RemoteConfig, RemoteEngine, shows_colours};

use super::again::replay_line;
use super::follow::{Follower, counted};
use super::presence::Presence;
use super::{RunArgs, SequencesArgs, SubjectArgs, url};
use crate::args::{EngineKind, required_script};
use crate::engine::candle::BuiltInFiles;
use crate::engine::{self, scripted::Parts};
use crate::hub;
use crate::input::{complain, escaped, print};
use crate::results;
use crate::signals::interrupt_token;
use crate::threads;

/// Pause before each token under test, in milliseconds. The clock is paused, so this takes no real time, but answers take long
/// enough to be cancelled.
const TOKEN_DELAY_MS: u64 = 1;

/// The exit code of a run whose worker disappeared for good.
const WORKER_GONE: u8 = 3;

/// The exit code of an interrupted run, as shells give it to a process that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// Makes an engine for a check.
pub(super) type BoxFactory = Box<dyn Fn(&Scenario) -> Subject + Send + Sync>;

fn factory(subject: &SubjectArgs) -> Result<BoxFactory, EngineError> {
    let subjects = with_text(subject)?;
    let timeout = Duration::from_secs(subject.start_timeout);
    Ok(Box::new(move |scenario| {
        subjects(scenario).with_start_timeout(timeout)
    }))
}

/// Adds the decoder of `--tokenizer`, if it is set.
fn with_text(subject: &SubjectArgs) -> Result<BoxFactory, EngineError> {
    let Some(path) = &subject.tokenizer else {
        return engines(subject);
    };
    let path = hub::tokenizer("--tokenizer", path)?;
    let text = detokenize(tokenizer_at(&path)?);
    let engines = engines(subject)?;
    Ok(Box::new(move |scenario| {
        engines(scenario).with_text(Arc::clone(&text))
    }))
}

/// Loads the tokenizer from a folder or a file.
///
/// # Errors
/// `InvalidArgument` if it cannot be read or is not a tokenizer.
fn tokenizer_at(path: &Path) -> Result<TextTokenizer, EngineError> {
    let file = match path.is_dir() {
        true => path.join("tokenizer.json"),
        false => path.to_owned(),
    };
    let refused = |problem: String| {
        let problem = format!("{}: {problem}", file.display());
        EngineError::invalid_argument("--tokenizer", problem)
    };
    let text = read_text(&file, MAX_ARTIFACT_BYTES)
        .map_err(|error| refused(error.to_string()).with_source(error))?;
    TextTokenizer::from_bytes(text.as_bytes())
        .map_err(|error| refused(error.to_string()).with_source(error))
}

fn detokenize(tokenizer: TextTokenizer) -> Detokenize {
    Arc::new(move |tokens| tokenizer.decode_all(tokens, true).unwrap_or_default())
}

fn engines(subject: &SubjectArgs) -> Result<BoxFactory, EngineError> {
    if let Some(endpoint) = &subject.endpoint {
        return live_worker(subject, endpoint);
    }
    if let Some(command) = &subject.engine_cmd {
        let config = engine::subprocess(command)?;
        let process = SupervisedProcess::new(config);
        return Ok(Box::new(move |_| process.subject()));
    }
    if let Some(url) = &subject.url {
        return url::factory(subject, url);
    }
    let kind = subject.engine.ok_or_else(|| {
        EngineError::invalid_argument(
            "--engine, --endpoint, --engine-cmd, --url",
            "say which engine to test",
        )
    })?;
    match kind {
        EngineKind::Candle => candle(),
        EngineKind::Sample => Ok(sample()),
        EngineKind::Scripted => scripted(subject),
        EngineKind::Mocker => mocker(),
        EngineKind::Cmd | EngineKind::Apart(_) => Err(EngineError::invalid_argument(
            "--engine",
            "an engine in a process of its own is tested with --engine-cmd COMMAND",
        )),
        EngineKind::Server(_) => Err(EngineError::invalid_argument(
            "--engine",
            "a server is tested where it runs: start it with in=dyn and name it with --endpoint",
        )),
        EngineKind::EchoCore => Ok(Box::new(|_| {
            Subject::new(EchoCore::from_args(&ECHO, VOCAB_SIZE, CONTEXT_LENGTH))
        })),
        EngineKind::EchoFull => Ok(Box::new(|_| Subject::new(EchoFull::from_args(&ECHO)))),
    }
}

/// The model for engines that have none of their own.
const VOCAB_SIZE: u32 = 1000;
const CONTEXT_LENGTH: u32 = 4096;

const ECHO: EchoArgs = EchoArgs {
    token_echo_delay_ms: TOKEN_DELAY_MS,
};

fn sample() -> BoxFactory {
    let args = SampleArgs {
        vocab_size: VOCAB_SIZE,
        token_delay_ms: TOKEN_DELAY_MS,
    };
    Box::new(move |_| Subject::new(SampleEngine::from_args(&args)))
}

/// Steps take a millisecond, and the cache is small enough to fill.
fn mocker() -> Result<BoxFactory, EngineError> {
    let args = MockerArgs {
        num_gpu_blocks: 512,
        max_num_seqs: 16,
        max_num_batched_tokens: 512,
        prefill_ms: TimeModel::constant(1.0),
        decode_ms: TimeModel::constant(1.0),
        ..MockerArgs::default()
    };
    let model = MockerModel::new(VOCAB_SIZE, CONTEXT_LENGTH);
    let engine = MockerEngine::try_new(args, model)?;
    Ok(Box::new(move |_| Subject::new(engine.fresh())))
}

/// The built-in model, with a cache small enough to fill.
fn candle() -> Result<BoxFactory, EngineError> {
    let args = CandleArgs {
        kv_cache_memory: Some(ByteSize(8 << 20)),
        max_num_seqs: Some(16),
        ..CandleArgs::default()
    };
    let files = BuiltInFiles::unpack()?;
    let text = detokenize(engine::scripted::tokenizer(&engine::tiny_chat()?)?);
    Ok(Box::new(move |_| {
        Subject::new(files.engine(&args)).with_text(Arc::clone(&text))
    }))
}

/// Uses the built-in model's tokens, because the kit sends tokens.
fn scripted(subject: &SubjectArgs) -> Result<BoxFactory, EngineError> {
    let script = required_script(subject.script.as_deref())?;
    let folder = engine::tiny_chat()?;
    let context = engine::context_length(&folder, None)?;
    let parts = Parts::of_tokens(script, &folder, context)?;
    Ok(Box::new(move |_| Subject::new(parts.engine())))
}

/// The workers of an endpoint, once one is found.
///
/// # Errors
/// `Unavailable`, or an error about the network flags: reported once, not by every check.
fn live_worker(subject: &SubjectArgs, endpoint: &EndpointName) -> Result<BoxFactory, EngineError> {
    let engine = remote(subject, endpoint);
    start_once(&engine())?;
    Ok(Box::new(move |_| Subject::new(engine())))
}

/// Connects to the workers of an endpoint as an engine.
fn remote(
    subject: &SubjectArgs,
    endpoint: &EndpointName,
) -> impl Fn() -> RemoteEngine + Send + Sync + use<> {
    let network = subject.network.clone();
    let mut config = RemoteConfig::new(endpoint.clone());
    config.instance = subject.instance;
    move || {
        let network = network.clone();
        RemoteEngine::connecting(
            move || {
                let network = network.clone();
                async move { network.runtime(Reach::OtherProcesses).await }.boxed()
            },
            config.clone(),
        )
    }
}

fn start_once(engine: &RemoteEngine) -> Result<(), EngineError> {
    let runtime = threads::this_one()?;
    runtime.block_on(async {
        engine.start(StartContext::detached(1)).await?;
        engine.cleanup().await
    })
}

/// # Errors
/// `InvalidArgument` if no check's id starts with one of `only`.
fn ensure_known(only: &[String], named_by: &'static str) -> Result<(), EngineError> {
    for prefix in only {
        let is_known =
            genset_conformance::catalogue().any(|check| check.id.starts_with(prefix.as_str()));
        if !is_known {
            let problem =
                format!("no check's id starts with {prefix:?}; `genset conform list` lists them");
            return Err(EngineError::invalid_argument(named_by, problem));
        }
    }
    Ok(())
}

pub(super) fn run(args: &RunArgs) -> Result<u8, EngineError> {
    ensure_known(&args.only, "--only")?;
    let waivers = args.waivers.as_deref().map(read_waivers).transpose()?;
    let replay = replay_line("run");
    let options = Options {
        level: args.level.into(),
        only: match &args.subject.url {
            Some(_) => url::askable(&args.only)?,
            None => args.only.clone(),
        },
        sequences: args.sequences,
        replay,
        about: args.about.iter().cloned().collect(),
        seed: args.seed,
        ..Options::default()
    };
    let is_for_programs = args.json.as_deref() == Some(Path::new("-"));
    let json_file = args.json.as_deref().filter(|_| !is_for_programs);
    for (flag, file) in [("--json", json_file), ("--junit", args.junit.as_deref())] {
        if let Some(path) = file {
            results::check(flag, path)?;
        }
    }
    let (mut report, early_end) = followed(&args.subject, args.worker_wait, &options)?;
    if let Some(waivers) = &waivers {
        report.apply(waivers);
    }
    let json = || {
        report.to_json().map_err(|error| {
            EngineError::internal("the report cannot be written as JSON").with_source(error)
        })
    };
    match is_for_programs {
        true => print(&(json()? + "\n")),
        false => print(&report.to_terminal(shows_colours(&std::io::stdout()))),
    }
    if let Some(path) = json_file {
        results::write("--json", path, &json()?)?;
    }
    if let Some(path) = &args.junit {
        results::write("--junit", path, &report.to_junit())?;
    }
    Ok(early_end.unwrap_or_else(|| u8::from(!report.is_good())))
}

/// Runs checks, and shows their progress. Also returns the exit code of a run whose live worker was away for longer than
/// `worker_wait` seconds, which the report does not say if it was after the last check, or that was interrupted.
fn followed(
    subject: &SubjectArgs,
    worker_wait: u64,
    options: &Options,
) -> Result<(Report, Option<u8>), EngineError> {
    let endpoint = subject.endpoint.as_ref();
    let presence = Presence {
        worker: endpoint.map(|endpoint| {
            let worker = remote(subject, endpoint);
            Box::new(worker) as Box<dyn Fn() -> RemoteEngine>
        }),
        limit: Duration::from_secs(worker_wait),
    };
    let factory = factory(subject)?;
    let mut follower = Follower::new(presence, interrupt_token()?);
    let report = run_conformance_observed(factory, options, &mut follower);
    let code = match follower.into_gone() {
        Some(gone) => {
            if report.end().is_none() {
                complain(gone);
            }
            Some(WORKER_GONE)
        }
        None => report.end().map(|_| INTERRUPTED),
    };
    Ok((report, code))
}

/// Repeats the checks of a report that failed, and runs those that its run did not reach.
pub(super) fn replay(
    path: &Path,
    subject: &SubjectArgs,
    worker_wait: u64,
) -> Result<u8, EngineError> {
    let old = read_report(path)?;
    let is_left = |verdict: &Verdict| match verdict {
        Verdict::Fail { .. } | Verdict::UnexpectedPass { .. } | Verdict::ExpectedFail { .. } => {
            true
        }
        Verdict::Skip { code, .. } => *code == SkipReason::Gone,
        Verdict::Pass | Verdict::Measured { .. } => false,
    };
    let left: Vec<String> = old
        .checks
        .iter()
        .filter(|check| is_left(&check.verdict))
        .map(|check| check.tried().to_owned())
        .collect();
    if left.is_empty() {
        print("Nothing failed in this report.\n");
        return Ok(0);
    }
    ensure_known(&left, "report")?;
    let options = Options {
        level: genset_conformance::Level::Soak,
        only: left,
        replay: replay_line("run"),
        seed: old.seed,
        sequences: old.sequences,
        ..Options::default()
    };
    let (report, early_end) = followed(subject, worker_wait, &options)?;
    print(&report.to_terminal(shows_colours(&std::io::stdout())));
    Ok(early_end.unwrap_or_else(|| u8::from(!report.is_good())))
}

/// Runs random sequences of operations.
pub(super) fn sequences(args: &SequencesArgs) -> Result<u8, EngineError> {
    if let Some(path) = &args.regressions {
        results::check("--regressions", path)?;
    }
    let options = SequenceOptions {
        cases: args.cases,
        seed: args.seed,
        regressions: args.regressions.clone(),
        replay: replay_line("replay"),
        ..SequenceOptions::default()
    };
    let (factory, bar) = counted(factory(&args.subject)?, args.cases);
    let tried = run_sequences(factory, &options);
    bar.finish_and_clear();
    match tried {
        Ok(report) => {
            print(&kept(args.cases, &report));
            Ok(0)
        }
        Err(failure) => told(&failure),
    }
}

/// The message for `asked` sequences without a violation.
fn kept(asked: u32, report: &SequenceReport) -> String {
    let (cases, seed) = (report.cases, report.seed);
    if asked > 0 && cases == 0 {
        return "None was tried: the engine takes no prompts.\n".to_owned();
    }
    format!("{cases} sequences kept the contract (seed {seed}).\n")
}

/// Repeats one sequence of operations.
pub(super) fn replay_operations(text: &str, subject: &SubjectArgs) -> Result<u8, EngineError> {
    let options = SequenceOptions {
        replay: replay_line("replay"),
        ..SequenceOptions::default()
    };
    let (factory, bar) = counted(factory(subject)?, 1);
    let tried = replay_sequence_with(text, factory, &options);
    bar.finish_and_clear();
    match tried {
        Ok(()) => {
            print("The sequence kept the contract.\n");
            Ok(0)
        }
        Err(failure) => told(&failure),
    }
}

/// A violation is a result; anything else is a usage error.
fn told(failure: &SequenceFailure) -> Result<u8, EngineError> {
    if failure.violated().is_none() {
        return Err(EngineError::invalid_argument(
            "--sequence, --regressions",
            failure,
        ));
    }
    print(&escaped(&format!("{failure}\n")));
    Ok(1)
}

/// The largest report, in bytes. Transcripts of all checks are a few MiB.
const MAX_REPORT_BYTES: u64 = 64 << 20;

/// The largest file of waivers, in bytes.
const MAX_WAIVERS_BYTES: u64 = 1 << 20;

pub(super) fn read_report(path: &Path) -> Result<Report, EngineError> {
    let problem = |error: &dyn std::fmt::Display| {
        EngineError::invalid_argument("report", format!("{}: {error}", path.display()))
    };
    let text = read_text(path, MAX_REPORT_BYTES).map_err(|error| problem(&error))?;
    Report::from_json(&text).map_err(|error| problem(&error))
}

fn read_waivers(path: &Path) -> Result<Waivers, EngineError> {
    let problem = |error: &dyn std::fmt::Display| {
        EngineError::invalid_argument("--waivers", format!("{}: {error}", path.display()))
    };
    let text = read_text(path, MAX_WAIVERS_BYTES).map_err(|error| problem(&error))?;
    Waivers::parse(&text).map_err(|error| problem(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_that_were_not_tried_kept_nothing() {
        let of = |cases| SequenceReport {
            seed: 7,
            cases,
            regressions: 0,
        };
        let none = "None was tried: the engine takes no prompts.\n";
        assert_eq!(kept(8, &of(0)), none);
        assert_eq!(kept(8, &of(8)), "8 sequences kept the contract (seed 7).\n");
        assert_eq!(kept(0, &of(0)), "0 sequences kept the contract (seed 7).\n");
    }
}
