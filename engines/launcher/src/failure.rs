//! [`ServerFailure`]: how a server can fail, told apart by what was seen.

use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use genset_process::End;

/// Why a server is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerFailure {
    /// It ended by itself with a code, 0 included: nobody had asked it to.
    #[error("exited with code {code} while it was needed")]
    Exited {
        /// The exit code.
        code: i32,
    },
    /// A signal that a fault raises ended it.
    #[error("crashed: signal {signal}")]
    Crashed {
        /// The signal's number.
        signal: i32,
    },
    /// The kernel killed in its control group because memory ran out, and it ended by SIGKILL.
    #[error(
        "was killed because memory ran out: its control group counts an out-of-memory kill; raise the memory limit, or have \
         the server use less"
    )]
    OutOfMemory,
    /// SIGKILL ended it; it was not ours, and nobody says whose.
    #[error("was killed (SIGKILL), and not by this worker")]
    Killed,
    /// It was not healthy in time.
    #[error(
        "was not healthy within {} s and was stopped; raise --engine-start-timeout if the model takes longer to load",
        limit.as_secs_f64()
    )]
    TooLate {
        /// The time it had.
        limit: Duration,
    },
    /// It served, and then no longer said that it is healthy.
    #[error("hung: it did not say that it is healthy for {} s, and was killed", silent_for.as_secs_f64())]
    Hung {
        /// How long it did not.
        silent_for: Duration,
    },
    /// The worker stopped it.
    #[error("was stopped")]
    Stopped,
}

impl ServerFailure {
    /// What the failure means to a request, and to whoever called `start`.
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

    /// The error with the last lines that the server wrote, if any.
    pub(crate) fn to_error(&self, title: &str, lines: &[String]) -> EngineError {
        let mut message = format!("the {title} server {self}");
        if !lines.is_empty() {
            message.push_str("; its last lines:\n");
            message.push_str(&lines.join("\n"));
        }
        if *self == Self::Killed {
            // Some servers kill themselves with all that they started, and say before why.
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
