//! The command line: `genset run in=... out=... [MODEL]` and its flags, validated once.

mod as_run;
mod engine;
mod help;
mod http;
mod network;
mod shorthand;
mod words;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{NonEmptyStringValueParser, Resettable};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use genset_backend_common::{EngineError, error::At};
use genset_frontend::{FrontendConfig, ParserNames};
use genset_runtime::layers::{self, LayerArgs, UnknownKeys, flag, matches_of, without_environment};
use genset_runtime::{EndpointName, WorkerArgs, positive_seconds, tokio_console_support};

use crate::bench::{self, BenchCommand};
use crate::conform::{self, ConformCommand};
use crate::doctor::{self, DoctorArgs};
use crate::fleet::{self, ControlArgs, ModelsArgs, TopArgs};
use crate::hub::{self, ListArgs, PullArgs, RmArgs};
use crate::input;
use crate::simulate::{self, SimulateArgs};
use crate::tune::TuneArgs;

pub(crate) use self::http::HttpArgs;
pub(crate) use engine::{EngineArgs, is_gguf, required_command, required_model, required_script};
use engine::{check_engine, check_files, check_unread, check_words, unread};
use network::network_flags;
pub(crate) use words::{EngineKind, InputKind, OutputKind};
use words::{command_in, only_named, stand_in};

const RUN_HELP: &str = "\
Words:
  in=http    serve the OpenAI API
  in=text    chat on the terminal (the default)
  in=stdin   answer the text on standard input, once
  in=batch:FILE  answer a file of prompts, or a folder of such files, into output.jsonl beside them
  in=dyn     be a worker that other processes find; in=dyn://NAMESPACE.COMPONENT.ENDPOINT names it
  out=candle     answer with a language model, on the CPU or a GPU (the default)
  out=echo_core  answer with the prompt's tokens
  out=echo_full  answer with the prompt's text
  out=sample     answer with rotating tokens
  out=scripted   answer from a script (--script), as text; with a MODEL, as its tokens
  out=mocker     answer as vLLM would in time and memory, with tokens of no meaning (--extra-engine-args)
  out=mistralrs  answer with mistral.rs, whose program genset-mistralrs is built separately
  out=libllama   answer with llama.cpp's library, whose program genset-llamacpp is built separately
  out=cmd:COMMAND  answer with an engine in a process of its own, in any language: 'out=cmd:python3 my_engine.py'
  out=vllm, sglang, trtllm, llamacpp  start that server and answer with it
  out=dyn        send requests to running workers; out=dyn://NAMESPACE to those of a namespace, out=dyn://NAME to those of a name
  MODEL      folder of a local model checkout, or a GGUF file [default: the built-in tiny-chat]; for vllm, sglang and trtllm
             a folder, for libllama and llamacpp a file; or a model of the Hugging Face Hub: ORG/NAME, ORG/NAME:Q4_K_M, hf://ORG/NAME@REVISION, hf://ORG/NAME/FILE.gguf

Examples:
  genset run in=http
  genset run in=http ./Qwen3-0.6B-Q8_0.gguf
  genset run in=http Qwen/Qwen3-0.6B
  genset run in=text out=echo_full
  echo 'What is the capital of France?' | genset run in=stdin
  genset run in=batch:prompts.jsonl ./Qwen3-0.6B-Q8_0.gguf
  genset run in=http out=sample ./Llama-3.2-3B-Instruct --http-port 9000
  genset run in=http out=scripted --script mock.toml --tool-parser hermes
  genset run in=http out=mocker ./Llama-3.2-3B-Instruct --extra-engine-args mocker.json
  genset run in=http out=vllm ./Llama-3.2-3B-Instruct --tensor-parallel-size 2
  genset run out=llamacpp ./Qwen3-0.6B-Q8_0.gguf
  genset run in=dyn://llama out=sample ./Llama-3.2-3B-Instruct    a worker, and in another terminal
  genset run in=http out=dyn                                      the frontend that finds it

Every setting may also stand in a TOML file (--config) under its long name; the words are `in`, `out` and `model`.
Words and flags win over the environment, the environment over the file. --print-config shows every setting with its source.

