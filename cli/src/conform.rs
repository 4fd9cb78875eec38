//! `genset conform`: the conformance kit as a command.

mod again;
mod compare;
mod follow;
mod presence;
mod run;
mod url;

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use genset_backend_common::EngineError;
use genset_conformance::{Check, Level, Options, Profile, catalogue, find, matrix};
use genset_runtime::{EndpointName, InstanceId, NetworkArgs};

use crate::args::EngineKind;
use crate::bench::serve::Key;
use crate::input::{escaped, print};

pub(crate) const HELP: &str = "\
Examples:
  genset conform list
  genset conform explain CN03
  genset conform run --engine sample
  genset conform run --engine sample --only CN,ST --json report.json --junit report.xml
  genset conform sequences --engine sample --cases 1000
  genset conform run --endpoint dyn://llama.backend.generate
  genset conform run --engine-cmd 'python3 my_engine.py'
  genset conform run --engine-cmd 'python3 my_engine.py' --only SP
  genset conform run --url http://127.0.0.1:8000
  genset conform replay report.json --engine sample
  genset conform replay --sequence 'start; generate#0 len=3 max=5; drop#0' --engine sample
  genset conform diff old.json new.json
  genset conform matrix reports/*.json > matrix.md

Exit codes: 0 good, 1 a check failed or got worse or a waiver is out of order, 2 usage or a file that cannot be read, 3 the live worker
is gone and does not come back, 130 interrupted (Ctrl-C); the results until then are reported.";

/// The seconds that a live worker may be away, if nothing else is asked for.
const WORKER_WAIT: u64 = 60;

/// What to do with the kit.
#[derive(Debug, Subcommand)]
pub(crate) enum ConformCommand {
    /// List the checks
    List {
        /// One JSON object a check, a line each
        #[arg(long)]
        json: bool,
    },
    /// Say what a check is about and what breaks for an engine that fails it
    Explain {
        /// The check's id, such as CN03
        id: String,
    },
    /// Run the checks on an engine
    Run(RunArgs),
    /// Run random sequences of operations against a model of the contract
    Sequences(SequencesArgs),
    /// Run again what failed in a report, and what its run did not reach, or run a sequence of operations
    Replay {
        /// The report, as --json wrote it
        #[arg(required_unless_present = "sequence", conflicts_with = "sequence")]
        report: Option<PathBuf>,
        /// The operations, as a failure printed them
        #[arg(long)]
        sequence: Option<String>,
        /// Seconds that a live worker may be away, until the rest is no longer run
        #[arg(long, default_value_t = WORKER_WAIT, value_name = "SECONDS", conflicts_with = "sequence")]
        worker_wait: u64,
        #[command(flatten)]
        subject: SubjectArgs,
    },
    /// Say what changed between two reports
    Diff {
        /// The earlier report
        old: PathBuf,
        /// The later report
        new: PathBuf,
    },
    /// Print reports side by side, as a Markdown table
    Matrix {
        /// The reports
        #[arg(required = true)]
        reports: Vec<PathBuf>,
    },
}

/// Which engine to test.
#[derive(Debug, Args)]
pub(crate) struct SubjectArgs {
    /// Engine in this process: candle (the built-in model), sample, scripted, mocker, echo_core or echo_full (which takes only text)
    #[arg(long)]
    engine: Option<EngineKind>,
    /// TOML file with the replies of the scripted engine, which speaks in the built-in model's tokens
    #[arg(long, env = "GENSET_SCRIPT", value_name = "FILE")]
    script: Option<PathBuf>,
    /// Live workers, as dyn://namespace.component.endpoint
    #[arg(long, value_name = "NAME", conflicts_with = "engine")]
    endpoint: Option<EndpointName>,
    /// One of the live workers, by its id
    #[arg(long, value_name = "ID", requires = "endpoint")]
    instance: Option<InstanceId>,
    /// Command that starts an engine as a child process
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["engine", "endpoint"])]
    engine_cmd: Option<String>,
    /// A server of OpenAI's API, such as http://127.0.0.1:8000: the checks of requests and their answers
    #[arg(long, value_name = "URL", conflicts_with_all = ["engine", "endpoint", "engine_cmd"])]
    url: Option<String>,
    /// The model that the server is asked for [default: the only one that it lists]
    #[arg(long, value_name = "NAME", requires = "url")]
    url_model: Option<String>,
    /// Requests that the server answers at once, where they are few: no more are asked at once whose answers are held back
    #[arg(long, value_name = "COUNT", requires = "url")]
    max_num_seqs: Option<NonZeroU32>,
    /// File or folder of the model's tokenizer.json, or a model of the Hugging Face Hub, so that what a grammar leaves is read as
    /// text; without it those checks are skipped
    #[arg(long, value_name = "PATH", conflicts_with_all = ["engine", "url"])]
    tokenizer: Option<PathBuf>,
    /// Seconds that the engine may take to start
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    start_timeout: u64,
    /// API key for the server
    #[arg(
        long,
        env = "OPENAI_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    api_key: Option<Key>,
    #[command(flatten, next_help_heading = "Live workers")]
    network: NetworkArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Highest level to run
    #[arg(long, value_enum, default_value = "strict")]
    level: LevelArg,
    /// Only checks whose ids start with one of these
    #[arg(long, value_delimiter = ',', value_name = "IDS")]
    only: Vec<String>,
    /// Varies the prompts
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Seconds that a live worker may be away, such as for a restart, until the run ends with the results so far
    #[arg(long, default_value_t = WORKER_WAIT, value_name = "SECONDS")]
    worker_wait: u64,
    /// Random sequences of operations that SQ01 tries
    #[arg(long, value_name = "COUNT", default_value_t = Options::default().sequences)]
    sequences: u32,
    /// File with the failures the engine's authors know of
    #[arg(long, value_name = "FILE")]
    waivers: Option<PathBuf>,
    /// A fact for the report about the engine or its machine, such as engine_version=0.9, commit=4f2c, features=cuda or
    /// accelerator=H200; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = fact)]
    about: Vec<(String, String)>,
    /// Write the report as JSON; - for standard output instead of the terminal's report
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

/// Splits a name and its value.
fn fact(text: &str) -> Result<(String, String), &'static str> {
    let named = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, value) = named.ok_or("must be NAME=VALUE, such as commit=4f2c")?;
    Ok((name.to_owned(), value.to_owned()))
}

#[derive(Debug, Args)]
pub(crate) struct SequencesArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Sequences to try
    #[arg(long, default_value_t = 256)]
    cases: u32,
    /// Makes the sequences repeatable [default: a random one, which is printed]
    #[arg(long)]
    seed: Option<u64>,
    /// File of sequences that failed before: run first, and added to
    #[arg(long, value_name = "FILE")]
    regressions: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LevelArg {
    /// What an engine must do to be called conformant
    Core,
    /// And what it should do
    Strict,
    /// And storms and leaks, which take minutes
    Soak,
}

impl From<LevelArg> for Level {
    fn from(level: LevelArg) -> Self {
        match level {
            LevelArg::Core => Self::Core,
            LevelArg::Strict => Self::Strict,
            LevelArg::Soak => Self::Soak,
        }
    }
}

/// Runs a command; returns the exit code.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the flag or the file.
pub(crate) fn perform(command: ConformCommand) -> Result<u8, EngineError> {
    match command {
        ConformCommand::List { json } => {
            print(&list(json));
            Ok(0)
        }
        ConformCommand::Explain { id } => {
            print(&explain(&id)?);
            Ok(0)
        }
        ConformCommand::Run(args) => run::run(&args),
        ConformCommand::Sequences(args) => run::sequences(&args),
        ConformCommand::Replay {
            report,
            sequence,
            worker_wait,
            subject,
        } => match (report, sequence) {
            (Some(report), _) => run::replay(&report, &subject, worker_wait),
            (None, sequence) => run::replay_operations(&sequence.unwrap_or_default(), &subject),
        },
        ConformCommand::Diff { old, new } => {
            let (text, is_worse) =
                compare::diff(&run::read_report(&old)?, &run::read_report(&new)?);
            print(&escaped(&text));
            Ok(u8::from(is_worse))
        }
        ConformCommand::Matrix { reports } => {
            let reports: Vec<_> = reports
                .iter()
                .map(|path| run::read_report(path))
                .collect::<Result<_, _>>()?;
            print(&escaped(&matrix(&reports)));
            Ok(0)
        }
    }
}

fn list(is_json: bool) -> String {
    let line = |check: &Check| {
        if is_json {
            let value = serde_json::json!({
                "id": check.id,
                "level": check.level.number(),
                "profile": check.profile.name(),
                "needs_tokens": check.needs_tokens,
                "title": check.title,
                "clause": check.clause,
                "breaks": check.breaks,
            });
            format!("{value}\n")
        } else {
            format!(
                "{}  {}  {:<13}  {}\n",
                check.id,
                check.level.number(),
                check.profile.name(),
                check.title
            )
        }
    };
    catalogue().map(line).collect()
}

fn explain(id: &str) -> Result<String, EngineError> {
    let check = find(id).ok_or_else(|| {
        EngineError::not_found(format!(
            "no check is called {id:?}; {}`genset conform list` lists them",
            of_its_group(id)
        ))
    })?;
    Ok(format!(
        "{}  {}\n\n  level    {}\n  applies  {}\n  clause   {}\n  breaks   {}\n\n  try it   genset conform run {} --only {}\n",
        check.id,
        check.title,
        match check.level {
            Level::Info => "a measurement: recorded, never judged",
            Level::Core => "1: required for the word \"conformant\"",
            Level::Strict => "2: an engine should",
            Level::Soak => "3: soak",
        },
        applies(check),
        check.located_clause(),
        check.breaks,
        if check.profile == Profile::Subprocess {
            "--engine-cmd COMMAND"
        } else {
            "--engine sample"
        },
        check.id,
    ))
}

/// The checks of the group that a word begins with, such as CN, if there is one.
fn of_its_group(word: &str) -> String {
    let group: String = word.chars().take(2).collect();
    let is_of_it = |id: &&str| id[..2].eq_ignore_ascii_case(&group);
    let ids: Vec<&str> = catalogue().map(|check| check.id).filter(is_of_it).collect();
    match &ids[..] {
        [] => String::new(),
        [first, ..] => format!("those of {} are {}; ", &first[..2], ids.join(", ")),
    }
}

/// The engines that a check applies to.
fn applies(check: &Check) -> String {
    let is_for_all = check.profile == Profile::Tokens;
    let engines = if is_for_all {
        "to every engine".to_owned()
    } else if check.profile == Profile::Subprocess {
        "to engines in a process of their own (--engine-cmd)".to_owned()
    } else {
        format!("to engines that declare {}", check.profile.name())
    };
    match (check.needs_tokens, is_for_all) {
        (true, true) => format!("{engines} that takes tokens"),
        (true, false) => format!("{engines}, and take tokens"),
        (false, _) => engines,
    }
}
