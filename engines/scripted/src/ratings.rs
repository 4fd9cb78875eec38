//! [`Ratings`]: the log probabilities of a reply's tokens.
//!
//! Tokens that the script does not mention are certain: their log probability is 0, and every other token has [`IMPOSSIBLE`].
//! So a plain reply has the log probabilities of a model with one possible answer.

use genset_backend_common::TokenId;
use genset_backend_common::output::{TokenLogprob, TopLogprob};

use crate::script::{Reply, ReplyError};
use crate::vocabulary::Vocabulary;

/// The maximum number of candidates with log probabilities, as in OpenAI's API.
pub(crate) const MAX_LOGPROBS: u32 = 20;

/// The log probability of an impossible token. JSON has no minus infinity; OpenAI's API uses this value.
const IMPOSSIBLE: f32 = -9999.0;

/// The log probabilities of a reply's tokens, for one request.
#[derive(Debug)]
pub(crate) struct Ratings {
    /// One entry per token; tokens past the end are certain.
    scripted: Vec<Rated>,
    /// The number of candidates requested.
    top: usize,
    vocab_size: u32,
}

#[derive(Debug)]
struct Rated {
    logprob: f32,
    alternatives: Vec<TopLogprob>,
}

impl Ratings {
    /// Looks up the alternatives of a reply.
    ///
    /// # Errors
    /// Fails if an alternative is not exactly one token.
    pub(crate) fn try_new(
        reply: &Reply,
        top: u32,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Self, ReplyError> {
        let mut scripted = Vec::with_capacity(reply.logprobs.len());
        for (number, at) in (1..).zip(&reply.logprobs) {
            let mut alternatives = Vec::with_capacity(at.alternatives.len());
            for (text, logprob) in &at.alternatives {
                alternatives.push(TopLogprob {
                    token_id: single_token(text, number, vocabulary)?,
                    logprob: *logprob,
                });
            }
            scripted.push(Rated {
                logprob: at.logprob,
                alternatives,
            });
        }
        Ok(Self {
            scripted,
            top: usize::try_from(top).unwrap_or(usize::MAX),
            vocab_size: vocabulary.size(),
        })
    }

    /// The log probabilities of `token` at index `place` of the answer, from 0.
    pub(crate) fn rate(&self, token: TokenId, place: u32) -> TokenLogprob {
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        let rated = self.scripted.get(place);
        let logprob = rated.map_or(0.0, |rated| rated.logprob);
        let chosen = TopLogprob {
            token_id: token,
            logprob,
        };
        let alternatives = rated.map_or(&[][..], |rated| &rated.alternatives);
        let others = alternatives.iter().filter(|other| other.token_id != token);
        let mut top: Vec<TopLogprob> = std::iter::once(&chosen).chain(others).copied().collect();
        self.fill(&mut top);
        // The sort is stable: between equal candidates the chosen one comes first.
        top.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
        top.truncate(self.top);
        TokenLogprob { logprob, top }
    }

    /// Adds impossible tokens until there are as many candidates as requested.
    fn fill(&self, top: &mut Vec<TopLogprob>) {
        for token_id in 0..self.vocab_size {
            if top.len() >= self.top {
                return;
            }
            if top.iter().all(|known| known.token_id != token_id) {
                top.push(TopLogprob {
                    token_id,
                    logprob: IMPOSSIBLE,
                });
            }
        }
    }
}

fn single_token(
    text: &str,
    number: usize,
    vocabulary: &dyn Vocabulary,
) -> Result<TokenId, ReplyError> {
    let key = || format!("logprobs, token {number}, alternative {text:?}");
    let tokens = vocabulary
        .encode(text)
        .map_err(|error| ReplyError::new(key(), error.to_string()))?;
    match tokens[..] {
        [token] => Ok(token),
        _ => Err(ReplyError::new(
            key(),
            format!("must be one token of the model's, not {}", tokens.len()),
        )),
    }
}
