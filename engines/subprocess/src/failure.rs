//! [`ChildFailure`]: how a process can fail, by the evidence seen.

use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use genset_process::End;

/// Why the engine's process can no longer be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChildFailure {
    /// It exited with a code, 0 included, without being asked to.
    #[error("the engine's process exited with code {code} while it was needed")]
    Exited {
        /// The exit code.
        code: i32,
    },
    /// It was ended by a signal that a fault raises, such as a segmentation fault or an abort.
    #[error("the engine's process crashed: signal {signal} ({name})")]
    Crashed {
        /// The signal's number.
        signal: i32,
        /// The signal's name.
        name: &'static str,
    },
    /// It was ended by SIGKILL after the kernel counted an out-of-memory kill in its control group.
    #[error(
        "the engine's process was killed because memory ran out: its control group counts an out-of-memory kill; raise the \
         memory limit, or have the engine use less"
    )]
    OutOfMemory,
    /// It was ended by SIGKILL from an unknown sender, not by this worker.
    #[error(
        "the engine's process was killed (SIGKILL), and not by this worker: most often the kernel does that when memory \
         runs out; look for oom-kill in the kernel's log"
    )]
    Killed,
    /// It did not answer heartbeats.
    #[error(
        "the engine's process hung: it answered nothing for {} s, and was killed",
        silent_for.as_secs_f64()
    )]
    Hung {
        /// How long nothing was received.
        silent_for: Duration,
    },
    /// It closed its socket and continued to run.
    #[error("the engine's process closed its socket and did not exit; it was killed")]
    ClosedSocket,
    /// It ended in the middle of a frame.
    #[error("the engine's process broke off in the middle of a frame")]
    HalfFrame,
    /// It violated the protocol.
    #[error("the engine's process broke the protocol and was killed: {what}")]
    Protocol {
        /// The rule that it violated.
        what: String,
    },
    /// It reported that its engine is dead.
    #[error("the engine's process reported its engine dead, and was killed: {reason}")]
    ReportedDead {
        /// The reason that it gave.
        reason: String,
    },
    /// It speaks another version of the protocol.
    #[error("the engine's process cannot be understood: {what}")]
    Version {
        /// Both versions.
        what: String,
    },
    /// It exceeded a time limit.
    #[error("the engine's process did not {what} within {} s, and was killed", limit.as_secs_f64())]
    TooLate {
        /// What the worker waited for.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The worker stopped it.
    #[error("the engine was stopped")]
    Stopped,
}

impl ChildFailure {
    pub(crate) fn protocol(what: impl Into<String>) -> Self {
        Self::Protocol { what: what.into() }
    }

    /// The error kind for requests and for the caller of `start`.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Exited { .. }
            | Self::Crashed { .. }
            | Self::OutOfMemory
            | Self::Killed
            | Self::Hung { .. }
            | Self::ClosedSocket
            | Self::HalfFrame
            | Self::Protocol { .. }
            | Self::ReportedDead { .. } => ErrorKind::Disconnected,
            Self::Version { .. } => ErrorKind::CannotConnect,
            Self::TooLate { .. } => ErrorKind::DeadlineExceeded,
            Self::Stopped => ErrorKind::EngineShutdown,
        }
    }

    /// The error, with the last lines that the process wrote to standard error, if any.
    pub(crate) fn to_error(&self, stderr: &[String]) -> EngineError {
        let mut message = self.to_string();
        if !stderr.is_empty() {
            message.push_str("; its last lines on stderr:\n");
            message.push_str(&stderr.join("\n"));
        }
        EngineError::new(self.kind(), message).with_source(self.clone())
    }
}

impl From<End> for ChildFailure {
    fn from(end: End) -> Self {
        match end {
            End::Exited { code } => Self::Exited { code },
            End::Crashed { signal, name } => Self::Crashed { signal, name },
            End::Killed => Self::Killed,
            End::OutOfMemory => Self::OutOfMemory,
        }
    }
}