Exit codes: 0 clean, 1 failed, 2 usage or configuration, 3 stopped before its work was done.";

/// One flag for both ends: a process that is worker and server needs no second one.
const TOOL_PARSER_HELP: &str = "\
Parser of tool calls, such as hermes, or none. A worker publishes it with its model; a server takes it for every \
model, whatever its worker published; a process that is both does both [default: what the worker published, which is found in \
the model's chat template]";

const REASONING_PARSER_HELP: &str = "\
Parser of reasoning, such as qwen3; otherwise as --tool-parser";

/// A worker serves under this name; a terminal asks for it.
const MODEL_NAME_HELP: &str = "\
Name clients use for the model [default: the engine's]; beside out=dyn, the model that in=text, stdin or batch asks \
[default: the first that is ready]";

/// The variable with which scripts for NVIDIA Dynamo set the pause between echoed tokens.
const OTHER_ECHO_DELAY: &str = "DYN_TOKEN_ECHO_DELAY_MS";

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
    #[command(after_help = RUN_HELP, disable_help_flag = true)]
    Run(Box<RunArgs>),
    #[command(flatten)]
    Tool(Tool),
    /// Check a file of settings
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Print a script that completes commands and flags in a shell
    Completions {
        /// The shell; its own manual says where the script belongs
        shell: Shell,
    },
    /// Write man pages
    Man {
        /// Folder to write the pages into
        folder: PathBuf,
    },
}

// What needs nothing of `genset run`. A doc comment would replace the description of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Tool {
    /// Check whether an engine keeps the contract
    #[command(after_help = conform::HELP)]
    Conform {
        #[command(subcommand)]
        command: Box<ConformCommand>,
    },
    /// Fetch a model from the hub, and print where it lies
    Pull(PullArgs),
    /// List the models that were fetched, with their size and last use
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete models that were fetched
    Rm(RmArgs),
    /// Check machine, limits, ports, network, files and engines, and print how to fix problems
    #[command(after_help = doctor::HELP)]
    Doctor(Box<DoctorArgs>),
    /// Try threads, batch and KV sizes of out=candle for a minute, and print the flags that are fastest here
    Tune(TuneArgs),
    /// List the models that a fleet serves, and the workers that serve them
    Models(Box<ModelsArgs>),
    /// Show the workers of a fleet and their load, as they change
    Top(Box<TopArgs>),
    /// Ask workers to sleep, to wake, to take an adapter, and more
    #[command(after_help = fleet::CONTROL_HELP)]
    Control(Box<ControlArgs>),
    /// Make an API key, and the lines for the file of --api-keys
    Key {
        /// Name of the key in metrics and logs
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
    },
    /// Measure engines and servers
    #[command(after_help = bench::HELP)]
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Serve services written in Python, each in processes of its own: MODULE:CLASS and what it depends on
    #[command(disable_help_flag = true)]
    Serve {
        /// As for `python -m genset.serve`
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "MODULE:CLASS"
        )]
        arguments: Vec<OsString>,
    },
    /// Write manifests for services written in Python, for docker compose or Kubernetes
    #[command(disable_help_flag = true)]
    Deploy {
        /// As for `python -m genset.deploy`
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "MODULE:CLASS"
        )]
        arguments: Vec<OsString>,
    },
    /// Offer a running endpoint of a service in Python behind HTTP as a model, for as long as this runs
    #[command(disable_help_flag = true)]
    Offer {
        /// As for `python -m genset.offer`
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "NAME ENDPOINT"
        )]
        arguments: Vec<OsString>,
    },
    /// Compare ways to route, with a fleet of mockers in virtual time
    #[command(after_help = simulate::HELP)]
    Simulate(Box<SimulateArgs>),
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check that Genset knows every setting of a file, and that they go together
    Check {
        /// TOML file, as --config takes it
        file: PathBuf,
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
    /// Prompts of in=batch, or requests of /v1/batches, that are answered at the same time
    #[arg(
        long,
        env = "GENSET_BATCH_CONCURRENCY",
        value_name = "PROMPTS",
        default_value = "16"
    )]
    batch_concurrency: NonZeroUsize,
    /// How long in=stdin and in=batch wait for a worker of out=dyn, in seconds
    #[arg(long, env = "GENSET_WORKER_WAIT", value_name = "SECONDS", default_value = "60", value_parser = positive_seconds)]
    worker_wait: Duration,
    #[command(flatten, next_help_heading = "HTTP")]
    http: HttpArgs,
    #[command(flatten, next_help_heading = "HTTP")]
    frontend: FrontendConfig,
    #[command(flatten, next_help_heading = "Engine")]
    engine: EngineArgs,
    #[command(flatten, next_help_heading = "Worker")]
    worker: WorkerArgs,
    /// Address where tokio-console finds the tasks of this process, in builds that can show them
    #[arg(long, env = "GENSET_TOKIO_CONSOLE", value_name = "ADDRESS", num_args = 0..=1, require_equals = true, default_missing_value = "127.0.0.1:6669")]
    tokio_console: Option<SocketAddr>,
    /// Show the words, and the flags that most people need
    #[arg(short, long, action = ArgAction::HelpShort)]
    help: Option<bool>,
    /// Show every flag
    #[arg(long, action = ArgAction::HelpLong)]
    help_all: Option<bool>,
    #[command(flatten)]
    layers: LayerArgs,
}

