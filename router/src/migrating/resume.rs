//! What is kept of an answer, and the request that goes on from it. Pure: nothing here waits.

use std::sync::Arc;

use genset_backend_common::output::{Finish, Finished};
use genset_backend_common::{
    Capabilities, GenerateRequest, Input, Output, TokenId, request::NotResumable,
};

use super::budget::{Budget, Share};

const TOKEN_BYTES: usize = size_of::<TokenId>();

/// Room for so many tokens is made at first; it doubles from there.
const FIRST_TOKENS: usize = 64;

/// Why a request cannot go on elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stuck {
    /// It moved, or lost instances, as often as its model allows.
    Limit,
    /// Its engine cannot go on from another's answer to it, which has begun.
    NotResumable(NotResumable),
    /// There was no memory to keep it in.
    NotKept,
    /// No other instance took it in time.
    NoInstance,
    /// Its deadline passed meanwhile.
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

/// What a request has given so far.
#[derive(Debug)]
pub(super) enum Kept {
    /// All of its tokens.
    Tokens { tokens: Vec<TokenId>, share: Share },
    /// Nothing was given, and what will be cannot be gone on from, for this reason.
    Nothing(NotResumable),
    /// It cannot go on any more.
    Lost(Stuck),
}

impl Kept {
    /// Begins to keep. The prompt counts too: nobody else may hold it by the time it is sent again.
    pub(super) fn of(request: &GenerateRequest, can: &Capabilities, budget: &Arc<Budget>) -> Self {
        if let Err(why) = can.resumes(request) {
            return Self::Nothing(why);
        }
        let Input::Tokens(prompt) = &request.input else {
            return Self::Nothing(NotResumable::NotTokens);
        };
        let mut share = Share::new(budget);
        if share.try_grow(prompt.len() * TOKEN_BYTES) {
            let tokens = Vec::new();
            Self::Tokens { tokens, share }
        } else {
            Self::Lost(Stuck::NotKept)
        }
    }

    /// Notes what is given. No more than a copy of the ids, but where the room doubles.
    pub(super) fn push(&mut self, output: &Output) {
        match (&mut *self, output) {
            (Self::Lost(_), _) | (_, Output::Finished(_)) => {}
            (Self::Tokens { tokens, share }, Output::Tokens(chunk)) => {
                let ids = &chunk.token_ids;
                let missing = (tokens.len() + ids.len()).saturating_sub(tokens.capacity());
                if missing > 0 {
                    let room = missing.max(tokens.capacity()).max(FIRST_TOKENS);
                    if !share.try_grow(room * TOKEN_BYTES) {
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

    /// The tokens that were given.
    fn tokens(&self) -> &[TokenId] {
        match self {
            Self::Tokens { tokens, .. } => tokens,
            Self::Nothing(_) | Self::Lost(_) => &[],
        }
    }
}

/// How a request goes on.
#[derive(Debug, PartialEq)]
pub(super) enum GoesOn {
    /// As this request, whose prompt ends with so many tokens of the answer.
    As(Box<GenerateRequest>, u32),
    /// Not at all: only the terminal was missing.
    Ends(Finished),
}

/// How `request` goes on after what is `kept` of its answer.
///
/// # Errors
/// Why it does not.
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
    let mut request = request.clone();
    let Input::Tokens(prompt) = &mut request.input else {
        return Ok(GoesOn::As(Box::new(request), 0));
    };
    if count == 0 {
        return Ok(GoesOn::As(Box::new(request), 0));
    }
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let room = context_length_tokens.saturating_sub(prompt_tokens);
    if count >= request.stop.max_tokens_within(room) {
        let finished = Finish::length().into_finished(prompt_tokens, count);
        return Ok(GoesOn::Ends(finished));
    }
    *prompt = [prompt.as_slice(), given].concat().into();
    request.resumed_tokens = request.resumed_tokens.saturating_add(count);
    request.stop.max_tokens = request.stop.max_tokens.map(|max| max - count);
    request.stop.min_tokens = request.stop.min_tokens.saturating_sub(count);
    Ok(GoesOn::As(Box::new(request), count))
}

/// Makes the terminal of a request that went on after `resumed` tokens that of the whole.
pub(super) fn without_seam(finished: &mut Finished, resumed: u32) {
    let usage = &mut finished.usage;
    usage.prompt_tokens = usage.prompt_tokens.saturating_sub(resumed);
    usage.completion_tokens = usage.completion_tokens.saturating_add(resumed);
    // What the new instance had of the answer is no part of the prompt.
    usage.cached_tokens = usage
        .cached_tokens
        .map(|cached| cached.min(usage.prompt_tokens));
    if resumed > 0 {
        // Those of the instances before went with them.
        usage.predictions = None;
    }
}
