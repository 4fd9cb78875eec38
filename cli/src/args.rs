//! The command line: `genset run in=... out=... [MODEL]` and its flags, checked once.

mod access;
mod engine;
mod http;
mod words;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use genset_backend_common::EngineError;
use genset_frontend::{FrontendConfig, ParserNames};
use genset_runtime::{EndpointName, WorkerArgs};

use crate::bench::{self, BenchCommand};
use crate::conform::{self, ConformCommand};
use crate::layers;

use self::http::HttpArgs;
use engine::{EngineArgs, check_engine, check_words};
pub(crate) use engine::{is_gguf, required_command, required_model, required_script};
use words::command_in;
pub(crate) use words::{EngineKind, InputKind, OutputKind};

const RUN_HELP: &str = "\
Words:
  in=http    serve the OpenAI API
  in=text    chat on the terminal (the default)
  in=stdin   answer what comes on standard input, once
  in=dyn     be a worker that other processes find; in=dyn://NAMESPACE.COMPONENT.ENDPOINT names it
  out=candle     answer with a language model, on the CPU or a GPU (the default)
  out=echo_core  answer with the prompt's tokens
  out=echo_full  answer with the prompt's text
  out=sample     answer with rotating tokens
  out=scripted   answer what a script says (--script), as text; with a MODEL, as its tokens
  out=cmd:COMMAND  answer with an engine in a process of its own, in any language: 'out=cmd:python3 my_engine.py'
  out=vllm, sglang, trtllm, llamacpp  start that server and answer with it
  out=dyn        send requests to the workers there are; out=dyn://NAME to those of that name
  MODEL      folder of a local model checkout [default: the built-in tiny-chat]; for candle and llamacpp also a GGUF file

Examples:
  genset run in=http
  genset run in=http ./Qwen3-0.6B-Q8_0.gguf
  genset run in=text out=echo_full
  echo 'What is the capital of France?' | genset run in=stdin
  genset run in=http out=sample ./Llama-3.2-3B-Instruct --http-port 9000
  genset run in=http out=scripted --script mock.toml --tool-parser hermes
  genset run in=http out=vllm ./Llama-3.2-3B-Instruct --tensor-parallel-size 2
  genset run out=llamacpp ./Qwen3-0.6B-Q8_0.gguf
  genset run in=dyn://llama out=sample ./Llama-3.2-3B-Instruct    a worker, and in another terminal
  genset run in=http out=dyn                                      the frontend that finds it

Every setting may also stand in a TOML file (--config) under its long name; the words are `in`, `out` and `model`.
Words and flags win over the environment, the environment over the file. --print-config shows what holds and where it
comes from.

Exit codes: 0 clean, 1 failed, 2 usage or configuration, 3 stopped before its work was done.";

/// One flag for both ends, so that a process that is worker and server in one needs no second.
const TOOL_PARSER_HELP: &str = "\
Parser of tool calls, such as hermes; none for none. A worker publishes it with its model; a server takes it for every \
model, whatever its worker published; a process that is both does both [default: what the worker published]";

const REASONING_PARSER_HELP: &str = "\
Parser of thoughts, such as qwen3; otherwise as --tool-parser";

#[derive(Debug, Parser)]
#[command(
    name = "genset",
    version,
    about = "Serve, chat with and inspect LLM inference engines"
)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run an engine behind an input
    #[command(after_help = RUN_HELP)]
    Run(Box<RunArgs>),
    /// Check whether an engine keeps the contract
    #[command(after_help = conform::HELP)]
    Conform {
        #[command(subcommand)]
        command: Box<ConformCommand>,
    },
    /// Make an API key, and the lines for the file of --api-keys
    Key {
        /// What metrics and logs call the key
        name: String,
    },
    /// Make models for benchmarks, and measure engines
    #[command(after_help = bench::HELP)]
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
}

#[derive(Debug, Args)]
struct RunArgs {
    /// in=INPUT, out=ENGINE and MODEL, in any order
    #[arg(value_name = "in=INPUT | out=ENGINE | MODEL")]
    words: Vec<OsString>,
    /// What `in=INPUT` sets
    #[arg(long = "in", hide = true, default_value = "text")]
    input: String,
    /// What `out=ENGINE` sets
    #[arg(long = "out", hide = true, default_value = "candle")]
    output: String,
    #[command(flatten, next_help_heading = "HTTP")]
    http: HttpArgs,
    #[command(flatten, next_help_heading = "Engine")]
    engine: EngineArgs,
    #[command(flatten, next_help_heading = "Worker")]
    worker: WorkerArgs,
    /// TOML file with flags, by their long names
    #[arg(long, env = "GENSET_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Show every setting with its source, and end
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, default_missing_value = "toml", require_equals = true)]
    print_config: Option<PrintFormat>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum PrintFormat {
    Toml,
    Json,
}

/// What `genset run` does, checked.
#[derive(Debug)]
pub(crate) struct RunConfig {
    pub(crate) input: InputKind,
    pub(crate) output: OutputKind,
    /// The name the worker serves under, if there is a worker.
    pub(crate) name: EndpointName,
    pub(crate) engine_args: EngineArgs,
    pub(crate) worker: WorkerArgs,
    pub(crate) frontend: FrontendConfig,
}

/// What the command line asks for.
#[derive(Debug)]
pub(crate) enum Command {
    Run(Box<RunConfig>),
    /// Print this, and end.
    Print(String),
    Conform(Box<ConformCommand>),
    Bench(BenchCommand),
    /// Make an API key of this name.
    Key(String),
}

