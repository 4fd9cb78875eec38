//! A worker's `main`: settings from flags, environment and file, logging, signals and the exit code. Besides `layers`,
//! `genset_frontend` and the binary, it is the only module that uses the environment.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{NonEmptyStringValueParser, RangedU64ValueParser};
use clap::{Args, CommandFactory, FromArgMatches, Parser};
use genset_backend_common::worker::{
    CanaryConfig, Fault, Outcome, Report, RequestLimits, StopCause, Worker, WorkerConfig,
    WorkerHandle,
};
use genset_backend_common::{
    EngineError, ErrorKind, LLMEngine, Role,
    card::{DEFAULT_MIGRATION_LIMIT, EndpointType},
    controls::Adapter,
    error::At,
};
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::component::Runtime;
use crate::layers::{self, LayerArgs};
use crate::logging::init_logging;
use crate::model_folder::ModelFolder;
use crate::names::{EndpointName, InstanceId, checked_part};
use crate::network_args::{NetworkArgs, Reach, in_seconds, positive_seconds, seconds};
use crate::registrar::RuntimeRegistrar;
use crate::status::{ControlDoor, HealthSource, StatusArgs, StatusServer};

/// The exit code of a usage or configuration error.
const USAGE_ERROR: u8 = 2;

/// The flags every worker has.
#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// Name clients use for the model [default: the engine's]
    #[arg(long, env = "GENSET_MODEL_NAME")]
    pub model_name: Option<String>,
    /// Other names that clients may use for the model, with commas between them
    #[arg(long, env = "GENSET_ALIASES", value_name = "NAMES", value_delimiter = ',', value_parser = NonEmptyStringValueParser::new())]
    pub aliases: Vec<String>,
    /// Folder of a local model checkout, whose tokenizer and template are published
    #[arg(long, env = "GENSET_MODEL_PATH", value_name = "DIR")]
    pub model_path: Option<PathBuf>,
    /// Namespace of the worker's name
    #[arg(long, env = "GENSET_NAMESPACE", default_value = "genset")]
    pub namespace: String,
    /// Component of the worker's name [default: backend, or prefill or decode as the role]
    #[arg(long, env = "GENSET_COMPONENT")]
    pub component: Option<String>,
    /// Endpoint of the worker's name
    #[arg(long, env = "GENSET_ENDPOINT", default_value = "generate")]
    pub endpoint: String,
    /// Role of the worker: aggregated (or agg) for prefill and decode together, prefill or decode for one of them
    #[arg(long, env = "GENSET_ROLE", default_value_t = Role::default())]
    pub role: Role,
    /// APIs to offer, of chat, completions, embeddings, scores [default: all the engine can]
    #[arg(
        long,
        env = "GENSET_ENDPOINT_TYPES",
        value_delimiter = ',',
        value_name = "TYPES"
    )]
    pub endpoint_types: Option<Vec<EndpointType>>,
    /// Parser of the model's tool calls, such as hermes, or none, published with the model for frontends to use [default: found
    /// in the model's chat template]
    #[arg(long, env = "GENSET_TOOL_PARSER", value_name = "NAME")]
    pub tool_parser: Option<String>,
    /// Parser of the model's reasoning, such as qwen3, published and found likewise
    #[arg(long, env = "GENSET_REASONING_PARSER", value_name = "NAME")]
    pub reasoning_parser: Option<String>,
    /// Lowers the context length, in tokens
    #[arg(long, env = "GENSET_CONTEXT_LENGTH", value_name = "TOKENS")]
    pub context_length: Option<u32>,
    /// How often a request may move to another instance after one has taken it; with 0 an answer that has begun never moves
    #[arg(long, env = "GENSET_MIGRATION_LIMIT", default_value_t = DEFAULT_MIGRATION_LIMIT)]
    pub migration_limit: u32,
    /// A LoRA adapter that clients name as a model, and its folder; may be given several times, or several with commas between
    /// [out=candle, vllm, cmd]
    #[arg(long = "adapter", env = "GENSET_ADAPTER", value_name = "NAME=DIR", value_delimiter = ',', value_parser = adapter)]
    pub adapters: Vec<Adapter>,
    /// JSON that is published with the model as it is
    #[arg(long, env = "GENSET_USER_DATA", value_name = "JSON", value_parser = json)]
    pub user_data: Option<Value>,
    /// Requests in the engine at once
    #[arg(long, env = "GENSET_MAX_RUNNING_REQUESTS", default_value_t = RequestLimits::default().max_running, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub max_running_requests: usize,
    /// Requests that may wait for the engine; more are refused
    #[arg(long, env = "GENSET_MAX_WAITING_REQUESTS", default_value_t = RequestLimits::default().max_waiting)]
    pub max_waiting_requests: usize,
    /// Deadline of a request that brings none, in seconds; 0 for none
    #[arg(long, env = "GENSET_REQUEST_TIMEOUT", default_value = limit_in_seconds(RequestLimits::default().request_timeout), value_name = "SECONDS", value_parser = seconds)]
    pub request_timeout: Duration,
    /// Longest silence inside a stream, in seconds; 0 for no limit
    #[arg(long, env = "GENSET_IDLE_TIMEOUT", default_value = limit_in_seconds(RequestLimits::default().idle_timeout), value_name = "SECONDS", value_parser = seconds)]
    pub idle_timeout: Duration,
    /// Limit of the engine's start, in seconds
    #[arg(long, env = "GENSET_START_TIMEOUT", default_value = in_seconds(WorkerConfig::default().start_timeout), value_name = "SECONDS", value_parser = positive_seconds)]
    pub start_timeout: Duration,
    /// Limit of each call to discovery and request plane that lists the worker or takes it off, in seconds
    #[arg(long, env = "GENSET_REGISTER_TIMEOUT", default_value = in_seconds(WorkerConfig::default().register_timeout), value_name = "SECONDS", value_parser = positive_seconds)]
    pub register_timeout: Duration,
    /// Limit of the engine's drain, in seconds
    #[arg(long, env = "GENSET_DRAIN_TIMEOUT", default_value = in_seconds(WorkerConfig::default().drain_timeout), value_name = "SECONDS", value_parser = positive_seconds)]
    pub drain_timeout: Duration,
    /// Limit of the engine's cleanup, in seconds
    #[arg(long, env = "GENSET_CLEANUP_TIMEOUT", default_value = in_seconds(WorkerConfig::default().cleanup_timeout), value_name = "SECONDS", value_parser = positive_seconds)]
    pub cleanup_timeout: Duration,
    /// How long requests may go on after a signal, in seconds
    #[arg(long, env = "GENSET_GRACE", default_value = in_seconds(WorkerConfig::default().grace), value_name = "SECONDS", value_parser = seconds)]
    pub grace: Duration,
    /// Silence after which the engine is probed, in seconds; 0 to probe only at start
    #[arg(long, env = "GENSET_CANARY_INTERVAL", default_value = limit_in_seconds(WorkerConfig::default().canary.interval), value_name = "SECONDS", value_parser = seconds)]
    pub canary_interval: Duration,
    /// Longest wait for the answer to a probe, that at start included, in seconds
    #[arg(long, env = "GENSET_CANARY_TIMEOUT", default_value = in_seconds(WorkerConfig::default().canary.timeout), value_name = "SECONDS", value_parser = positive_seconds)]
    pub canary_timeout: Duration,
    /// Where operators look
    #[command(flatten)]
    pub status: StatusArgs,
    /// How it meets other processes
    #[command(flatten)]
    pub network: NetworkArgs,
    /// More log: -v for debug, -vv for trace. GENSET_LOG, or else DYN_LOG, sets it finer, in RUST_LOG syntax
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("is no JSON: {error}"))
}

