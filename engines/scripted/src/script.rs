//! [`Script`]: the replies, read from TOML and fully checked before the first request.
//!
//! The format is documented in `docs/guide/scripted-engine.md`. [`raw`] has the types of the file, and [`check`] converts them
//! to the types here, so that the engine never meets an invalid value in the middle of an answer.

mod check;
mod error;
mod fault;
mod matcher;
mod prompt;
mod raw;
mod split;
mod template;

use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use genset_backend_common::{FinishReason, config::GuidedKind, text_file::read_text};

pub(crate) use error::ReplyError;
pub use error::ScriptError;
pub(crate) use fault::{Break, Fault, How};
pub(crate) use matcher::Matcher;
pub(crate) use prompt::PromptMarks;
pub(crate) use split::Split;
pub(crate) use template::{Template, Values};

/// The maximum size of a script, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The replies of a mock engine, checked.
///
/// # Examples
/// ```
/// use genset_engine_scripted::Script;
///
/// let error = "[[reply]]\nmatch.regex = '('\ntext = 'hi'".parse::<Script>().unwrap_err();
/// assert!(error.to_string().starts_with("line 1: reply 1: match.regex: "), "{error}");
/// ```
#[derive(Debug)]
pub struct Script {
    pub(crate) replies: Vec<Reply>,
    pub(crate) marks: PromptMarks,
    pub(crate) guided: BTreeSet<GuidedKind>,
}

impl Script {
    /// Reads a script from a file.
    ///
    /// # Errors
    /// [`ScriptError`], which names the file and, if known, the line and the key.
    pub fn load(path: &Path) -> Result<Self, ScriptError> {
        let text = read_text(path, MAX_FILE_BYTES).map_err(|source| ScriptError::Read {
            path: path.to_owned(),
            source,
        })?;
        text.parse().map_err(|source| ScriptError::File {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }
}

impl FromStr for Script {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Self, ScriptError> {
        check::script(text)
    }
}

/// One reply.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The reply's position, for errors.
    pub(crate) place: Place,
    pub(crate) matcher: Matcher,
    /// How often it may be used, at least 1; `None` for no limit.
    pub(crate) times: Option<u32>,
    pub(crate) body: Body,
    pub(crate) pace: Pace,
    pub(crate) finish_reason: FinishReason,
    /// One entry per token; tokens past the end are certain.
    pub(crate) logprobs: Vec<ScriptedLogprob>,
    pub(crate) fault: Option<Fault>,
}

/// A reply's position in its script; both fields count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) line: usize,
    pub(crate) number: usize,
}

/// The content of a reply.
#[derive(Debug)]
pub(crate) enum Body {
    /// A text, split into chunks after its values are filled in.
    Text(Template, Split),
    /// Chunks as written in the script.
    Chunks(Vec<Template>),
}

impl Body {
    /// The reply's chunks, without empty ones.
    pub(crate) fn chunks(&self, values: &Values<'_>) -> Vec<String> {
        let mut chunks = match self {
            Self::Text(text, split) => split.split(&text.fill(values)),
            Self::Chunks(chunks) => chunks.iter().map(|chunk| chunk.fill(values)).collect(),
        };
        chunks.retain(|chunk| !chunk.is_empty());
        chunks
    }

    pub(crate) fn templates(&self) -> &[Template] {
        match self {
            Self::Text(text, _) => std::slice::from_ref(text),
            Self::Chunks(chunks) => chunks,
        }
    }
}

/// The pauses of a reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Before the first chunk.
    pub(crate) first: Duration,
    /// Before each later chunk.
    pub(crate) each: Duration,
}

impl Pace {
    /// Waits before the chunk at index `chunk`, from 0. A pause of 0 does not wait: even a timer that is due has a cost.
    pub(crate) async fn wait(self, chunk: u32) {
        let pause = if chunk == 0 { self.first } else { self.each };
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
    }
}

/// The log probabilities of one token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScriptedLogprob {
    /// The token's own log probability, at most 0.
    pub(crate) logprob: f32,
    /// Other candidates: their texts and log probabilities, at most 0.
    pub(crate) alternatives: Vec<(String, f32)>,
}

#[cfg(test)]
mod tests;
