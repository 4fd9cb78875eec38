//! Flags of engines, and which of them each engine needs, accepts or has no use for.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use clap::Args;
use genset_backend_common::{EngineError, Role};
use genset_engine_candle::CandleArgs;
use genset_engine_echo::EchoArgs;
use genset_engine_launcher::{LauncherArgs, ServerKind};
use genset_engine_subprocess::{InheritedEnv, LogLimit};
use genset_runtime::layers::Settings;
use genset_runtime::{WorkerArgs, byte_count, in_bytes};

use super::http::is_of_a_server;
use super::words::{EngineKind, InputKind, OutputKind};
use crate::engine::apart::Apart;

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
    /// How often in a row the process of out=cmd, or a server, is restarted after it ended by itself, with pauses that double; 0
    /// for never
    #[arg(
        long,
        env = "GENSET_ENGINE_RESTARTS",
        value_name = "N",
        default_value_t = 0
    )]
    pub(crate) engine_restarts: u32,
    /// Environment variables of the process of out=cmd, or of a server: inherit for all, or names separated by commas; NAME*
    /// means all names that begin with NAME, and minimal those that a program needs to start, without tokens and keys
    #[arg(
        long,
        env = "GENSET_ENGINE_ENV",
        value_name = "NAMES",
        default_value = "inherit"
    )]
    pub(crate) engine_env: InheritedEnv,
    /// Most lines a second that the log takes from the output of the process of out=cmd, or of a server; ten seconds' worth may
    /// come at once
    #[arg(
        long,
        env = "GENSET_ENGINE_LOG_LINES",
        value_name = "N",
        default_value_t = LogLimit::default().lines_per_second
    )]
    pub(crate) engine_log_lines: NonZeroU32,
    /// Most bytes a second that the log takes from that output
    #[arg(
        long,
        env = "GENSET_ENGINE_LOG_BYTES",
        value_name = "BYTES",
        default_value = in_bytes(LogLimit::default().bytes_per_second.get()),
        value_parser = some_bytes
    )]
    pub(crate) engine_log_bytes: NonZeroU32,
    /// Jinja file with a chat template, in place of the model's own
    #[arg(long, env = "GENSET_CHAT_TEMPLATE", value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Folder with tokenizer and template for a GGUF file, or a model of the hub that has them, in place of those inside it
    /// [out=candle, mistralrs, libllama, llamacpp]
    #[arg(long, env = "GENSET_MODEL_CONFIG", value_name = "DIR")]
    pub(crate) model_config: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Candle")]
    pub(crate) candle: CandleArgs,
    #[command(flatten, next_help_heading = "Servers of other projects")]
    pub(crate) launcher: LauncherArgs,
}

impl EngineArgs {
    /// How much of a child's output is logged.
    pub(crate) fn log_limit(&self) -> LogLimit {
        LogLimit {
            lines_per_second: self.engine_log_lines,
            bytes_per_second: self.engine_log_bytes,
        }
    }
}

/// The value of a flag in bytes, more than 0.
fn some_bytes(text: &str) -> Result<NonZeroU32, String> {
    NonZeroU32::new(byte_count(text)?).ok_or_else(|| "must be more than 0".into())
}

/// Refuses combinations of words that make no sense.
pub(super) fn check_words(
    input: &InputKind,
    output: &OutputKind,
    worker: &WorkerArgs,
) -> Result<(), EngineError> {
    if worker.role != Role::Aggregated && !matches!(input, InputKind::Dyn(_)) {
        let problem = format!(
            "a {} worker is for other processes: start it with in=dyn",
            worker.role
        );
        return Err(EngineError::invalid_argument("--role", problem));
    }
    if let (InputKind::Dyn(_), OutputKind::Dyn(_)) = (input, output) {
        let problem = "in=dyn is a worker and needs an engine of its own, not out=dyn";
        return Err(EngineError::invalid_argument("out", problem));
    }
    match worker.model_path {
        Some(_) => check_takes_model(output),
        None => Ok(()),
    }
}

