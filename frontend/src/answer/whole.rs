//! Answers that are collected until complete, and the memory that they take until then.

use std::future::poll_fn;

use super::{Answer, AnswerEnd, Completed, Ending, TokenLogprobs};
use crate::budget::MemoryShare;
use crate::error::ApiError;
use crate::markup::{Delta, Message};

/// Collected text exists as a message, a JSON value and serialized text.
const TEXT_COPIES: usize = 4;

/// The size of a token and its log probability as JSON values.
const CANDIDATE_BYTES: usize = 1 << 10;

impl Answer {
    /// Reserves in `memory` what collecting the answer takes, with `text_bytes` of text so far: the text, its
    /// serialized form and the log probabilities.
    ///
    /// # Errors
    /// A 503 if there is no room.
    pub(crate) fn hold(&self, text_bytes: usize, memory: &mut MemoryShare) -> Result<(), ApiError> {
        let a_token = self.ratings.as_ref().map_or(0, |ratings| {
            (1 + ratings.candidates()).saturating_mul(CANDIDATE_BYTES)
        });
        let tokens = usize::try_from(self.completion_tokens).unwrap_or(usize::MAX);
        let held = TEXT_COPIES * text_bytes + tokens.saturating_mul(a_token);
        if held <= memory.bytes() {
            return Ok(());
        }
        memory.resize(held + held / 4)
    }

    /// Reads the answer to its end on the account of `memory`, which holds it until it has been written. Passes deltas
    /// to `each`, like [`Self::poll_deltas`].
    ///
    /// # Errors
    /// The error that ended the engine's stream, or a 503 if there is no memory for more.
    ///
    /// # Cancel safety
    /// If the future is dropped, the answer is lost, except the deltas that `each` has taken.
    pub(crate) async fn read_all(
        mut self,
        memory: &mut MemoryShare,
        mut each: impl FnMut(Delta<'_>, &[TokenLogprobs]),
    ) -> Result<(AnswerEnd, Ending), ApiError> {
        let echo_bytes = self.echo.as_ref().map_or(0, |echo| echo.len());
        let end = loop {
            let end = poll_fn(|cx| self.poll_deltas(cx, &mut each)).await?;
            self.hold(echo_bytes + self.given, memory)?;
            if let Some(end) = end {
                break end;
            }
        };
        let ending = self.end(each);
        Ok((end, ending))
    }

    /// Reads the whole answer on the account of `memory` and returns both: `memory` holds the answer until it has been
    /// written.
    ///
    /// # Errors
    /// The error that ended the engine's stream, or a 503 if there is no memory for more; text read so far is lost.
    ///
    /// # Cancel safety
    /// If the future is dropped, text read so far is lost.
    pub(crate) async fn collect_on(
        self,
        mut memory: MemoryShare,
    ) -> Result<(Completed, MemoryShare), ApiError> {
        let mut rated = self.ratings.is_some().then(Vec::new);
        let mut message = Message::default();
        let add = |delta: Delta<'_>, more: &[TokenLogprobs]| {
            message.add(delta);
            rated
                .iter_mut()
                .for_each(|rated| rated.extend_from_slice(more));
        };
        let (end, ending) = self.read_all(&mut memory, add).await?;
        if let Some(rated) = &mut rated {
            rated.extend(ending.rated);
        }
        let completed = Completed {
            message,
            end,
            rated,
            reasoning_tokens: ending.reasoning_tokens,
            has_open_call: ending.has_open_call,
        };
        Ok((completed, memory))
    }
}