/// What `genset run` does, validated.
#[derive(Debug)]
pub(crate) struct RunConfig {
    pub(crate) input: InputKind,
    pub(crate) output: OutputKind,
    /// The name the worker serves under, if there is a worker.
    pub(crate) name: EndpointName,
    pub(crate) engine_args: EngineArgs,
    pub(crate) worker: WorkerArgs,
    pub(crate) frontend: FrontendConfig,
    pub(crate) batch_concurrency: NonZeroUsize,
    /// How long a non-interactive input waits for a worker of another process.
    pub(crate) worker_wait: Duration,
    pub(crate) tokio_console: Option<SocketAddr>,
    /// The flags with which another process meets this one.
    pub(crate) network_flags: String,
    /// A remark about the words, for the user, logged once there is a log.
    pub(crate) remark: Option<&'static str>,
}

/// What the command line asks for.
#[derive(Debug)]
pub(crate) enum Command {
    Run(Box<RunConfig>),
    /// Print this, and exit.
    Print(String),
    Tool(Tool),
}

/// Reads the command line, the environment and the file.
///
/// Prints help, or clap's error, and exits if there is nothing to run.
///
/// # Errors
/// `InvalidArgument` or `Unsupported`, naming the word, the flag, the variable, or the file and its key; `Unavailable` if a model
/// must be fetched from a hub that is not reachable.
pub(crate) fn parse() -> Result<Command, EngineError> {
    let given = shorthand::with_run(&command(), std::env::args_os().collect());
    shorthand::refuse_foreign(&given)?;
    let matches = matches_of(&grammar_of_layer(command()), &given)?;
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match cli.command {
        CliCommand::Tool(mut tool) => {
            as_run::complete(&mut tool, &given)?;
            return Ok(Command::Tool(tool));
        }
        CliCommand::Completions { shell } => {
            return Ok(Command::Print(help::completions(command(), shell)));
        }
        CliCommand::Man { folder } => return help::man(command(), &folder).map(Command::Print),
        CliCommand::Config { command } => {
            let ConfigCommand::Check { file } = command;
            return check_file(&file).map(Command::Print);
        }
        CliCommand::Run(_) => {}
    }
    let mut read = read(command(), given, UnknownKeys::Refuse)?;
    let cli = Cli::from_arg_matches(&read.matches).unwrap_or_else(|error| error.exit());
    let CliCommand::Run(args) = cli.command else {
        return Err(EngineError::internal("clap knows a command that we do not"));
    };
    let format = args.layers.print_config;
    // Prints what would run, so bad values are refused there too. Models are fetched only for a run.
    let models = if format.is_some() {
        HubModels::Leave
    } else {
        HubModels::Fetch
    };
    let mut config = check(*args, &read.settings, models)?;
    config.network_flags = network_flags(&read.settings);
    Ok(match format {
        Some(format) => {
            let settings = &mut read.settings;
            settings.comment_out(|name| unread(&config.input, &config.output, name).is_some());
            Command::Print(settings.print(format))
        }
        None => Command::Run(Box::new(config)),
    })
}