/// Refuses an output that has no use for a model.
pub(super) fn check_takes_model(output: &OutputKind) -> Result<(), EngineError> {
    let problem = if matches!(output, OutputKind::Dyn(_)) {
        "out=dyn serves the models of running workers; give the folder to a worker"
    } else if output.is(EngineKind::EchoFull) {
        "echo_full takes text and needs no model folder; name it with --model-name"
    } else {
        return Ok(());
    };
    Err(EngineError::invalid_argument("MODEL", problem))
}

/// Refuses a model that the engine cannot read, and flags that do not fit it. The files are on this disk by then.
pub(super) fn check_files(
    output: &OutputKind,
    engine: &EngineArgs,
    worker: &WorkerArgs,
) -> Result<(), EngineError> {
    check_model(output, worker.model_path.as_deref())?;
    let has_gguf = worker.model_path.as_deref().is_some_and(is_gguf);
    if engine.model_config.is_some() && !has_gguf {
        return Err(no_model_config());
    }
    let is_server = matches!(output, OutputKind::Engine(EngineKind::Server(_)));
    if engine.chat_template.is_some() && engine.model_config.is_none() && is_server && has_gguf {
        let problem = "llama.cpp applies the template inside a GGUF file; name the model's folder with --model-config";
        return Err(EngineError::invalid_argument("--chat-template", problem));
    }
    Ok(())
}

/// Refuses a model of a kind that the engine does not serve.
pub(super) fn check_model(output: &OutputKind, path: Option<&Path>) -> Result<(), EngineError> {
    match (output, path) {
        (OutputKind::Engine(EngineKind::Server(kind)), path) => {
            required_model(*kind, path).map(drop)
        }
        (OutputKind::Engine(EngineKind::Apart(Apart::LibLlama)), Some(path)) if path.is_dir() => {
            let problem = format!(
                "{} is a folder; out=libllama takes a GGUF file",
                path.display()
            );
            Err(EngineError::invalid_argument("MODEL", problem))
        }
        (_, path) => path.map_or(Ok(()), check_model_path),
    }
}

/// Refuses flags that the engine has no use for, and the absence of one that it needs, as far as no file must be read.
pub(super) fn check_engine(
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
    check_model_config(output, engine)?;
    if engine.chat_template.is_none() {
        return Ok(());
    }
    let problem = match output {
        OutputKind::Dyn(_) => "out=dyn serves the models of running workers; give it to a worker",
        OutputKind::Engine(EngineKind::EchoFull) => "echo_full takes text and applies no template",
        OutputKind::Engine(EngineKind::Scripted) if worker.model_path.is_none() => {
            "without a MODEL, scripted takes text and applies no template"
        }
        OutputKind::Engine(EngineKind::Cmd) if worker.model_path.is_none() => {
            "without a MODEL there is no tokenizer to go with it; name the model's folder"
        }
        OutputKind::Engine(
            EngineKind::Candle
            | EngineKind::EchoCore
            | EngineKind::Sample
            | EngineKind::Scripted
            | EngineKind::Mocker
            | EngineKind::Apart(_)
            | EngineKind::Cmd
            | EngineKind::Server(_),
        ) => {
            return Ok(());
        }
    };
    Err(EngineError::invalid_argument("--chat-template", problem))
}

/// Refuses `--model-config` for an engine that does not take it.
fn check_model_config(output: &OutputKind, engine: &EngineArgs) -> Result<(), EngineError> {
    let takers = [
        EngineKind::Candle,
        EngineKind::Apart(Apart::MistralRs),
        EngineKind::Apart(Apart::LibLlama),
        EngineKind::Server(ServerKind::LlamaCpp),
    ];
    let takes_one = takers.into_iter().any(|engine| output.is(engine));
    if engine.model_config.is_none() || takes_one {
        return Ok(());
    }
    Err(no_model_config())
}

fn no_model_config() -> EngineError {
    let problem = "is for a GGUF file as MODEL of out=candle, mistralrs, libllama or llamacpp; a model's folder has its own tokenizer";
    EngineError::invalid_argument("--model-config", problem)
}

