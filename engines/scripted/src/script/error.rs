//! What can be wrong with a script.

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
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// The file can be read, but is no good script.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        #[source]
        source: Box<ScriptError>,
    },
    /// It is no TOML, or has a key or a type that the format does not have. The message has line and column.
    #[error("{source}")]
    Toml {
        /// What the parser says.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// There is no reply.
    #[error("a script needs at least one [[reply]]")]
    NoReply,
    /// A value outside the replies is wrong.
    #[error("{key}: {problem}")]
    Key {
        /// The key, with its table.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A reply is wrong.
    #[error("line {line}: reply {number}: {key}: {problem}")]
    Reply {
        /// The line of the reply's header, from 1.
        line: usize,
        /// The reply's number, from 1.
        number: usize,
        /// The key, below the reply.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl From<ScriptError> for EngineError {
    fn from(error: ScriptError) -> Self {
        EngineError::invalid_argument("script", &error).with_source(error)
    }
}

/// What is wrong with a reply, by key.
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

    /// The same, with the place of the reply.
    pub(crate) fn at(self, place: Place) -> ScriptError {
        ScriptError::Reply {
            line: place.line,
            number: place.number,
            key: self.key,
            problem: self.problem,
        }
    }
}