/// Parses an adapter from the command line.
fn adapter(text: &str) -> Result<Adapter, String> {
    let parts = text.split_once('=');
    let (name, source) = parts.ok_or_else(|| format!("{text:?} is no NAME=DIR"))?;
    let adapter = Adapter {
        name: name.to_owned(),
        source: source.to_owned(),
    };
    adapter.check().map_err(|error| error.to_string())?;
    Ok(adapter)
}

/// A limit as a flag's value.
fn limit_in_seconds(limit: Option<Duration>) -> String {
    in_seconds(limit.unwrap_or_default())
}

/// 0 means no limit.
fn limit(limit: Duration) -> Option<Duration> {
    (!limit.is_zero()).then_some(limit)
}

impl WorkerArgs {
    /// The name under which the worker serves.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub fn endpoint_name(&self) -> Result<EndpointName, EngineError> {
        let component = self.component.as_deref();
        let component = component.unwrap_or_else(|| EndpointName::component_of(self.role));
        let part = |flag: &'static str, text: &str| {
            checked_part(text).map_err(|error| EngineError::invalid_argument(flag, error))
        };
        Ok(EndpointName {
            namespace: part("--namespace", &self.namespace)?,
            component: part("--component", component)?,
            endpoint: part("--endpoint", &self.endpoint)?,
        })
    }

    /// The model folder named by the flags.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the invalid file.
    pub fn model_folder(&self) -> Result<Option<ModelFolder>, EngineError> {
        let load = |path: &PathBuf| {
            ModelFolder::load(path)
                .map_err(|error| EngineError::invalid_argument("--model-path", error))
        };
        self.model_path.as_ref().map(load).transpose()
    }

    /// The worker's validated configuration, which publishes the files of `folder`.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub fn worker_config(&self, folder: Option<ModelFolder>) -> Result<WorkerConfig, EngineError> {
        let defaults = WorkerConfig::default();
        let canary = CanaryConfig {
            interval: limit(self.canary_interval),
            timeout: self.canary_timeout,
            ..defaults.canary
        };
        let folder_name = folder.as_ref().map(|folder| folder.name.clone());
        let config = WorkerConfig {
            model_name: self.model_name.clone().or(folder_name),
            aliases: self.aliases.clone(),
            endpoint_types: self.endpoint_types.clone().map(BTreeSet::from_iter),
            context_length_tokens: self.context_length,
            role: self.role,
            tool_parser: self.tool_parser.clone(),
            reasoning_parser: self.reasoning_parser.clone(),
            migration_limit: self.migration_limit,
            adapters: self.adapters.clone(),
            user_data: self.user_data.clone().unwrap_or_default(),
            artifacts: folder.map(|folder| folder.artifacts).unwrap_or_default(),
            limits: RequestLimits {
                max_running: self.max_running_requests,
                max_waiting: self.max_waiting_requests,
                request_timeout: limit(self.request_timeout),
                idle_timeout: limit(self.idle_timeout),
            },
            start_timeout: self.start_timeout,
            register_timeout: self.register_timeout,
            grace: self.grace,
            drain_timeout: self.drain_timeout,
            cleanup_timeout: self.cleanup_timeout,
            canary,
        };
        config.validate()?;
        Ok(config)
    }

    /// Starts the status server of a worker that serves under `name`, if the flags ask for one. It is ready while the worker
    /// serves and its canaries pass.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flags, if the address cannot be listened on.
    pub async fn status_server(
        &self,
        runtime: &Runtime,
        handle: &WorkerHandle,
        name: &EndpointName,
    ) -> Result<Option<StatusServer>, EngineError> {
        let health = HealthSource::worker(handle.status(), name.clone());
        let door = ControlDoor::new(handle.control(), self.network.control_secret()?);
        self.status.listen(runtime, health, Some(door)).await
    }
}

