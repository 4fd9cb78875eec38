//! The command line: `genset run in=... out=... [MODEL]` and its flags, checked once.

mod access;
mod words;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{
    ArgAction, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum,
};
use genset_backend_common::EngineError;
use genset_engine_candle::CandleArgs;
use genset_engine_echo::EchoArgs;
use genset_engine_launcher::{LauncherArgs, ServerKind};
use genset_frontend::{FrontendConfig, ParserNames};
use genset_runtime::{EndpointName, SelectionMode, WorkerArgs};

use crate::bench::{self, BenchCommand};
use crate::conform::{self, ConformCommand};
use crate::layers;

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
    /// Make what benchmarks need
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

#[derive(Debug, Clone, Args)]
struct HttpArgs {
    /// Address to listen on
    #[arg(long, env = "GENSET_HTTP_HOST", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    http_host: IpAddr,
    /// Port to listen on; 0 for any free one
    #[arg(long, env = "GENSET_HTTP_PORT", default_value_t = 8080)]
    http_port: u16,
    /// PEM file with the certificate of the HTTP port; makes it HTTPS
    #[arg(
        long,
        env = "GENSET_HTTP_TLS_CERT",
        value_name = "FILE",
        requires = "http_tls_key"
    )]
    http_tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key
    #[arg(
        long,
        env = "GENSET_HTTP_TLS_KEY",
        value_name = "FILE",
        requires = "http_tls_cert"
    )]
    http_tls_key: Option<PathBuf>,
    /// TOML file with the hashed keys of those who may ask; 'genset key NAME' makes one
    #[arg(long, env = "GENSET_API_KEYS", value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// Origins of web pages that may ask, each a scheme and a host, separated by commas; * for any
    #[arg(
        long,
        env = "GENSET_CORS_ORIGINS",
        value_name = "ORIGIN",
        value_delimiter = ','
    )]
    cors_origins: Vec<String>,
    /// How instances are selected: round-robin, random, least-loaded or power-of-two
    #[arg(long, env = "GENSET_ROUTER_MODE", default_value_t = SelectionMode::default())]
    router_mode: SelectionMode,
    /// Largest request body, in bytes
    #[arg(long, env = "GENSET_MAX_BODY_BYTES", default_value_t = FrontendConfig::default().max_body_bytes)]
    max_body_bytes: usize,
    /// Largest n of a request
    #[arg(long, env = "GENSET_MAX_CHOICES", default_value_t = FrontendConfig::default().max_choices)]
    max_choices: u32,
    /// Most stop strings of a request
    #[arg(long, env = "GENSET_MAX_STOP_STRINGS", default_value_t = FrontendConfig::default().max_stop_strings)]
    max_stop_strings: usize,
    /// Most tools of a chat request
    #[arg(long, env = "GENSET_MAX_TOOLS", default_value_t = FrontendConfig::default().max_tools)]
    max_tools: usize,
    /// Most prompts of a completions request
    #[arg(long, env = "GENSET_MAX_PROMPTS", default_value_t = FrontendConfig::default().max_prompts)]
    max_prompts: usize,
    /// Most inputs of an embeddings request
    #[arg(long, env = "GENSET_MAX_EMBEDDING_INPUTS", default_value_t = FrontendConfig::default().max_embedding_inputs)]
    max_embedding_inputs: usize,
    /// Most responses that are kept for later ones to go on from; 0 keeps none
    #[arg(long, env = "GENSET_MAX_STORED_RESPONSES", default_value_t = FrontendConfig::default().max_stored_responses)]
    max_stored_responses: usize,
    /// Most memory of kept responses, in bytes
    #[arg(long, env = "GENSET_MAX_STORED_BYTES", default_value_t = FrontendConfig::default().max_stored_bytes)]
    max_stored_bytes: usize,
    /// Most memory of a model's known prompts and their tokens, in bytes; 0 keeps none
    #[arg(long, env = "GENSET_TOKENIZER_CACHE_BYTES", default_value_t = FrontendConfig::default().tokenizer_cache_bytes)]
    tokenizer_cache_bytes: usize,
    /// Connections at once; more wait
    #[arg(long, env = "GENSET_MAX_CONNECTIONS", default_value_t = FrontendConfig::default().max_connections)]
    max_connections: usize,
    /// Limit on reading a request's head, and on idle connections, in seconds
    #[arg(long, env = "GENSET_HEADER_TIMEOUT", default_value = "60", value_parser = seconds)]
    header_timeout: Seconds,
    /// Limit on reading a request's body, in seconds
    #[arg(long, env = "GENSET_BODY_TIMEOUT", default_value = "60", value_parser = seconds)]
    body_timeout: Seconds,
    /// How long a client may take nothing of its answer, in seconds
    #[arg(long, env = "GENSET_WRITE_TIMEOUT", default_value = "60", value_parser = seconds)]
    write_timeout: Seconds,
    /// Whether the log has a line for each request: true or false
    #[arg(long, env = "GENSET_ACCESS_LOG", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    access_log: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    pub(crate) echo: EchoArgs,
    /// Pause of out=sample before each token, in milliseconds
    #[arg(long, default_value_t = 0, env = "GENSET_TOKEN_DELAY_MS")]
    pub(crate) token_delay_ms: u64,
    /// TOML file with the replies of out=scripted
    #[arg(long, env = "GENSET_SCRIPT", value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,
    /// Command that starts the engine of out=cmd; out=cmd:COMMAND says the same
    #[arg(long, env = "GENSET_ENGINE_CMD", value_name = "COMMAND")]
    pub(crate) engine_cmd: Option<String>,
    /// How often in a row the process of out=cmd, or a server, is started again when it ended by itself, with pauses that
    /// double; 0 for never
    #[arg(
        long,
        env = "GENSET_ENGINE_RESTARTS",
        value_name = "N",
        default_value_t = 0
    )]
    pub(crate) engine_restarts: u32,
    /// Jinja file with a chat template, in place of the model's own
    #[arg(long, env = "GENSET_CHAT_TEMPLATE", value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Folder with tokenizer and template for a GGUF file, in place of those inside it [out=candle, llamacpp]
    #[arg(long, env = "GENSET_MODEL_CONFIG", value_name = "DIR")]
    pub(crate) model_config: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Candle")]
    pub(crate) candle: CandleArgs,
    #[command(flatten, next_help_heading = "Servers of other projects")]
    pub(crate) launcher: LauncherArgs,
}

