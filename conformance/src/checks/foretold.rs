//! [`Foretold`]: a token that the engine is known to generate, to stop at.
//!
//! The kit knows nothing of a model, so it asks first and stops the second answer at a token of the first. For the groups
//! that need a sequence to end by itself (ST, FN, US).

use genset_backend_common::{FinishReason, GenerateRequest, TokenId};

use crate::answer::Answer;
use crate::check::{Stop, fail, skip};
use crate::trial::Live;

/// Tokens in the answer that is asked for first.
const FORETOLD_TOKENS: u32 = 12;

/// Prompts tried in search of an answer whose tokens differ.
const PROMPTS: u64 = 3;

/// A request, the answer it gives when nothing stops it, and a token of that answer.
pub(super) struct Foretold {
    request: GenerateRequest,
    tokens: Vec<TokenId>,
    vocab_size: u32,
    /// How many tokens come before [`Self::token`]; it is not among them.
    pub(super) place: u32,
    /// The token to stop at.
    pub(super) token: TokenId,
}

impl Foretold {
    /// A token that comes after at least `wanted_place` others where the model varies its tokens enough, else the first.
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
        let vocab_size = live.config.vocab_size;
        Self {
            request,
            vocab_size: vocab_size.map_or(u32::MAX, std::num::NonZeroU32::get),
            token: tokens[place],
            place: u32::try_from(place).unwrap_or(u32::MAX),
            tokens,
        }
    }

    /// The request once more, with nothing to stop it but `max_tokens`.
    pub(super) fn request(&self) -> GenerateRequest {
        self.request.clone()
    }

    /// The request with the token among `stop_token_ids`, behind one that does not come.
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

    /// Ends the check when the engine took another way this time, on which the token never came: it chooses at random
    /// and declares no way not to, so nothing can be foretold. Tokens that ought to repeat are for DT01 to judge.
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

    /// What must come before the token, when the answer went the foretold way.
    pub(super) fn before(&self) -> &[TokenId] {
        let place = usize::try_from(self.place).unwrap_or(usize::MAX);
        &self.tokens[..place.min(self.tokens.len())]
    }
}
