//! [`Foretold`]: a token that the engine is known to generate, used as a stop token.
//!
//! The kit knows nothing of a model, so it sends a request first and stops the second answer at a token of the first. For the
//! groups that need a sequence to end by itself (ST, FN, US).

use genset_backend_common::{FinishReason, GenerateRequest, TokenId};

use crate::answer::Answer;
use crate::check::{Stop, fail, skip};
use crate::trial::Live;

/// The number of tokens of the first answer.
const FORETOLD_TOKENS: u32 = 12;

/// The number of prompts to try for an answer with different tokens.
const PROMPTS: u64 = 3;

/// A request, its unstopped answer, and a token of that answer.
pub(super) struct Foretold {
    request: GenerateRequest,
    tokens: Vec<TokenId>,
    vocab_size: u32,
    /// The number of tokens before [`Self::token`]; it is not among them.
    pub(super) place: u32,
    /// The token to stop at.
    pub(super) token: TokenId,
}

impl Foretold {
    /// Finds a token after at least `wanted_place` others if the model varies its tokens enough, else the first.
    pub(super) async fn ask(live: &Live, wanted_place: usize) -> Result<Self, Stop> {
        let mut last = None;
        for seed in 0..PROMPTS {
            let request = live.greedy(live.prompt(4, seed), FORETOLD_TOKENS);
            let tokens = live.answer(request.clone()).await?.tokens();
            let place = (wanted_place..tokens.len())
                .find(|place| !tokens[..*place].contains(&tokens[*place]));
            if let Some(place) = place {
                return Ok(Self::at(live, request, tokens, place));
            }
            last = Some((request, tokens));
        }
        match last {
            Some((request, tokens)) if !tokens.is_empty() => Ok(Self::at(live, request, tokens, 0)),
            _ => fail!("no token was generated"),
        }
    }

    fn at(live: &Live, request: GenerateRequest, tokens: Vec<TokenId>, place: usize) -> Self {
        Self {
            request,
            vocab_size: live.vocab_size(),
            token: tokens[place],
            place: u32::try_from(place).unwrap_or(u32::MAX),
            tokens,
        }
    }

    /// The request again, limited only by `max_tokens`.
    pub(super) fn request(&self) -> GenerateRequest {
        self.request.clone()
    }

    /// The request with the token in `stop_token_ids`, after one that does not come.
    pub(super) fn stopping(&self) -> GenerateRequest {
        let mut request = self.request();
        let absent = (0..self.vocab_size).find(|token| !self.tokens.contains(token));
        request.stop.stop_token_ids = absent.into_iter().chain([self.token]).collect();
        request
    }

    /// The request with the token as the model's end of sequence.
    pub(super) fn ending(&self) -> GenerateRequest {
        let mut request = self.request();
        request.stop.ignore_eos = false;
        request.stop.eos_token_ids = [self.token].into();
        request
    }

    /// Skips the check if the engine took another path this time, on which the token never came. Then it samples and declares
    /// no way to be greedy, so nothing can be foretold. DT01 judges tokens that should repeat.
    pub(super) fn expect_met(&self, answer: &Answer) -> Result<(), Stop> {
        let tokens = answer.tokens();
        let never_came = !tokens.contains(&self.token)
            && answer.reason() == Some(FinishReason::Length)
            && !self.tokens.starts_with(&tokens);
        if never_came {
            skip!(
                NotDeclared,
                "the engine answers one request in different ways, so no token can be foretold"
            );
        }
        Ok(())
    }

    /// The tokens that must come before the token, if the answer took the foretold path.
    pub(super) fn before(&self) -> &[TokenId] {
        let place = usize::try_from(self.place).unwrap_or(usize::MAX);
        &self.tokens[..place.min(self.tokens.len())]
    }
}
