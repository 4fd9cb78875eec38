//! [`Active`]: the engine thread's state of a request beside its tokens; chooses the next token.

use genset_backend_common::output::{Finish, TokenChunk, TokenSink};
use genset_backend_common::{EngineError, StopConditions, TokenId};
use genset_sampling::Sampler;
use genset_sampling::guided::Guide;

/// A request in progress.
pub(crate) struct Active {
    pub(crate) sink: TokenSink,
    pub(crate) sampler: Sampler,
    pub(crate) guide: Option<Guide>,
    pub(crate) stop: StopConditions,
    /// At least 1; prompt and answer together fit the context.
    pub(crate) max_tokens: u32,
    /// The number of prompt tokens whose cells were reused; `None` before the first computation.
    pub(crate) cached_tokens: Option<u32>,
}

/// The result of a row of logits.
pub(crate) enum Chosen {
    /// The answer continues with this token.
    Token(TokenId, TokenChunk),
    End(Finish),
}

impl Active {
    /// Chooses the next token. Overwrites `logits`.
    pub(crate) fn choose(&mut self, logits: &mut [f32]) -> Result<Chosen, EngineError> {
        let mask = self.guide.as_mut().map(Guide::mask).transpose()?;
        let sampled = self.sampler.sample(logits, mask.as_ref())?;
        let token = sampled.token;
        let is_end = self.guide.as_ref().is_some_and(|guide| guide.is_end(token));
        if is_end || self.stop.is_stop(token, self.sampler.generated()) {
            return Ok(Chosen::End(Finish::stop_token(token)));
        }
        self.sampler.accept(token);
        let mut chunk = TokenChunk::from(token);
        chunk.logprobs.extend(sampled.logprob);
        if let Some(guide) = &mut self.guide {
            guide.accept(token)?;
            if guide.is_finished() {
                return Ok(Chosen::End(Finish::stop().with_last(chunk)));
            }
        }
        if self.sampler.generated() >= self.max_tokens {
            return Ok(Chosen::End(Finish::length().with_last(chunk)));
        }
        Ok(Chosen::Token(token, chunk))
    }

    /// Ends the request, and reports the number of reused tokens to its reader.
    pub(crate) fn finish(self, finish: Finish) {
        let cached_tokens = self.cached_tokens.unwrap_or(0);
        self.sink.finish(finish.with_cached_tokens(cached_tokens));
    }
}