#[derive(Parser)]
struct WithEngine<E: Args> {
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten, next_help_heading = "Engine")]
    engine: E,
    #[command(flatten, next_help_heading = "Worker")]
    worker: WorkerArgs,
}

/// Reads the engine's own settings and the worker's from flags, the environment, and the TOML file in `--config`, in this order
/// of precedence. Prints help, the settings (`--print-config`) or the error and exits if there is nothing to run.
#[must_use]
pub fn parse<E: Args>() -> (E, WorkerArgs) {
    let mut command = WithEngine::<E>::command();
    let given: Vec<_> = std::env::args_os().collect();
    let read = layers::read(&command, &given);
    let (matches, settings) = read.unwrap_or_else(|error| refuse(&mut command, &error));
    let args = WithEngine::<E>::from_arg_matches(&matches);
    let args = args.unwrap_or_else(|error| error.exit());
    let Some(format) = args.layers.print_config else {
        return (args.engine, args.worker);
    };
    // Printed settings must be runnable: refuse invalid values here too.
    let name = args.worker.endpoint_name();
    match name.and_then(|_| args.worker.worker_config(None)) {
        Ok(_) => print(&settings.print(format)),
        Err(error) => refuse(&mut command, &error),
    }
}

fn refuse(command: &mut clap::Command, error: &EngineError) -> ! {
    let kind = clap::error::ErrorKind::ValueValidation;
    command.error(kind, error).exit()
}

/// Prints the text and exits.
#[expect(
    clippy::exit,
    clippy::disallowed_methods,
    reason = "as clap does where it has shown help: nothing has begun"
)]
fn print(text: &str) -> ! {
    let mut out = std::io::stdout().lock();
    let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    std::process::exit(i32::from(printed.is_err()))
}