/// A limit in seconds, more than 0.
#[derive(Debug, Clone, Copy)]
struct Seconds(std::time::Duration);

fn seconds(text: &str) -> Result<Seconds, String> {
    let value: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if value > 0.0 && value <= 1e9 {
        Ok(Seconds(std::time::Duration::from_secs_f64(value)))
    } else {
        Err("must be more than 0 and at most 1e9 seconds".into())
    }
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
    let frontend = FrontendConfig {
        address: SocketAddr::new(http.http_host, http.http_port),
        tls: access::tls(http.http_tls_cert.as_deref(), http.http_tls_key.as_deref())?,
        cors_origins: access::origins(&http.cors_origins)?,
        api_keys: http.api_keys,
        endpoint,
        selection: http.router_mode,
        max_body_bytes: http.max_body_bytes,
        max_choices: http.max_choices,
        max_stop_strings: http.max_stop_strings,
        max_tools: http.max_tools,
        max_prompts: http.max_prompts,
        max_embedding_inputs: http.max_embedding_inputs,
        max_stored_responses: http.max_stored_responses,
        max_stored_bytes: http.max_stored_bytes,
        tokenizer_cache_bytes: http.tokenizer_cache_bytes,
        parsers,
        max_connections: http.max_connections,
        header_timeout: http.header_timeout.0,
        body_timeout: http.body_timeout.0,
        write_timeout: http.write_timeout.0,
        access_log: http.access_log,
        ..FrontendConfig::default()
    };
    Ok(RunConfig {
        input,
        output,
        name,
        engine_args,
        worker,
        frontend,
    })
}

/// Refuses words that make no sense together.
fn check_words(
    input: &InputKind,
    output: &OutputKind,
    worker: &WorkerArgs,
) -> Result<(), EngineError> {
    if let OutputKind::Dyn(_) = output {
        if matches!(input, InputKind::Dyn(_)) {
            let problem = "in=dyn is a worker and needs an engine of its own, not out=dyn";
            return Err(EngineError::invalid_argument("out", problem));
        }
        if worker.model_path.is_some() {
            let problem =
                "out=dyn serves the models of the workers there are; give the folder to a worker";
            return Err(EngineError::invalid_argument("MODEL", problem));
        }
    }
    match (output, worker.model_path.as_deref()) {
        (OutputKind::Engine(EngineKind::Server(kind)), path) => {
            required_model(*kind, path).map(drop)
        }
        (OutputKind::Engine(EngineKind::Candle), Some(path)) if is_gguf(path) && path.is_file() => {
            Ok(())
        }
        (_, path) => path.map_or(Ok(()), check_model_path),
    }
}