/// Refuses flags for servers if there is no server.
fn check_server_flags(output: &OutputKind, engine: &EngineArgs) -> Result<(), EngineError> {
    if let OutputKind::Engine(EngineKind::Server(_)) = output {
        return Ok(());
    }
    let mut launcher = engine.launcher.clone();
    if let OutputKind::Engine(EngineKind::Mocker | EngineKind::Apart(_)) = output {
        // The one of these flags that the mocker and engines built apart also take.
        launcher.extra_engine_args = None;
    }
    let Some(flag) = launcher.first_given() else {
        return Ok(());
    };
    let servers = ServerKind::ALL.map(ServerKind::name).join(", ");
    let instead = instead(output, flag.trim_start_matches('-'));
    let problem = format!(
        "is only for launched servers (out={servers}); out={} has no use for it{instead}",
        output.word()
    );
    Err(EngineError::invalid_argument(flag, problem))
}

/// What an output takes in place of the flag `name` of another engine, to follow its refusal; empty if there is nothing.
fn instead(output: &OutputKind, name: &str) -> &'static str {
    match (output, name) {
        (OutputKind::Engine(EngineKind::Candle), "kv-cache-block-size") => {
            "; its flag is --block-size"
        }
        (OutputKind::Engine(EngineKind::Candle), "base-gpu-id") => {
            "; its flag is --device, as in --device cuda:1"
        }
        (
            OutputKind::Engine(EngineKind::Server(ServerKind::Vllm | ServerKind::Sglang)),
            "block-size",
        ) => "; its flag is --kv-cache-block-size",
        (
            OutputKind::Engine(EngineKind::Server(_) | EngineKind::Apart(_) | EngineKind::Mocker),
            _,
        ) => "; its own settings go into a file of --extra-engine-args",
        (OutputKind::Engine(EngineKind::Cmd), _) => "; its own flags stand in its command",
        (OutputKind::Dyn(_), _) => "; give it to a worker",
        (
            OutputKind::Engine(
                EngineKind::Candle
                | EngineKind::EchoCore
                | EngineKind::EchoFull
                | EngineKind::Sample
                | EngineKind::Scripted,
            ),
            _,
        ) => "",
    }
}

/// Flags that say what one engine alone does.
const OF_ONE_ENGINE: [(&str, EngineKind); 2] = [
    ("script", EngineKind::Scripted),
    ("engine-cmd", EngineKind::Cmd),
];

/// Flags of processes that ask, beside those of a server.
const OF_AN_INPUT: [&str; 2] = ["batch-concurrency", "worker-wait"];

/// Flags about a worker that a process without one does not read.
const OF_A_WORKER: [&str; 19] = [
    "namespace",
    "component",
    "endpoint",
    "aliases",
    "adapter",
    "endpoint-types",
    "context-length",
    "migration-limit",
    "user-data",
    "max-running-requests",
    "max-waiting-requests",
    "request-timeout",
    "idle-timeout",
    "start-timeout",
    "register-timeout",
    "drain-timeout",
    "cleanup-timeout",
    "canary-interval",
    "canary-timeout",
];

/// Refuses flags that a process with these words would ignore. Whoever gave one may have left out a word, and would get answers of
/// the default engine. Variables are allowed: they may be for other processes.
pub(super) fn check_unread(
    input: &InputKind,
    output: &OutputKind,
    settings: &Settings,
) -> Result<(), EngineError> {
    let chosen = settings.given().map(|(name, _)| name);
    let mut chosen = chosen.filter(|name| settings.is_chosen(name));
    let refused = chosen.find_map(|name| Some((name, unread(input, output, name)?)));
    match refused {
        Some((name, problem)) => Err(EngineError::invalid_argument(format!("--{name}"), problem)),
        None => Ok(()),
    }
}