/// SIGINT and SIGTERM, in order of arrival, and the end of a server's terminal.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl Signals {
    /// Takes over both signals.
    ///
    /// # Errors
    /// If the handlers cannot be installed.
    pub fn install() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: None,
        })
    }

    /// Also takes over SIGHUP, unless this process ignores it, as under `nohup`. It counts only as the first signal: a terminal that
    /// closes may send several, and none cuts short what drains.
    ///
    /// # Errors
    /// If the handler cannot be installed.
    pub fn with_hangup(mut self) -> std::io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if !ignores_hangup(&status) {
            self.hangup = Some(signal(SignalKind::hangup())?);
        }
        Ok(self)
    }

    /// Waits for the next signal; returns its name.
    ///
    /// # Cancel safety
    /// If another branch of `select!` completes first, no signal is consumed.
    pub async fn next(&mut self) -> &'static str {
        let Self {
            interrupt,
            terminate,
            hangup,
        } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let name = tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
            _ = hung_up => "SIGHUP",
        };
        // The handler stays installed.
        self.hangup = None;
        name
    }
}

/// Whether a process with this `/proc/self/status` ignores SIGHUP. An unknown form counts as yes: the system's default stays.
fn ignores_hangup(status: &str) -> bool {
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // SIGHUP is number 1, whose bit is the lowest.
    ignored.is_none_or(|mask| mask & 1 == 1)
}

/// A worker's whole `main`: starts the engine, registers it, serves until a signal, drains, cleans up.
///
/// The exit code is 0 for a clean end, 1 for a failure, 2 for a usage error, 3 if work was cut short.
///
/// # Examples
/// ```no_run
/// use genset_engine_sample::{SampleArgs, SampleEngine};
///
/// fn main() -> std::process::ExitCode {
///     let (engine, worker) = genset_runtime::parse::<SampleArgs>();
///     genset_runtime::run(SampleEngine::from_args(&engine), worker)
/// }
/// ```
#[must_use]
pub fn run(engine: impl LLMEngine, args: WorkerArgs) -> ExitCode {
    let _logging = init_logging(args.verbose, false);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build();
    let code = match runtime {
        Ok(runtime) => {
            let code = runtime.block_on(serve(Arc::new(engine), args));
            // A thread that the engine blocks forever must not keep the process alive.
            runtime.shutdown_timeout(Duration::from_secs(1));
            code
        }
        Err(error) => {
            tracing::error!(%error, "the async runtime cannot be started");
            1
        }
    };
    ExitCode::from(code)
}

async fn serve(engine: Arc<dyn LLMEngine>, args: WorkerArgs) -> u8 {
    let prepared = async {
        let config = args.worker_config(args.model_folder()?)?;
        let name = args.endpoint_name()?;
        let runtime = args.network.runtime(Reach::OtherProcesses).await?;
        Ok((runtime, name, config))
    };
    let (runtime, name, config) = match prepared.await {
        Ok(prepared) => prepared,
        Err::<_, EngineError>(error) => {
            tracing::error!(%error, "the worker cannot be set up");
            // Anything else may be well at the next start, such as a directory of discovery that is not mounted yet.
            return if is_refusal(&error) { USAGE_ERROR } else { 1 };
        }
    };
    let signals = match Signals::install().and_then(Signals::with_hangup) {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!(%error, "signals cannot be handled");
            return 1;
        }
    };
    let code = run_worker(&runtime, name, engine, config, &args, signals).await;
    runtime.shutdown().await;
    code
}

/// Runs one worker of `runtime` under `name` until a signal or the engine ends it. Returns the exit code.
pub async fn run_worker(
    runtime: &Runtime,
    name: EndpointName,
    engine: Arc<dyn LLMEngine>,
    config: WorkerConfig,
    args: &WorkerArgs,
    signals: Signals,
) -> u8 {
    let registrar = Arc::new(RuntimeRegistrar::new(runtime.clone(), name.clone()));
    let id = InstanceId::random();
    let metrics = runtime.metrics().clone();
    let handle = Worker::new(id.0, engine, config, registrar, metrics).spawn();
    let _status = match args.status_server(runtime, &handle, &name).await {
        Ok(status) => status,
        Err(error) => {
            handle.shutdown().await;
            // The last line says why this process ends.
            tracing::error!(%error, "the worker cannot be set up");
            return USAGE_ERROR;
        }
    };
    tracing::info!(endpoint = %name, instance = %id, "worker starting");
    until_stopped(handle, signals).await
}

async fn until_stopped(handle: WorkerHandle, mut signals: Signals) -> u8 {
    // One for all iterations: a new one would report the start again.
    let mut progress = std::pin::pin!(log_progress(&handle));
    let mut is_draining = false;
    let report = loop {
        tokio::select! {
            report = handle.join() => break report,
            never = &mut progress => match never {},
            name = signals.next() => {
                match std::mem::replace(&mut is_draining, true) {
                    false => tracing::info!("{name}: draining; a second signal stops at once"),
                    true => tracing::info!("{name}: stopping at once"),
                }
                handle.stop();
            }
        }
    };
    tracing::info!(outcome = ?report.outcome, "worker stopped");
    exit_code(&report)
}