/// Refuses flags that the engine has no use for, and the lack of one it needs.
fn check_engine(
    output: &OutputKind,
    engine: &EngineArgs,
    worker: &WorkerArgs,
) -> Result<(), EngineError> {
    if output.is(EngineKind::Scripted) {
        required_script(engine.script.as_deref())?;
    }
    if output.is(EngineKind::Cmd) {
        required_command(engine.engine_cmd.as_deref())?;
    }
    check_server_flags(output, engine)?;
    check_model_config(output, engine, worker)?;
    if engine.chat_template.is_none() {
        return Ok(());
    }
    let problem = match output {
        OutputKind::Dyn(_) => {
            "out=dyn serves the models of the workers there are; give it to a worker"
        }
        OutputKind::Engine(EngineKind::EchoFull) => "echo_full takes text and applies no template",
        OutputKind::Engine(EngineKind::Scripted) if worker.model_path.is_none() => {
            "without a MODEL, scripted takes text and applies no template"
        }
        OutputKind::Engine(EngineKind::Cmd) if worker.model_path.is_none() => {
            "without a MODEL there is no tokenizer to go with it; name the model's folder"
        }
        OutputKind::Engine(EngineKind::Server(_))
            if worker.model_path.as_deref().is_some_and(is_gguf)
                && engine.model_config.is_none() =>
        {
            "llama.cpp applies the template inside a GGUF file; name the model's folder with --model-config"
        }
        OutputKind::Engine(
            EngineKind::Candle
            | EngineKind::EchoCore
            | EngineKind::Sample
            | EngineKind::Scripted
            | EngineKind::Cmd
            | EngineKind::Server(_),
        ) => {
            return Ok(());
        }
    };
    Err(EngineError::invalid_argument("--chat-template", problem))
}

/// Refuses a tokenizer for what has its own, or needs none.
fn check_model_config(
    output: &OutputKind,
    engine: &EngineArgs,
    worker: &WorkerArgs,
) -> Result<(), EngineError> {
    let takes_one =
        output.is(EngineKind::Candle) || output.is(EngineKind::Server(ServerKind::LlamaCpp));
    let has_gguf = worker.model_path.as_deref().is_some_and(is_gguf);
    if engine.model_config.is_none() || (takes_one && has_gguf) {
        return Ok(());
    }
    let problem = "is for a GGUF file as MODEL of out=candle or out=llamacpp; a model's folder has its own tokenizer";
    Err(EngineError::invalid_argument("--model-config", problem))
}

/// Refuses flags about a server where there is none.
fn check_server_flags(output: &OutputKind, engine: &EngineArgs) -> Result<(), EngineError> {
    if let OutputKind::Engine(EngineKind::Server(_)) = output {
        return Ok(());
    }
    let Some(flag) = engine.launcher.first_given() else {
        return Ok(());
    };
    let servers = ServerKind::ALL.map(ServerKind::name).join(", ");
    let problem = format!(
        "is about a server that is launched (out={servers}); out={} has no use for it",
        output.word()
    );
    Err(EngineError::invalid_argument(flag, problem))
}

/// The model that a server needs: a folder, or for llama.cpp a GGUF file.
///
/// # Errors
/// `InvalidArgument`, naming what is expected.
pub(crate) fn required_model(kind: ServerKind, path: Option<&Path>) -> Result<&Path, EngineError> {
    let wanted = match kind {
        ServerKind::LlamaCpp => "a GGUF file",
        ServerKind::Vllm | ServerKind::Sglang | ServerKind::Trtllm => {
            "the folder of a local model checkout"
        }
    };
    let Some(path) = path else {
        let problem = format!("out={kind} serves a model of yours; name {wanted}");
        return Err(EngineError::invalid_argument("MODEL", problem));
    };
    let is_one = match kind {
        ServerKind::LlamaCpp => is_gguf(path) && path.is_file(),
        ServerKind::Vllm | ServerKind::Sglang | ServerKind::Trtllm => path.is_dir(),
    };
    if is_one {
        return Ok(path);
    }
    let problem = format!("{} is not {wanted}, which out={kind} needs", path.display());
    Err(EngineError::invalid_argument("MODEL", problem))
}

/// Whether a model is one file that holds everything.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// The script that the scripted engine needs.
///
/// # Errors
/// `InvalidArgument`, naming the flag, when there is none.
pub(crate) fn required_script(given: Option<&Path>) -> Result<&Path, EngineError> {
    given.ok_or_else(|| {
        let problem = "the scripted engine answers what a script says; name its TOML file";
        EngineError::invalid_argument("--script", problem)
    })
}

