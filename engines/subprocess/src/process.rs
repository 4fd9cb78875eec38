//! The process itself: started with one end of a socket pair, in a process group that dies with this process.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use command_fds::{CommandFdExt as _, FdMapping};
use genset_backend_common::{EngineError, ErrorKind};
use genset_process::{LineLimits, Process};
use tokio::net::UnixStream;
use tokio_util::task::TaskTracker;

use crate::config::SubprocessConfig;
use crate::lines::log;

/// Passes the socket's descriptor to the process.
pub(crate) const FD_VARIABLE: &str = "GENSET_ENGINE_FD";
/// Passes the log level to the process: error, warning, info or debug.
pub(crate) const LOG_VARIABLE: &str = "GENSET_ENGINE_LOG";
/// Passes the leash's descriptor to the process.
const LEASH_VARIABLE: &str = "GENSET_ENGINE_LEASH_FD";
/// The socket's descriptor in the process: the first after the standard ones.
const CHILD_FD: i32 = 3;
/// The leash's descriptor in the process.
const LEASH_FD: i32 = 4;
/// How long a process may take to exit when this one is gone: the package gives its engine two seconds.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// Starts the program and logs its output. Returns our end of its socket, too.
///
/// # Errors
/// `NotFound` or `InvalidArgument` if there is no such program or directory, else `Internal`.
pub(crate) fn spawn(
    config: &SubprocessConfig,
    tasks: &TaskTracker,
) -> Result<(Process, UnixStream), EngineError> {
    let (mut process, socket) = try_spawn(config).map_err(|error| spawn_error(config, error))?;
    let limits = LineLimits {
        kept: config.stderr_lines,
        keeps_stdout: false,
        log: config.log_limit,
    };
    let pid = process.id();
    process.follow(tasks, limits, move |level, line| log(line, level, pid));
    Ok((process, socket))
}

fn try_spawn(config: &SubprocessConfig) -> io::Result<(Process, UnixStream)> {
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let socket = UnixStream::from_std(ours)?;
    // Nobody writes to it: the process reads its end when this process ends, however that happens.
    let (leash, their_leash) = StdUnixStream::pair()?;
    let mut command = command(config);
    let mapping = |parent_fd: StdUnixStream, child_fd| FdMapping {
        parent_fd: OwnedFd::from(parent_fd),
        child_fd,
    };
    let mappings = vec![mapping(theirs, CHILD_FD), mapping(their_leash, LEASH_FD)];
    command.fd_mappings(mappings).map_err(io::Error::other)?;
    let process = Process::spawn(command.into(), ORPHAN_GRACE, &[], leash)?;
    Ok((process, socket))
}

fn command(config: &SubprocessConfig) -> std::process::Command {
    let mut command = std::process::Command::new(&config.program);
    config.inherited_env.apply(&mut command);
    command
        .args(&config.args)
        .envs(&config.env)
        .env(FD_VARIABLE, CHILD_FD.to_string())
        .env(LEASH_VARIABLE, LEASH_FD.to_string());
    if !config.env.contains_key(LOG_VARIABLE) {
        command.env(LOG_VARIABLE, log_level());
    }
    if let Some(cwd) = &config.cwd {
        command.current_dir(cwd);
    }
    command
}

/// The most detailed level that this process logs at, in the words of [`LOG_VARIABLE`].
fn log_level() -> &'static str {
    use tracing::level_filters::LevelFilter;
    match LevelFilter::current() {
        LevelFilter::OFF | LevelFilter::ERROR => "error",
        LevelFilter::WARN => "warning",
        LevelFilter::INFO => "info",
        _ => "debug",
    }
}

fn spawn_error(config: &SubprocessConfig, error: io::Error) -> EngineError {
    let line = config.command_line();
    if let Some(cwd) = config.cwd.as_ref().filter(|cwd| !cwd.is_dir()) {
        return EngineError::invalid_argument(
            "cwd",
            format!("{} is no directory, or cannot be entered", cwd.display()),
        );
    }
    let program = config.program.display();
    let built = if error.kind() == io::ErrorKind::NotFound {
        let message = format!(
            "there is no program `{program}` to run the engine with (the command is: {line}); install it or give its path"
        );
        EngineError::new(ErrorKind::NotFound, message).with_at("program")
    } else if error.kind() == io::ErrorKind::PermissionDenied {
        EngineError::invalid_argument(
            "program",
            format!("{program} may not be executed; chmod +x it"),
        )
    } else {
        EngineError::internal(format!(
            "the engine's process could not be started with: {line}"
        ))
    };
    built.with_source(error)
}
