//! The command line: `genset run in=... out=... [MODEL]` and its flags, checked once.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use genset_backend_common::EngineError;
use genset_engine_echo::EchoArgs;
use genset_frontend::FrontendConfig;
use genset_runtime::{SelectionMode, WorkerArgs};

use crate::layers;

const RUN_HELP: &str = "\
Words:
  in=http    serve the OpenAI API
  in=text    chat on the terminal (the default)
  in=stdin   answer what comes on standard input, once
  out=echo_core  answer with the prompt's tokens (the default)
  out=echo_full  answer with the prompt's text
  out=sample     answer with rotating tokens
  MODEL      folder of a local model checkout [default: the built-in tiny-chat]

Examples:
  genset run in=http
  genset run in=text out=echo_full
  echo 'What is the capital of France?' | genset run in=stdin
  genset run in=http out=sample ./Llama-3.2-3B-Instruct --http-port 9000

Every flag with an environment variable may also stand in a TOML file (--config): flags win over the environment,
the environment over the file. --print-config shows what holds and where it comes from.

Exit codes: 0 clean, 1 failed, 2 usage or configuration, 3 stopped before its work was done.";

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
}

#[derive(Debug, Args)]
struct RunArgs {
    /// in=INPUT, out=ENGINE and MODEL, in any order
    #[arg(value_name = "in=INPUT | out=ENGINE | MODEL")]
    words: Vec<String>,
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
}

#[derive(Debug, Clone, Args)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    pub(crate) echo: EchoArgs,
    /// Pause of out=sample before each token, in milliseconds
    #[arg(long, default_value_t = 0, env = "GENSET_TOKEN_DELAY_MS")]
    pub(crate) token_delay_ms: u64,
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

/// Where requests come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputKind {
    Http,
    Text,
    Stdin,
}

impl InputKind {
    /// Whether a person reads the screen, so that the log keeps quiet.
    pub(crate) fn is_interactive(self) -> bool {
        match self {
            Self::Http => false,
            Self::Text | Self::Stdin => true,
        }
    }
}

impl FromStr for InputKind {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            "http" => Ok(Self::Http),
            "text" => Ok(Self::Text),
            "stdin" => Ok(Self::Stdin),
            _ if text.starts_with("dyn://") || text.starts_with("batch:") => {
                Err(EngineError::unsupported(
                    "in",
                    format!("{text:?} is not available in this build; use http, text or stdin"),
                ))
            }
            _ => Err(EngineError::invalid_argument(
                "in",
                format!("{text:?} is none of http, text, stdin"),
            )),
        }
    }
}

/// Which engine answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineKind {
    EchoCore,
    EchoFull,
    Sample,
}

impl EngineKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::EchoCore => "echo_core",
            Self::EchoFull => "echo_full",
            Self::Sample => "sample",
        }
    }
}

/// Engines that users of the field know and this build does not have.
const ABSENT_ENGINES: &[&str] = &[
    "candle",
    "dyn",
    "llamacpp",
    "mistralrs",
    "mocker",
    "scripted",
    "sglang",
    "trtllm",
    "vllm",
];

impl FromStr for EngineKind {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        let known = [Self::EchoCore, Self::EchoFull, Self::Sample];
        let names = known.map(Self::name).join(", ");
        match known.into_iter().find(|kind| kind.name() == text) {
            Some(kind) => Ok(kind),
            None if ABSENT_ENGINES.contains(&text) || text.starts_with("dyn://") => {
                Err(EngineError::unsupported(
                    "out",
                    format!("{text} is not available in this build; use {names}"),
                ))
            }
            None => Err(EngineError::invalid_argument(
                "out",
                format!("{text:?} is none of {names}"),
            )),
        }
    }
}

/// What `genset run` does, checked.
#[derive(Debug)]
pub(crate) struct RunConfig {
    pub(crate) input: InputKind,
    pub(crate) engine: EngineKind,
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
}