/// The command that the engine in a process of its own needs.
///
/// # Errors
/// `InvalidArgument`, naming the flag, when there is none.
pub(crate) fn required_command(given: Option<&str>) -> Result<&str, EngineError> {
    given.ok_or_else(|| {
        let problem = "an engine in a process of its own needs the command that starts it, as out=cmd:COMMAND";
        EngineError::invalid_argument("--engine-cmd", problem)
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

/// Says what this build cannot load before it says what is missing.
fn check_model_path(path: &Path) -> Result<(), EngineError> {
    if path.is_dir() {
        return Ok(());
    }
    let shown = path.display();
    if is_gguf(path) && path.is_file() {
        let problem =
            format!("{shown}: a GGUF file is for out=candle or out=llamacpp; give a model folder");
        return Err(EngineError::unsupported("MODEL", problem));
    }
    if path.exists() {
        return Err(EngineError::invalid_argument(
            "MODEL",
            format!("{shown} is neither a GGUF file nor a folder; give the folder it lies in"),
        ));
    }
    let problem = format!(
        "{shown} is neither a folder nor a file. Downloads from a model hub are not available in this build: \
         download the model and give its folder"
    );
    Err(EngineError::invalid_argument("MODEL", problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<RunConfig, EngineError> {
        let words = ["genset", "run"].iter().chain(words);
        let read = read(words.map(OsString::from).collect())?;
        match Cli::from_arg_matches(&read.matches).unwrap().command {
            CliCommand::Run(args) => check(*args),
            CliCommand::Conform { .. } | CliCommand::Bench { .. } | CliCommand::Key { .. } => {
                panic!("the words say run")
            }
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn words_come_in_any_order_and_have_defaults() {
        let config = parse_words(&[]).unwrap();
        assert_eq!(
            (config.input, config.output),
            (InputKind::Text, OutputKind::Engine(EngineKind::Candle))
        );
        let config = parse_words(&["out=sample", ".", "in=http", "--http-port", "0"]).unwrap();
        assert_eq!(
            (config.input, config.output),
            (InputKind::Http, OutputKind::Engine(EngineKind::Sample))
        );
        assert_eq!(config.worker.model_path.as_deref(), Some(Path::new(".")));
    }

    #[test]
    fn dyn_names_workers_and_takes_the_flags_for_what_it_leaves_out() {
        let config = parse_words(&["in=dyn://llama", "out=sample"]).unwrap();
        assert_eq!(config.name.to_string(), "llama.backend.generate");
        let config = parse_words(&["in=dyn", "out=sample", "--namespace=n"]).unwrap();
        assert_eq!(config.name.to_string(), "n.backend.generate");
        let config = parse_words(&["in=http", "out=dyn"]).unwrap();
        assert_eq!(config.output, OutputKind::Dyn(None));
        assert_eq!(config.frontend.endpoint, None);
        let config = parse_words(&["in=text", "out=dyn://a.b"]).unwrap();
        let endpoint = config.frontend.endpoint.map(|name| name.to_string());
        assert_eq!(endpoint.as_deref(), Some("a.b.generate"));
        for words in [["in=dyn", "out=dyn"], ["out=dyn", "."]] {
            parse_words(&words).unwrap_err();
        }
    }

    #[test]
    fn what_is_absent_is_refused_by_name() {
        for (words, expected) in [
            (["out=mocker"], "mocker is not available in this build"),
            (
                ["out=vllm"],
                "out=vllm serves a model of yours; name the folder",
            ),
            (["out=llamacpp"], "name a GGUF file"),
            (["in=batch:x.jsonl"], "batch:x.jsonl"),
            (["in=dyn://a.b.c.d"], "more than three parts"),
            (["out=dyn://é"], "no part of a name"),
            (["out=foo"], "none of candle, echo_core"),
            (["in=foo"], "none of http"),
        ] {
            let error = parse_words(&words).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for (words, expected) in [
            (["out=candle", "model.gguf"], "neither a folder nor a file"),
            (
                ["out=sample", "Cargo.toml"],
                "neither a GGUF file nor a folder",
            ),
            (["out=sample", "Qwen/Qwen3-0.6B"], "Downloads"),
            (["out=sample", "--model-config=."], "--model-config"),
        ] {
            let error = parse_words(&words).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for words in [
            ["out=sample", "--tensor-parallel-size=2"],
            ["out=dyn", "--server-cmd=x"],
        ] {
            let error = parse_words(&words).unwrap_err().to_string();
            assert!(error.contains("has no use for it"), "{error}");
        }
        let error = parse_words(&["out=sglang", "x.gguf"]).unwrap_err();
        assert!(error.to_string().contains("is not the folder"), "{error}");
        for words in [
            ["in=http", "in=text"],
            [".", ".."],
            ["--model-path=.", ".."],
        ] {
            let error = parse_words(&words).unwrap_err().to_string();
            assert!(error.contains("given twice"), "{error}");
        }
    }
}
