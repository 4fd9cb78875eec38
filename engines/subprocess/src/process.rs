//! The process itself: started with one end of a socket pair, in a process group that dies with
//! this process, and ended with all of it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;
use std::time::Duration;

use command_fds::{CommandFdExt as _, FdMapping};
use genset_backend_common::{EngineError, ErrorKind};
use genset_process::GuardedGroup;
use tokio::net::UnixStream;
use tokio::process::Child;

use crate::config::SubprocessConfig;

/// Names the descriptor of the socket to the process.
pub(crate) const FD_VARIABLE: &str = "GENSET_ENGINE_FD";
/// Names the log level to the process: one of error, warning, info, debug.
pub(crate) const LOG_VARIABLE: &str = "GENSET_ENGINE_LOG";
/// Names the descriptor of the leash to the process.
const LEASH_VARIABLE: &str = "GENSET_ENGINE_LEASH_FD";
/// The socket's descriptor in the process: the first after the standard ones.
const CHILD_FD: i32 = 3;
/// The leash's.
const LEASH_FD: i32 = 4;
/// How long a process may take to end by itself when this one is gone: the package gives its engine two seconds.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// A process that runs, and our end of its socket.
pub(crate) struct Process {
    /// Dropped first: the group is killed while its leader is still ours.
    pub(crate) group: GuardedGroup,
    pub(crate) child: Child,
    pub(crate) socket: UnixStream,
    /// One end of a socket that nobody writes to: it ends for the process when this process does, however that ends.
    pub(crate) leash: StdUnixStream,
    pub(crate) pid: u32,
}

impl Process {
    /// Starts the program.
    ///
    /// # Errors
    /// `NotFound` or `InvalidArgument` when there is no such program or directory, else `Internal`.
    pub(crate) fn spawn(config: &SubprocessConfig) -> Result<Self, EngineError> {
        Self::try_spawn(config).map_err(|error| spawn_error(config, error))
    }

    fn try_spawn(config: &SubprocessConfig) -> io::Result<Self> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let socket = UnixStream::from_std(ours)?;
        let (leash, their_leash) = StdUnixStream::pair()?;
        let group = GuardedGroup::start(ORPHAN_GRACE)?;
        let mut command = command(config, &group);
        let mapping = |parent_fd: StdUnixStream, child_fd| FdMapping {
            parent_fd: OwnedFd::from(parent_fd),
            child_fd,
        };
        let mappings = vec![mapping(theirs, CHILD_FD), mapping(their_leash, LEASH_FD)];
        command.fd_mappings(mappings).map_err(io::Error::other)?;
        let mut command = tokio::process::Command::from(command);
        command.kill_on_drop(true);
        let child = command.spawn()?;
        let pid = child
            .id()
            .ok_or_else(|| io::Error::other("the process ended before it was seen"))?;
        Ok(Self {
            group,
            child,
            socket,
            leash,
            pid,
        })
    }
}

fn command(config: &SubprocessConfig, group: &GuardedGroup) -> std::process::Command {
    let mut command = std::process::Command::new(&config.program);
    config.inherited_env.apply(&mut command);
    command
        .args(&config.args)
        .envs(&config.env)
        .env(FD_VARIABLE, CHILD_FD.to_string())
        .env(LEASH_VARIABLE, LEASH_FD.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A signal for the terminal's foreground group is the worker's: it drains first.
        .process_group(group.id());
    if !config.env.contains_key(LOG_VARIABLE) {
        command.env(LOG_VARIABLE, log_level());
    }
    if let Some(cwd) = &config.cwd {
        command.current_dir(cwd);
    }
    command
}

/// The most detailed level that this process logs at, as the process is told it.
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
            format!("{} is no directory that can be entered", cwd.display()),
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