/// Reads the command line, the environment and the file.
///
/// Prints help, or clap's error, and exits when there is nothing to run.
pub(crate) fn parse() -> Result<Command, EngineError> {
    let command = Cli::command().mut_subcommand("run", |run| run.args_override_self(true));
    let given: Vec<std::ffi::OsString> = std::env::args_os().collect();
    let matches = command.clone().get_matches_from(&given);
    let file = matches
        .subcommand_matches("run")
        .and_then(|run| run.get_one::<PathBuf>("config"));
    let layered = match file {
        Some(path) => Some(layers::with_file(&command, path, &given)?),
        None => None,
    };
    let matches = match &layered {
        Some(layered) => command.clone().get_matches_from(&layered.words),
        None => matches,
    };
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let CliCommand::Run(args) = cli.command;
    if let (Some(format), Some(run)) = (args.print_config, matches.subcommand_matches("run")) {
        let from_file = layered.map(|layered| layered.from_file).unwrap_or_default();
        // What is shown is what would run: bad values are refused here too.
        check(*args)?;
        return Ok(Command::Print(layers::print(
            &command, run, &from_file, format,
        )));
    }
    check(*args).map(|config| Command::Run(Box::new(config)))
}

fn check(args: RunArgs) -> Result<RunConfig, EngineError> {
    let RunArgs {
        words,
        http,
        engine: engine_args,
        mut worker,
        ..
    } = args;
    let (mut input, mut engine, mut model) = (None, None, None);
    for word in &words {
        if let Some(value) = word.strip_prefix("in=") {
            set_once("in", &mut input, value.parse()?)?;
        } else if let Some(value) = word.strip_prefix("out=") {
            set_once("out", &mut engine, value.parse()?)?;
        } else {
            set_once("MODEL", &mut model, PathBuf::from(word))?;
        }
    }
    if let Some(path) = model {
        set_once("MODEL or --model-path", &mut worker.model_path, path)?;
    }
    if let Some(path) = &worker.model_path {
        check_model_path(path)?;
    }
    let frontend = FrontendConfig {
        address: SocketAddr::new(http.http_host, http.http_port),
        selection: http.router_mode,
        max_body_bytes: http.max_body_bytes,
        max_choices: http.max_choices,
        max_stop_strings: http.max_stop_strings,
        max_connections: http.max_connections,
        header_timeout: http.header_timeout.0,
        body_timeout: http.body_timeout.0,
        write_timeout: http.write_timeout.0,
        ..FrontendConfig::default()
    };
    Ok(RunConfig {
        input: input.unwrap_or(InputKind::Text),
        engine: engine.unwrap_or(EngineKind::EchoCore),
        engine_args,
        worker,
        frontend,
    })
}

fn set_once<T>(name: &str, slot: &mut Option<T>, value: T) -> Result<(), EngineError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(EngineError::invalid_argument(name, "given twice")),
    }
}

/// Says what this build cannot load before it says what is missing.
fn check_model_path(path: &Path) -> Result<(), EngineError> {
    if path.is_dir() {
        return Ok(());
    }
    let shown = path.display();
    if path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    {
        let problem =
            format!("{shown}: GGUF files are not available in this build; give a model folder");
        return Err(EngineError::unsupported("MODEL", problem));
    }
    if path.exists() {
        return Err(EngineError::invalid_argument(
            "MODEL",
            format!("{shown} is a file; give the folder it lies in"),
        ));
    }
    let problem = format!(
        "{shown} is not a folder. Downloads from a model hub are not available in this build: \
         download the model and give its folder"
    );
    Err(EngineError::invalid_argument("MODEL", problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<RunConfig, EngineError> {
        let words = ["genset", "run"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            CliCommand::Run(args) => check(*args),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn words_come_in_any_order_and_have_defaults() {
        let config = parse_words(&[]).unwrap();
        assert_eq!(
            (config.input, config.engine),
            (InputKind::Text, EngineKind::EchoCore)
        );
        let config = parse_words(&["out=sample", ".", "in=http", "--http-port", "0"]).unwrap();
        assert_eq!(
            (config.input, config.engine),
            (InputKind::Http, EngineKind::Sample)
        );
        assert_eq!(config.worker.model_path.as_deref(), Some(Path::new(".")));
    }

    #[test]
    fn what_is_absent_is_refused_by_name() {
        for (words, expected) in [
            (["out=vllm"], "vllm is not available in this build"),
            (["in=batch:x.jsonl"], "batch:x.jsonl"),
            (["in=dyn://a"], "not available in this build"),
            (["out=foo"], "none of echo_core"),
            (["in=foo"], "none of http"),
            (["model.gguf"], "GGUF"),
            (["Qwen/Qwen3-0.6B"], "Downloads"),
        ] {
            let error = parse_words(&words).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(
            parse_words(&["in=http", "in=text"])
                .unwrap_err()
                .to_string()
                .contains("given twice")
        );
    }
}
