//! [`Script`]: the replies, read from TOML and checked whole before anything is answered.
//!
//! The format is documented in `docs/guide/scripted-engine.md`. [`raw`] is how the file spells it, [`check`] makes the
//! types here of that, so that the engine never meets a value it must refuse in the middle of an answer.

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

use genset_backend_common::{FinishReason, config::GuidedKind};

pub(crate) use error::ReplyError;
pub use error::ScriptError;
pub(crate) use fault::{Break, Fault, How};
pub(crate) use matcher::Matcher;
pub(crate) use prompt::PromptMarks;
pub(crate) use split::Split;
pub(crate) use template::{Template, Values};

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
    /// [`ScriptError`], which names the file and, where it can, line and key.
    pub fn load(path: &Path) -> Result<Self, ScriptError> {
        let text = std::fs::read_to_string(path).map_err(|source| ScriptError::Read {
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
    /// Where it stands, for errors.
    pub(crate) place: Place,
    pub(crate) matcher: Matcher,
    /// How often it may be used, at least 1; `None` for any number of times.
    pub(crate) times: Option<u32>,
    pub(crate) body: Body,
    pub(crate) pace: Pace,
    pub(crate) finish_reason: FinishReason,
    /// One entry a token; tokens past the end are certain.
    pub(crate) logprobs: Vec<ScriptedLogprob>,
    pub(crate) fault: Option<Fault>,
}

/// Where a reply stands in its script, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) line: usize,
    pub(crate) number: usize,
}

/// What a reply says.
#[derive(Debug)]
pub(crate) enum Body {
    /// A text, cut into chunks once its values are filled in.
    Text(Template, Split),
    /// Chunks as the script has them.
    Chunks(Vec<Template>),
}

impl Body {
    /// The reply's chunks; none is empty.
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
    /// Waits before chunk number `chunk`, counted from 0. A pause of 0 does not wait: a timer that is due costs too.
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
    /// The token's own, at most 0.
    pub(crate) logprob: f32,
    /// Other candidates by their texts, at most 0 each.
    pub(crate) alternatives: Vec<(String, f32)>,
}

#[cfg(test)]
mod tests;