/// Why a process with these words does not read the flag of this name; `None` if it does.
pub(super) fn unread(input: &InputKind, output: &OutputKind, name: &str) -> Option<String> {
    let asks = is_of_a_server(name) || OF_AN_INPUT.contains(&name);
    if matches!(input, InputKind::Dyn(_)) && asks {
        let problem = "a worker (in=dyn) serves no HTTP and asks nothing, so it has no use for it; give it to the frontend (in=http out=dyn)";
        return Some(problem.to_owned());
    }
    if matches!(output, OutputKind::Dyn(_)) && OF_A_WORKER.contains(&name) {
        let instead = match name {
            "namespace" | "component" | "endpoint" => {
                "out=dyn://NAMESPACE asks the workers of a namespace, out=dyn://NAMESPACE.COMPONENT.ENDPOINT those of an endpoint"
            }
            _ => "give it to the workers",
        };
        return Some(format!(
            "is about a worker, and with out=dyn there is none here; {instead}"
        ));
    }
    let word = output.word();
    let mut own = OF_ONE_ENGINE.into_iter();
    if let Some((_, engine)) = own.find(|(flag, engine)| *flag == name && !output.is(*engine)) {
        let wanted = engine.name();
        return Some(format!("is for out={wanted}; out={word} has no use for it"));
    }
    let candle = CandleArgs::augment_args(clap::Command::new("candle"));
    let mut names = candle.get_arguments().filter_map(clap::Arg::get_long);
    if names.any(|flag| flag == name) && !reads(output, name) {
        let instead = instead(output, name);
        return Some(format!(
            "is for out=candle; out={word} has no use for it{instead}"
        ));
    }
    None
}

/// Whether the output reads the candle engine's flag of this name.
fn reads(output: &OutputKind, name: &str) -> bool {
    match output {
        OutputKind::Engine(EngineKind::Candle) => true,
        OutputKind::Engine(EngineKind::Apart(apart)) => apart.shared_flags().contains(&name),
        OutputKind::Engine(EngineKind::Server(ServerKind::Vllm)) => name == "kv-lease",
        OutputKind::Engine(
            EngineKind::Server(ServerKind::Sglang | ServerKind::Trtllm | ServerKind::LlamaCpp)
            | EngineKind::EchoCore
            | EngineKind::EchoFull
            | EngineKind::Sample
            | EngineKind::Scripted
            | EngineKind::Mocker
            | EngineKind::Cmd,
        )
        | OutputKind::Dyn(_) => false,
    }
}

/// The model that a server needs: a folder, or a GGUF file for llama.cpp.
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
    let shown = path.display();
    let problem = match path.try_exists() {
        Ok(_) => {
            let takers = match kind {
                ServerKind::LlamaCpp if path.is_dir() => {
                    "; out=candle, vllm and sglang take a folder"
                }
                ServerKind::Vllm | ServerKind::Sglang | ServerKind::Trtllm if is_gguf(path) => {
                    "; out=candle, mistralrs, libllama and llamacpp take a GGUF file"
                }
                ServerKind::LlamaCpp
                | ServerKind::Vllm
                | ServerKind::Sglang
                | ServerKind::Trtllm => "",
            };
            format!("{shown} is not {wanted}, which out={kind} needs{takers}")
        }
        Err(error) => format!("cannot read {shown}: {error}"),
    };
    Err(EngineError::invalid_argument("MODEL", problem))
}

/// Whether a model is one file that contains everything.
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

/// The command that an engine in its own process needs.
///
/// # Errors
/// `InvalidArgument`, naming the flag, when there is none.
pub(crate) fn required_command(given: Option<&str>) -> Result<&str, EngineError> {
    given.ok_or_else(|| {
        let problem = "an engine in a process of its own needs the command that starts it, as out=cmd:COMMAND";
        EngineError::invalid_argument("--engine-cmd", problem)
    })
}

/// Refuses a path that is neither a folder nor a GGUF file.
fn check_model_path(path: &Path) -> Result<(), EngineError> {
    if path.is_dir() || (is_gguf(path) && path.is_file()) {
        return Ok(());
    }
    let shown = path.display();
    let problem = match path.try_exists() {
        Ok(true) => {
            format!("{shown} is neither a GGUF file nor a folder; give the folder it lies in")
        }
        Ok(false) => format!(
            "{shown} is neither a folder nor a file, and no model of the hub, which is written ORG/NAME"
        ),
        Err(error) => format!("cannot read {shown}: {error}"),
    };
    Err(EngineError::invalid_argument("MODEL", problem))
}
