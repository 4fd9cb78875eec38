//! [`Performance`]: plays one reply, with its pauses, its limits and its fault.

use std::future::ready;

use futures_util::StreamExt;
use genset_backend_common::output::{self, Finish, OutputStream, OutputWriter, TokenChunk};
use genset_backend_common::{
    EngineError, ErrorKind, FinishReason, RequestContext, StopConditions, TokenId,
};

use crate::ratings::Ratings;
use crate::script::{Break, How, Pace};

/// The content of one item.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Text that counts as one token.
    Text(String),
    /// Tokens, at least one.
    Tokens(Vec<TokenId>),
}

/// Everything that one answer needs. Only its end is still open.
#[derive(Debug)]
pub(crate) struct Performance {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) pace: Pace,
    pub(crate) fault: Option<Break>,
    /// The finish reason if no limit or fault ends the answer first.
    pub(crate) finish_reason: FinishReason,
    /// At least 1.
    pub(crate) max_tokens: u32,
    pub(crate) stop: StopConditions,
    /// Set if log probabilities were requested.
    pub(crate) ratings: Option<Ratings>,
}

/// The progress of an answer.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    chunks: u32,
    tokens: u32,
}

impl Performance {
    /// Plays the reply. Cancelling the request ends it at any point, also while it hangs.
    pub(crate) fn stream(self, ctx: RequestContext) -> OutputStream {
        let vanishes = matches!(&self.fault, Some(fault) if fault.how == How::Vanish);
        let performed = ctx.clone();
        let outputs = output::stream(
            ctx,
            move |out| async move { self.play(&out, &performed).await },
        );
        if !vanishes {
            return outputs;
        }
        let is_gone = |error: &EngineError| error.kind() == ErrorKind::StreamIncomplete;
        let visible = outputs.take_while(move |item| ready(!item.as_ref().is_err_and(is_gone)));
        OutputStream::from_raw(Box::pin(visible))
    }

    async fn play(&self, out: &OutputWriter, ctx: &RequestContext) -> Result<Finish, EngineError> {
        let mut so_far = Progress::default();
        loop {
            if let Some(fault) = self
                .fault
                .as_ref()
                .filter(|f| f.after_chunks <= so_far.chunks)
            {
                return Err(strike(&fault.how, ctx).await);
            }
            if so_far.tokens >= self.max_tokens {
                return Ok(Finish::length());
            }
            let Some(piece) = self.next_piece(so_far) else {
                break;
            };
            self.pace.wait(so_far.chunks).await;
            let (tokens, end) = self.send(piece, so_far.tokens, out).await?;
            if let Some(end) = end {
                return Ok(end);
            }
            so_far.chunks = so_far.chunks.saturating_add(1);
            so_far.tokens = so_far.tokens.saturating_add(tokens);
        }
        // If a reply has fewer chunks than its fault waits for, the script is wrong, so the fault replaces the success.
        match &self.fault {
            Some(fault) => Err(strike(&fault.how, ctx).await),
            None => Ok(Finish {
                reason: self.finish_reason,
                ..Finish::stop()
            }),
        }
    }

    /// The next piece, or `None` at the reply's end. Under `ignore_eos` and before `min_tokens` the reply starts again, as a
    /// model that must not end yet would continue.
    fn next_piece(&self, so_far: Progress) -> Option<&Piece> {
        let chunks = usize::try_from(so_far.chunks).unwrap_or(usize::MAX);
        let index = chunks.checked_rem(self.pieces.len())?;
        let is_at_end = index == 0 && chunks > 0;
        let may_end = !self.stop.ignore_eos && so_far.tokens >= self.stop.min_tokens;
        if is_at_end && may_end {
            return None;
        }
        self.pieces.get(index)
    }

    /// Sends as much of a piece as the limits allow. Returns the number of tokens sent, and the finish at a stop token.
    async fn send(
        &self,
        piece: &Piece,
        generated: u32,
        out: &OutputWriter,
    ) -> Result<(u32, Option<Finish>), EngineError> {
        let tokens = match piece {
            Piece::Text(text) => {
                out.text(text.as_str(), 1).await?;
                return Ok((1, None));
            }
            Piece::Tokens(tokens) => tokens,
        };
        let mut chunk = TokenChunk::default();
        let mut end = None;
        for (token, place) in tokens.iter().copied().zip(generated..self.max_tokens) {
            if self.stop.is_stop(token, place) {
                end = Some(Finish::stop_token(token));
                break;
            }
            chunk.token_ids.push(token);
            let rated = self
                .ratings
                .as_ref()
                .map(|ratings| ratings.rate(token, place));
            chunk.logprobs.extend(rated);
        }
        let sent = chunk.len();
        out.tokens(chunk).await?;
        Ok((sent, end))
    }
}

/// Breaks off an answer.
async fn strike(how: &How, ctx: &RequestContext) -> EngineError {
    match how {
        How::Error(error) => error.to_error(ctx),
        How::Hang => std::future::pending().await,
        How::Panic => fall(),
        // The outer stream drops this error and just ends.
        How::Vanish => EngineError::new(ErrorKind::StreamIncomplete, "the script ends the stream"),
    }
}

#[expect(clippy::panic, reason = "the script asks for an engine that panics")]
fn fall() -> ! {
    panic!("the script says: panic")
}