/// Reads a file as `genset run --config` does, and checks what would run with no other settings. Ignores variables, because the
/// file may be for another machine.
///
/// # Errors
/// The error with which `genset run` would end.
fn check_file(file: &Path) -> Result<String, EngineError> {
    let given = ["genset", "run"].map(OsString::from).into_iter();
    let given = given.chain([flag("config", file)]).collect();
    let read = read(without_environment(command()), given, UnknownKeys::Refuse)?;
    let cli = Cli::from_arg_matches(&read.matches).unwrap_or_else(|error| error.exit());
    if let CliCommand::Run(args) = cli.command {
        check(*args, &read.settings, HubModels::Leave)?;
    }
    Ok(format!(
        "{}: {} settings, all well\n",
        file.display(),
        read.settings.count_of_file()
    ))
}

/// A command line with its words, and the settings of its file converted to flags.
struct Read {
    matches: ArgMatches,
    settings: layers::Settings,
}

fn read(
    command: clap::Command,
    given: Vec<OsString>,
    unknown_keys: UnknownKeys,
) -> Result<Read, EngineError> {
    let unknown = || EngineError::internal("clap knows a command that we do not");
    let layer = grammar_of_layer(command.clone());
    let grammar = command.find_subcommand("run").ok_or_else(unknown)?;
    let matches = matches_of(&layer, &given)?;
    let run = matches.subcommand_matches("run").ok_or_else(unknown)?;
    let words = words_as_flags(run)?;
    let given = put_first(&given, words);
    let by_hand = matches_of(&layer, &given)?;
    let by_hand = by_hand.subcommand_matches("run").ok_or_else(unknown)?;
    let matches = match run.get_one::<PathBuf>("config") {
        Some(path) => {
            let from_file = layers::file_as_flags(grammar, by_hand, path, unknown_keys)?;
            layers::matches_with_file(&command, &put_first(&given, from_file), path)?
        }
        None => matches_of(&command, &given)?,
    };
    let all = matches.subcommand_matches("run").ok_or_else(unknown)?;
    let settings = layers::Settings::new(grammar, by_hand, all);
    Ok(Read { matches, settings })
}

/// The command line's grammar. The setting `model` is the model's folder, as the word is; the binaries of workers, which take no
/// words, call it `model-path`.
fn command() -> clap::Command {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let has_other_delay = !is_set("GENSET_TOKEN_ECHO_DELAY_MS") && is_set(OTHER_ECHO_DELAY);
    let anywhere = |arg: clap::Arg| {
        let is_flag = !arg.is_positional();
        arg.global(is_flag)
    };
    let hidden = |arg: clap::Arg| arg.hide(true);
    let cli = Cli::command()
        .mut_subcommand("control", |control| control.mut_args(anywhere))
        // Simulated requests have no affinity key.
        .mut_subcommand("simulate", |simulate| {
            let simulate = simulate.mut_arg("affinity_blocks", hidden);
            simulate.mut_arg("max_affinity_keys", hidden)
        });
    cli.mut_subcommand("run", |run| {
        help::shortened(run)
            .args_override_self(true)
            .mut_arg("model_path", |arg| {
                arg.long("model").visible_alias("model-path")
            })
            .mut_arg("model_name", |arg| arg.help(MODEL_NAME_HELP))
            .mut_arg("chat_template", |arg| arg.alias("custom-jinja-template"))
            .mut_arg("token_echo_delay_ms", |arg| match has_other_delay {
                true => arg.env(OTHER_ECHO_DELAY),
                false => arg,
            })
            .mut_arg("verbose", |arg| arg.alias("verbosity"))
            .mut_arg("tool_parser", |arg| arg.help(TOOL_PARSER_HELP))
            .mut_arg("reasoning_parser", |arg| arg.help(REASONING_PARSER_HELP))
    })
}

