//! Answers that are kept until they are whole, and the memory that they take until then.

use std::future::poll_fn;

use super::{Answer, AnswerEnd, Completed, Ending, TokenLogprobs};
use crate::budget::MemoryShare;
use crate::error::ApiError;
use crate::markup::{Delta, Message};

/// A text that is kept is a message, a value and a text again.
const TEXT_COPIES: usize = 4;

/// What a token and its log probability take, as values.
const CANDIDATE_BYTES: usize = 1 << 10;

impl Answer {
    /// Has `memory` hold what an answer takes that is kept until it is whole, so many bytes of text so far: the text, what it
    /// is written to, and what is known of each token.
    ///
    /// # Errors
    /// A 503 where there is no room.
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

    /// Reads the answer to its end on the account of `memory`, which holds it until it has been written. `each` takes its pieces, as
    /// [`Self::poll_deltas`] hands them on.
    ///
    /// # Errors
    /// What the engine's stream ends with, or a 503 where there is no memory for more.
    ///
    /// # Cancel safety
    /// The answer is lost when the future is dropped, but for the pieces that `each` has taken.
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

    /// Reads the whole answer on the account of `memory`, which is given back with it: it holds the answer until it has been
    /// written.
    ///
    /// # Errors
    /// What the engine's stream ends with, or a 503 where there is no memory for more; what was read is lost.
    ///
    /// # Cancel safety
    /// Text read so far is lost when the future is dropped.
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
