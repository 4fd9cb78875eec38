//! Finds the last user message in a prompt of tokens.

use super::ScriptError;
use super::raw::RawPrompt;

/// What the model's chat template writes before and after a user message.
#[derive(Debug)]
pub(crate) struct PromptMarks {
    user_start: String,
    user_end: String,
}

impl PromptMarks {
    /// The last user message of a prompt; `None` if the prompt does not contain the opening mark.
    pub(crate) fn last_user<'a>(&self, prompt: &'a str) -> Option<&'a str> {
        let (_, after) = prompt.rsplit_once(&self.user_start)?;
        Some(
            after
                .split_once(&self.user_end)
                .map_or(after, |(text, _)| text),
        )
    }
}

impl TryFrom<RawPrompt> for PromptMarks {
    type Error = ScriptError;

    fn try_from(raw: RawPrompt) -> Result<Self, ScriptError> {
        let mark = |given: Option<String>, default: &str, key| match given {
            Some(mark) if mark.is_empty() => Err(ScriptError::Key {
                key,
                problem: "must not be empty".into(),
            }),
            Some(mark) => Ok(mark),
            None => Ok(default.to_owned()),
        };
        Ok(Self {
            user_start: mark(raw.user_start, "<|im_start|>user\n", "prompt.user_start")?,
            user_end: mark(raw.user_end, "<|im_end|>", "prompt.user_end")?,
        })
    }
}
