//! The errors of a script.

use std::path::PathBuf;

use genset_backend_common::EngineError;

use super::Place;

/// Why a script cannot be played.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScriptError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The file can be read, but is not a valid script.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        #[source]
        source: Box<ScriptError>,
    },
    /// The text is not TOML, or has an unknown key or a wrong type. The message contains line and column.
    #[error("{source}")]
    Toml {
        /// The parser's error.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// The script has no reply.
    #[error("a script needs at least one [[reply]]")]
    NoReply,
    /// A value outside the replies is wrong.
    #[error("{key}: {problem}")]
    Key {
        /// The key, including its table.
        key: &'static str,
        /// The problem.
        problem: String,
    },
    /// A reply is wrong.
    #[error("line {line}: reply {number}: {key}: {problem}")]
    Reply {
        /// The line of the reply's header, from 1.
        line: usize,
        /// The reply's number, from 1.
        number: usize,
        /// The key, relative to the reply.
        key: String,
        /// The problem.
        problem: String,
    },
}

impl From<ScriptError> for EngineError {
    fn from(error: ScriptError) -> Self {
        EngineError::invalid_argument("script", &error).with_source(error)
    }
}

/// The problem in a reply, by key.
#[derive(Debug)]
pub(crate) struct ReplyError {
    key: String,
    problem: String,
}

impl ReplyError {
    pub(crate) fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            problem: problem.into(),
        }
    }

    /// Adds the position of the reply.
    pub(crate) fn at(self, place: Place) -> ScriptError {
        ScriptError::Reply {
            line: place.line,
            number: place.number,
            key: self.key,
            problem: self.problem,
        }
    }
}