/// The exit code for a worker's report: that of its outcome, or that of a usage error if the engine did not start because
/// of a setting.
#[must_use]
pub fn exit_code(report: &Report) -> u8 {
    let has_refused = report.outcome == Outcome::Failed(StopCause::StartFailed(Fault::Error));
    if has_refused && report.error.as_ref().is_some_and(is_about_a_setting) {
        USAGE_ERROR
    } else {
        report.outcome.exit_code()
    }
}

fn is_about_a_setting(error: &EngineError) -> bool {
    is_refusal(error) && matches!(error.at(), Some(At::Setting(_)))
}

/// Whether something that was given is at fault.
fn is_refusal(error: &EngineError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::InvalidArgument | ErrorKind::Unsupported
    )
}

/// Logs the progress of a long start, at most one line per second.
async fn log_progress(handle: &WorkerHandle) -> std::convert::Infallible {
    let mut progress = handle.progress();
    while progress.changed().await.is_ok() {
        let now = progress.borrow_and_update().clone();
        tracing::info!(stage = now.stage, fraction = now.fraction, "starting");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(words: &[&str]) -> WorkerArgs {
        let command = WorkerArgs::augment_args(clap::Command::new("worker"));
        let words = ["worker"].iter().chain(words);
        WorkerArgs::from_arg_matches(&command.get_matches_from(words)).unwrap()
    }

    /// The flags' defaults equal those of the configuration.
    #[test]
    fn no_flags_make_the_default_configuration() {
        let config = worker(&[]).worker_config(None).unwrap();
        let expected = WorkerConfig::default();
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }

    #[test]
    fn flags_bound_the_steps_of_a_workers_life() {
        let words = [
            "--start-timeout=1",
            "--register-timeout=2",
            "--drain-timeout=3",
            "--cleanup-timeout=4.5",
        ];
        let config = worker(&words).worker_config(None).unwrap();
        let limits = [
            config.start_timeout,
            config.register_timeout,
            config.drain_timeout,
            config.cleanup_timeout,
        ];
        assert_eq!(limits, [1.0, 2.0, 3.0, 4.5].map(Duration::from_secs_f64));
    }

    #[test]
    fn the_part_of_a_name_that_is_none_is_told_by_its_flag() {
        for flag in ["--namespace", "--component", "--endpoint"] {
            let error = worker(&[flag, "a b"]).endpoint_name().unwrap_err();
            assert_eq!(error.at(), Some(&At::from(flag)));
            assert!(error.message().contains("\"a b\""), "{error}");
        }
    }

    #[test]
    fn a_model_may_have_other_names() {
        let config = worker(&["--aliases=gpt-4o,org/tiny"]).worker_config(None);
        assert_eq!(config.unwrap().aliases, ["gpt-4o", "org/tiny"]);
    }

    #[test]
    fn every_setting_of_a_worker_has_a_variable() {
        let worker = WorkerArgs::augment_args(clap::Command::new("worker"));
        let names = worker.get_arguments().filter(|arg| arg.get_env().is_none());
        let names: Vec<_> = names.filter_map(clap::Arg::get_long).collect();
        assert_eq!(names, ["verbose"]);
    }

    #[test]
    fn only_a_setting_that_a_start_refused_is_a_usage_error() {
        let start = Outcome::Failed(StopCause::StartFailed(Fault::Error));
        let code = |outcome, error| exit_code(&Report { outcome, error });
        let flag = EngineError::invalid_argument("--threads", "must be at least 1");
        assert_eq!(code(start, Some(flag.clone())), 2);
        assert_eq!(
            code(start, Some(EngineError::unsupported("--device", "no"))),
            2
        );
        let of_a_model = EngineError::invalid_argument(At::other("MODEL"), "is broken");
        let of_the_machine = EngineError::internal("no file opens").with_at("--device");
        for error in [None, Some(of_a_model), Some(of_the_machine)] {
            assert_eq!(code(start, error), 1);
        }
        for (outcome, expected) in [
            (Outcome::Clean, 0),
            (Outcome::Forced, 3),
            (Outcome::Failed(StopCause::CanaryFailed), 1),
            (Outcome::Failed(StopCause::StartFailed(Fault::Timeout)), 1),
            (Outcome::CleanupFailed(Fault::Error), 1),
        ] {
            assert_eq!(code(outcome, Some(flag.clone())), expected, "{outcome:?}");
        }
    }
}