/// Reads the command line, the environment and the file.
///
/// Prints help, or clap's error, and exits when there is nothing to run.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the word, the flag, or the file and its key.
pub(crate) fn parse() -> Result<Command, EngineError> {
    let given: Vec<OsString> = std::env::args_os().collect();
    let matches = command().get_matches_from(&given);
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match cli.command {
        CliCommand::Conform { command } => return Ok(Command::Conform(command)),
        CliCommand::Bench { command } => return Ok(Command::Bench(command)),
        CliCommand::Key { name } => return Ok(Command::Key(name)),
        CliCommand::Run(_) => {}
    }
    let read = read(given)?;
    let cli = Cli::from_arg_matches(&read.matches).unwrap_or_else(|error| error.exit());
    let CliCommand::Run(args) = cli.command else {
        return Err(EngineError::internal("clap knows a command that we do not"));
    };
    let format = args.print_config;
    // What is printed is what would run: bad values are refused there too.
    let config = check(*args)?;
    Ok(match format {
        Some(format) => Command::Print(read.settings.print(format)),
        None => Command::Run(Box::new(config)),
    })
}

/// A command line with its words, and the settings of its file, made flags.
struct Read {
    matches: ArgMatches,
    settings: layers::Settings,
}

fn read(given: Vec<OsString>) -> Result<Read, EngineError> {
    let command = command();
    let matches = command.clone().get_matches_from(&given);
    let Some(run) = matches.subcommand_matches("run") else {
        return Err(EngineError::internal("clap knows a command that we do not"));
    };
    let words = words_as_flags(run)?;
    // A flag put first loses against one given: so the file's, which come in front of all, lose to words and flags.
    let given = put_first(&given, words);
    let by_hand = command.clone().get_matches_from(&given);
    let from_file = match run.get_one::<PathBuf>("config") {
        Some(path) => layers::file_as_flags(&command, path)?,
        None => Vec::new(),
    };
    let matches = command
        .clone()
        .get_matches_from(put_first(&given, from_file));
    let settings = layers::Settings::new(&command, &by_hand, &matches);
    Ok(Read { matches, settings })
}

/// The command line's grammar. The model's folder is the setting `model`, as the word is; workers' own binaries, which take
/// no words, call it `model-path`.
fn command() -> clap::Command {
    Cli::command().mut_subcommand("run", |run| {
        run.args_override_self(true)
            .mut_arg("model_path", |arg| {
                arg.long("model").visible_alias("model-path")
            })
            .mut_arg("tool_parser", |arg| arg.help(TOOL_PARSER_HELP))
            .mut_arg("reasoning_parser", |arg| arg.help(REASONING_PARSER_HELP))
    })
}

fn put_first(given: &[OsString], flags: Vec<OsString>) -> Vec<OsString> {
    let (program, rest) = given.split_at(given.len().min(2));
    [program, &flags, rest].concat()
}

fn words_as_flags(run: &ArgMatches) -> Result<Vec<OsString>, EngineError> {
    let mut given = BTreeSet::new();
    if run.value_source("model_path") == Some(ValueSource::CommandLine) {
        given.insert("model");
    }
    let mut flags = Vec::new();
    for word in run.get_many::<OsString>("words").into_iter().flatten() {
        let text = word.to_string_lossy();
        let (name, value) = if let Some(value) = text.strip_prefix("in=") {
            ("in", OsStr::new(value))
        } else if let Some(value) = text.strip_prefix("out=") {
            ("out", OsStr::new(value))
        } else {
            ("model", word.as_os_str())
        };
        if !given.insert(name) {
            return Err(EngineError::invalid_argument(name, "given twice"));
        }
        flags.push(flag(name, value));
    }
    Ok(flags)
}

/// `--name=value`.
pub(crate) fn flag(name: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value);
    flag
}

fn check(args: RunArgs) -> Result<RunConfig, EngineError> {
    let RunArgs {
        input,
        output,
        http,
        engine: mut engine_args,
        worker,
        ..
    } = args;
    if let Some(command) = command_in(&output) {
        engine_args.engine_cmd = Some(command.to_owned());
    }
    let (input, output): (InputKind, OutputKind) = (input.parse()?, output.parse()?);
    check_words(&input, &output, &worker)?;
    check_engine(&output, &engine_args, &worker)?;
    let parsers = parser_names(&worker)?;
    let name = match &input {
        InputKind::Dyn(Some(name)) => name.clone(),
        InputKind::Http | InputKind::Text | InputKind::Stdin | InputKind::Dyn(None) => {
            worker.endpoint_name()?
        }
    };
    let endpoint = match &output {
        OutputKind::Dyn(endpoint) => endpoint.clone(),
        OutputKind::Engine(_) => None,
    };
    let frontend = http.config(endpoint, parsers)?;
    Ok(RunConfig {
        input,
        output,
        name,
        engine_args,
        worker,
        frontend,
    })
}

/// The parsers for whatever the process serves.
fn parser_names(worker: &WorkerArgs) -> Result<ParserNames, EngineError> {
    let names = ParserNames {
        tool: worker.tool_parser.clone(),
        reasoning: worker.reasoning_parser.clone(),
    };
    match names.check() {
        Ok(()) => Ok(names),
        Err(error) => Err(EngineError::invalid_argument(
            "--tool-parser, --reasoning-parser",
            error,
        )),
    }
}

#[cfg(test)]
mod tests;
