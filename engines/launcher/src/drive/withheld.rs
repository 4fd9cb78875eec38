//! Recovers what a server withheld from its answer, with additional calls.

use std::num::NonZeroU32;

use genset_backend_common::output::{TokenChunk, TokenLogprob, TopLogprob};
use genset_backend_common::{EngineError, GenerateRequest, Input};

use super::Drive;
use crate::api::{Llama, Withheld, token_logprob, unreadable};

/// The maximum length of an unstreamed answer of a few tokens, in bytes. The answer repeats the prompt.
const MAX_WHOLE_BYTES: usize = 16 << 20;

/// The maximum length of an answer that rates a whole vocabulary, in bytes: 100 per token.
const MAX_RATING_BYTES: usize = 64 << 20;

impl Drive {
    fn withholds(&self) -> Result<&Llama, EngineError> {
        let server = self.api.withholds();
        server.ok_or_else(|| unreadable("it withheld tokens"))
    }

    /// Recovers the tokens of a text with the server's own tokenizer.
    pub(super) async fn found(&self, withheld: &Withheld) -> Result<TokenChunk, EngineError> {
        match Llama::pieces(&self.server.client, &withheld.text).await {
            Ok(pieces) => Ok(withheld.fill(&pieces)?.into_iter().collect()),
            Err(error) => Err(self.lost(error).await),
        }
    }

    /// Draws the tokens after `behind` again in a call that names them.
    pub(super) async fn drawn_again(
        &self,
        behind: &GenerateRequest,
        count: usize,
    ) -> Result<TokenChunk, EngineError> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let call = self.withholds()?.whole_call(behind, count)?;
        let answer = self.send(&call).await?;
        match answer.body.read_up_to(MAX_WHOLE_BYTES).await {
            Ok(body) => Ok(Llama::whole_tokens(&body)?.into_iter().collect()),
            Err(error) => Err(self.lost(error).await),
        }
    }

    /// The log probabilities of tokens after `behind`: asks the server for the candidates at each position.
    pub(super) async fn rated(
        &self,
        mut behind: GenerateRequest,
        tokens: &TokenChunk,
        asked: u32,
    ) -> Result<Vec<TokenLogprob>, EngineError> {
        let all = self
            .vocab_size
            .map_or(i32::MAX.unsigned_abs(), NonZeroU32::get);
        let mut rated = Vec::new();
        for token in tokens.token_ids.iter().copied() {
            let of_token = |top: &[TopLogprob]| top.iter().find(|it| it.token_id == token).copied();
            let mut top = self.candidates(&behind, asked.max(1)).await?;
            if of_token(&top).is_none() {
                top = self.candidates(&behind, all).await?;
            }
            let Some(own) = of_token(&top) else {
                return Err(unreadable(format!(
                    "token {token} came, and is not among all candidates"
                )));
            };
            rated.push(token_logprob(own.logprob, top, asked));
            let longer = behind.tokens()?.iter().copied().chain([token]);
            behind.input = Input::Tokens(longer.collect::<Vec<_>>().into());
        }
        Ok(rated)
    }

    async fn candidates(
        &self,
        behind: &GenerateRequest,
        count: u32,
    ) -> Result<Vec<TopLogprob>, EngineError> {
        let call = self.withholds()?.rating_call(behind, count)?;
        let answer = self.send(&call).await?;
        match answer.body.read_up_to(MAX_RATING_BYTES).await {
            Ok(body) => Llama::candidates(&body),
            Err(error) => Err(self.lost(error).await),
        }
    }
}