/// The grammar of one layer of settings: a setting that is required may come from another layer.
fn grammar_of_layer(whole: clap::Command) -> clap::Command {
    let alone = |arg: clap::Arg| arg.requires(Resettable::<clap::Id>::Reset);
    let readers = as_run::READERS.into_iter().chain(["run"]);
    readers.fold(whole, |whole, name| {
        whole.mut_subcommand(name, |command| command.mut_args(alone))
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
        if name != "model" && word.to_str().is_none() {
            let problem = format!("{text:?} is not UTF-8 text; rename the file that it names");
            return Err(EngineError::invalid_argument(name, problem));
        }
        if !given.insert(name) {
            let problem = match name {
                "model" => format!(
                    "given twice, at last as {text:?}; a question is piped into in=stdin, or typed in in=text"
                ),
                _ => "given twice".to_owned(),
            };
            return Err(EngineError::invalid_argument(name, problem));
        }
        flags.push(flag(name, value));
    }
    Ok(flags)
}

/// Quotes a word for a shell.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// What to do with models that are named by their place on the hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HubModels {
    /// Fetch them.
    Fetch,
    /// Keep the names.
    Leave,
}

fn check(
    args: RunArgs,
    settings: &layers::Settings,
    models: HubModels,
) -> Result<RunConfig, EngineError> {
    let RunArgs {
        input,
        output,
        batch_concurrency,
        worker_wait,
        http,
        mut frontend,
        engine: mut engine_args,
        mut worker,
        tokio_console,
        ..
    } = args;
    if let (Some(_), Err(problem)) = (tokio_console, tokio_console_support()) {
        return Err(EngineError::unsupported("--tokio-console", problem));
    }
    if let Some(command) = command_in(&output) {
        engine_args.engine_cmd = Some(command.to_owned());
    }
    engine_args.launcher.forget_defaults();
    let (input, mut output): (InputKind, OutputKind) = (input.parse()?, output.parse()?);
    let stand_in = stand_in(&mut output);
    let parsers = parser_names(&worker)?;
    let name = match &input {
        InputKind::Dyn(Some(name)) => name.or_of_flags(worker.endpoint_name()?)?,
        InputKind::Http
        | InputKind::Text
        | InputKind::Stdin
        | InputKind::Batch(_)
        | InputKind::Dyn(None) => worker.endpoint_name()?,
    };
    let remark = stand_in.or_else(|| only_named(&input, &name, worker.role));
    let workers = match &output {
        OutputKind::Dyn(workers) => workers.clone(),
        OutputKind::Engine(_) => None,
    };
    frontend.batches.concurrency = batch_concurrency;
    frontend.router.kv.validate()?;
    let frontend = http.config(FrontendConfig {
        workers,
        parsers,
        ..frontend
    })?;
    check_words(&input, &output, &worker)?;
    check_engine(&output, &engine_args, &worker)?;
    check_unread(&input, &output, settings)?;
    if models == HubModels::Fetch {
        let is_asked = hub::is_asked(&worker, engine_args.model_config.as_deref());
        input::check(&input, is_asked.then_some(frontend.address))?;
        // Last, because it may take an hour.
        hub::bring(&output, &mut worker, &mut engine_args)?;
    }
    if !hub::is_asked(&worker, engine_args.model_config.as_deref()) {
        check_files(&output, &engine_args, &worker)?;
    }
    Ok(RunConfig {
        input,
        output,
        name,
        engine_args,
        worker,
        frontend,
        batch_concurrency,
        worker_wait,
        tokio_console,
        network_flags: String::new(),
        remark,
    })
}

/// The parsers for whatever model the process serves.
fn parser_names(worker: &WorkerArgs) -> Result<ParserNames, EngineError> {
    let names = ParserNames {
        tool: worker.tool_parser.clone(),
        reasoning: worker.reasoning_parser.clone(),
    };
    names.check().map_err(|error| {
        // The flag has the field's name.
        let field = error.at().map_or("parser", At::name);
        let flag = format!("--{}", field.replace('_', "-"));
        error.with_at(flag)
    })?;
    Ok(names)
}

#[cfg(test)]
mod tests;
