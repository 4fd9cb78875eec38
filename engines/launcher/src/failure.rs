//! [`ServerFailure`]: how a server can fail, by the evidence seen.

use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use genset_process::End;

/// Why a server can no longer be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerFailure {
    /// It exited with a code, 0 included, without being asked to.
    #[error("exited with code {code} while it was needed")]
    Exited {
        /// The exit code.
        code: i32,
    },
    /// It was ended by a signal that a fault raises.
    #[error("crashed: signal {signal}")]
    Crashed {
        /// The signal's number.
        signal: i32,
    },
    /// It was ended by SIGKILL after the kernel counted an out-of-memory kill in its control group.
    #[error(
        "was killed because memory ran out: its control group counts an out-of-memory kill; raise the memory limit, or have \
         the server use less"
    )]
    OutOfMemory,
    /// It was ended by SIGKILL from an unknown sender, not by this worker.
    #[error("was killed (SIGKILL), and not by this worker")]
    Killed,
    /// It was not healthy in time.
    #[error(
        "was not healthy within {} s and was stopped; raise --engine-start-timeout if the model takes longer to load; if it was \
         ready, it must answer by plain HTTP at the --host and --port that it is given",
        limit.as_secs_f64()
    )]
    TooLate {
        /// The time limit.
        limit: Duration,
    },
    /// It served, and then neither answered nor was healthy.
    #[error(
        "hung: for {} s it neither answered nor said that it is healthy, and was killed",
        silent_for.as_secs_f64()
    )]
    Hung {
        /// For how long it did neither.
        silent_for: Duration,
    },
    /// The worker stopped it.
    #[error("was stopped")]
    Stopped,
}

impl ServerFailure {
    /// The error kind for requests and for the caller of `start`.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Exited { .. }
            | Self::Crashed { .. }
            | Self::OutOfMemory
            | Self::Killed
            | Self::Hung { .. } => ErrorKind::Disconnected,
            Self::TooLate { .. } => ErrorKind::DeadlineExceeded,
            Self::Stopped => ErrorKind::EngineShutdown,
        }
    }

    /// The error, with the last lines that the server printed, if any.
    pub(crate) fn to_error(&self, title: &str, lines: &[String]) -> EngineError {
        let mut message = format!("the {title} server {self}");
        if !lines.is_empty() {
            message.push_str("; its last lines:\n");
            message.push_str(&lines.join("\n"));
        }
        if *self == Self::Killed {
            // Some servers kill themselves and all their processes, and print the reason before.
            let hint = "if its last lines name no cause: the kernel kills so when memory runs out, and says oom-kill in its log";
            message.push('\n');
            message.push_str(hint);
        }
        EngineError::new(self.kind(), message).with_source(self.clone())
    }
}

impl From<End> for ServerFailure {
    fn from(end: End) -> Self {
        match end {
            End::Exited { code } => Self::Exited { code },
            End::Crashed { signal, .. } => Self::Crashed { signal },
            End::Killed => Self::Killed,
            End::OutOfMemory => Self::OutOfMemory,
        }
    }
}
