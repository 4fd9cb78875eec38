//! What is kept of an answer, and the request that resumes from it. Pure: no waiting.

use std::sync::Arc;

use genset_backend_common::memory::{HeldBytes, Memory};
use genset_backend_common::output::{Finish, Finished};
use genset_backend_common::{
    Capabilities, GenerateRequest, Input, Output, TokenId, request::NotResumable,
};

const TOKEN_BYTES: usize = size_of::<TokenId>();

/// Initial capacity, in tokens; it doubles from there.
const FIRST_TOKENS: usize = 64;

/// Why a request cannot migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stuck {
    /// It migrated, or lost instances, as often as its model allows.
    Limit,
    /// Its answer has begun, and its engine cannot resume from another instance's tokens.
    NotResumable(NotResumable),
    /// The memory budget for kept tokens was exhausted.
    NotKept,
    /// No other instance took it in time.
    NoInstance,
    /// Its deadline passed before it could continue.
    Deadline,
}

impl Stuck {
    /// The name in metrics.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::NotResumable(_) => "not_resumable",
            Self::NotKept => "not_kept",
            Self::NoInstance => "no_instance",
            Self::Deadline => "deadline",
        }
    }
}

/// What is kept of a request's answer.
#[derive(Debug)]
pub(super) enum Kept {
    /// All of its tokens so far.
    Tokens {
        tokens: Vec<TokenId>,
        share: HeldBytes,
    },
    /// Nothing was streamed yet; once something is, the request cannot resume, for this reason.
    Nothing(NotResumable),
    /// It can no longer migrate.
    Lost(Stuck),
}

impl Kept {
    /// Starts keeping. The prompt counts too: no one else may hold it when it is sent again.
    pub(super) fn of(request: &GenerateRequest, can: &Capabilities, budget: &Arc<Memory>) -> Self {
        if let Err(why) = can.resumes(request) {
            return Self::Nothing(why);
        }
        let Input::Tokens(prompt) = &request.input else {
            return Self::Nothing(NotResumable::NotTokens);
        };
        let Some(share) = budget.try_hold(prompt.len() * TOKEN_BYTES) else {
            return Self::Lost(Stuck::NotKept);
        };
        let tokens = Vec::new();
        Self::Tokens { tokens, share }
    }

    /// Records what is streamed. Costs a copy of the ids, and an allocation when the capacity doubles.
    pub(super) fn push(&mut self, output: &Output) {
        match (&mut *self, output) {
            (Self::Lost(_), _) | (_, Output::Finished(_)) => {}
            (Self::Tokens { tokens, share }, Output::Tokens(chunk)) => {
                let ids = &chunk.token_ids;
                let missing = (tokens.len() + ids.len()).saturating_sub(tokens.capacity());
                if missing > 0 {
                    let room = missing.max(tokens.capacity()).max(FIRST_TOKENS);
                    if !share.grow_by(room * TOKEN_BYTES) {
                        *self = Self::Lost(Stuck::NotKept);
                        return;
                    }
                    tokens.reserve_exact(tokens.capacity() - tokens.len() + room);
                }
                tokens.extend_from_slice(ids);
            }
            (Self::Nothing(why), _) => *self = Self::Lost(Stuck::NotResumable(*why)),
            (Self::Tokens { .. }, _) => {
                *self = Self::Lost(Stuck::NotResumable(NotResumable::NotTokens));
            }
        }
    }

    /// Returns the tokens streamed so far.
    fn tokens(&self) -> &[TokenId] {
        match self {
            Self::Tokens { tokens, .. } => tokens,
            Self::Nothing(_) | Self::Lost(_) => &[],
        }
    }
}

/// How a request continues.
#[derive(Debug, PartialEq)]
pub(super) enum GoesOn {
    /// As this request, whose prompt ends with this many tokens of the answer.
    As(Box<GenerateRequest>, u32),
    /// It ends: only the terminal was missing.
    Ends(Finished),
}

/// Returns how `request` continues after the `kept` part of its answer.
///
/// # Errors
/// Why it cannot.
pub(super) fn resume(
    request: &GenerateRequest,
    kept: &Kept,
    context_length_tokens: u32,
) -> Result<GoesOn, Stuck> {
    if let Kept::Lost(why) = kept {
        return Err(*why);
    }
    let given = kept.tokens();
    let count = u32::try_from(given.len()).unwrap_or(u32::MAX);
    let Input::Tokens(prompt) = &request.input else {
        return Ok(GoesOn::As(Box::new(request.clone()), 0));
    };
    if count == 0 {
        return Ok(GoesOn::As(Box::new(request.clone()), 0));
    }
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = context_length_tokens.saturating_sub(prompt_tokens);
    if count >= request.stop.max_tokens_within(room) {
        let finished = Finish::length().into_finished(prompt_tokens, count);
        return Ok(GoesOn::Ends(finished));
    }
    Ok(GoesOn::As(Box::new(continued(request, given)), count))
}

/// Returns the request that continues `request` after the tokens `given` of its answer. It may have more tokens than those.
pub(crate) fn continued(request: &GenerateRequest, given: &[TokenId]) -> GenerateRequest {
    let mut request = request.clone();
    if let Input::Tokens(prompt) = &mut request.input
        && !given.is_empty()
    {
        let count = u32::try_from(given.len()).unwrap_or(u32::MAX);
        *prompt = [prompt.as_slice(), given].concat().into();
        request.resumed_tokens = request.resumed_tokens.saturating_add(count);
        request.stop.max_tokens = request.stop.max_tokens.map(|max| max - count);
        request.stop.min_tokens = request.stop.min_tokens.saturating_sub(count);
    }
    request
}

/// Rewrites the terminal of a request that resumed after `resumed` tokens to cover the whole answer.
pub(crate) fn without_seam(finished: &mut Finished, resumed: u32) {
    let usage = &mut finished.usage;
    usage.prompt_tokens = usage.prompt_tokens.saturating_sub(resumed);
    usage.completion_tokens = usage.completion_tokens.saturating_add(resumed);
    // Cached tokens of the answer are not part of the prompt.
    usage.cached_tokens = usage
        .cached_tokens
        .map(|cached| cached.min(usage.prompt_tokens));
    if resumed > 0 {
        // The counts of earlier instances are lost.
        usage.predictions = None;
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::output::PredictionTokens;

    use super::*;

    #[test]
    fn what_became_of_guesses_is_told_of_whole_answers_alone() {
        let predictions = PredictionTokens {
            accepted: 4,
            rejected: 2,
        };
        for (resumed, told) in [(0, Some(predictions)), (3, None)] {
            let finish = Finish::length().with_predictions(predictions);
            let mut finished = finish.into_finished(10, 5);
            without_seam(&mut finished, resumed);
            assert_eq!(finished.usage.predictions, told, "{resumed}");
        }
    }
}
