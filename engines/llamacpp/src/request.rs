//! [`Active`]: the engine thread's state of a request beside its tokens; chooses the next token.

use genset_backend_common::output::{Finish, TokenChunk, TokenSink};
use genset_backend_common::{EngineError, StopConditions};
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

impl Active {
    /// Chooses the next token. Returns the tokens to send, and how the answer ends, if it does. Overwrites `logits`.
    pub(crate) fn choose(
        &mut self,
        logits: &mut [f32],
    ) -> Result<(TokenChunk, Option<Finish>), EngineError> {
        let mask = self.guide.as_mut().map(Guide::mask).transpose()?;
        let sampled = self.sampler.sample(logits, mask.as_ref())?;
        let guide = self.guide.as_mut();
        let chosen = (self.sampler).accept_sampled(sampled, guide, &self.stop, self.max_tokens);
        Ok(chosen?)
    }

    /// Ends the request, and reports the number of reused tokens to its reader.
    pub(crate) fn finish(self, finish: Finish) {
        let cached_tokens = self.cached_tokens.unwrap_or(0);
        self.sink.finish(finish.with_cached_tokens(cached_tokens));
    }
}
