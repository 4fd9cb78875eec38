//! [`NotResumable`]: what in a request keeps its answer, once begun, from going on at another instance. Pure.
//!
//! The router asks before it makes a request that goes on, and the Worker's adapter refuses those it should not have made:
//! both by [`Capabilities::resumes`](crate::Capabilities::resumes).

use std::error::Error;
use std::fmt;

use super::{GenerateRequest, Input};

/// Why the answer to a request cannot go on at another instance once it has begun.
///
/// `Display` is a clause for the client. It is also the source of the error of an answer that is lost so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotResumable {
    /// The engine declares no way to go on from another instance's tokens.
    Undeclared,
    /// The prompt or the answer is no tokens, but text or media.
    NotTokens,
    /// Its seed draws by the place in the answer.
    Seed,
    /// A penalty counts the answer's tokens.
    Penalty,
    /// A grammar goes on from the answer's text.
    Guided,
}

impl NotResumable {
    /// The clause for the client.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Undeclared => {
                "this model's engine cannot go on with an answer that another worker began"
            }
            Self::NotTokens => {
                "this request is text or media to its engine, so its answer cannot go on at another worker"
            }
            Self::Seed => {
                "this request has a seed, so its answer cannot go on at another worker of this engine"
            }
            Self::Penalty => {
                "this request has a presence, frequency or repetition penalty, so its answer cannot go on at another worker of \
                 this engine"
            }
            Self::Guided => {
                "this request binds its answer to a schema, a grammar or a tool call, so it cannot go on at another worker of \
                 this engine"
            }
        }
    }
}

impl fmt::Display for NotResumable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

impl Error for NotResumable {}

impl GenerateRequest {
    /// Whether the rest of the answer depends on the answer so far as on any other context, so that a longer prompt has the same
    /// rest: for engines that declare [`resume_as_prompt`](crate::Capabilities::resume_as_prompt).
    ///
    /// The limits on the length do not stand in the way, for the router takes off what was given, nor do log probabilities,
    /// biases and stop tokens, which are each token's own. Stop strings no engine sees.
    ///
    /// # Errors
    /// What stands in the way.
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::{GenerateRequest, request::NotResumable};
    ///
    /// let mut request = GenerateRequest::from_tokens("tiny-chat", vec![1, 2, 3]);
    /// assert_eq!(request.resumes_as_prompt(), Ok(()));
    /// request.sampling.seed = Some(7);
    /// assert_eq!(request.resumes_as_prompt(), Err(NotResumable::Seed));
    /// ```
    pub fn resumes_as_prompt(&self) -> Result<(), NotResumable> {
        let sampling = &self.sampling;
        let is_set =
            |penalty: Option<f32>, neutral: f32| penalty.is_some_and(|value| value != neutral);
        if !matches!(self.input, Input::Tokens(_)) {
            return Err(NotResumable::NotTokens);
        }
        if self.guided.is_some() {
            return Err(NotResumable::Guided);
        }
        if sampling.seed.is_some() {
            return Err(NotResumable::Seed);
        }
        // Of the prompt's tokens some engines count none for the repetition penalty either.
        if is_set(sampling.presence_penalty, 0.0)
            || is_set(sampling.frequency_penalty, 0.0)
            || is_set(sampling.repetition_penalty, 1.0)
        {
            return Err(NotResumable::Penalty);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::GuidedDecoding;

    type Ask = fn(&mut GenerateRequest);

    fn asked(ask: Ask) -> Result<(), NotResumable> {
        let mut request = GenerateRequest::from_tokens("m", vec![1, 2]);
        ask(&mut request);
        request.resumes_as_prompt()
    }

    #[test]
    fn what_is_each_tokens_own_does_not_stand_in_the_way() {
        let asks: [Ask; 6] = [
            |r| r.stop.max_tokens = Some(9),
            |r| (r.stop.min_tokens, r.stop.stop_token_ids) = (4, [7].into()),
            |r| (r.sampling.temperature, r.sampling.top_p) = (Some(0.8), Some(0.9)),
            |r| r.sampling.logit_bias = [(3, 1.0)].into(),
            |r| r.output.logprobs = Some(2),
            // They ask for nothing.
            |r| {
                r.sampling.presence_penalty = Some(0.0);
                r.sampling.frequency_penalty = Some(0.0);
                r.sampling.repetition_penalty = Some(1.0);
            },
        ];
        for ask in asks {
            assert_eq!(asked(ask), Ok(()));
        }
    }

    #[test]
    fn what_counts_on_the_answer_so_far_stands_in_the_way_and_is_named() {
        let asks: [(Ask, NotResumable, &str); 6] = [
            (|r| r.sampling.seed = Some(0), NotResumable::Seed, "a seed"),
            (
                |r| r.sampling.presence_penalty = Some(0.5),
                NotResumable::Penalty,
                "penalty",
            ),
            (
                |r| r.sampling.frequency_penalty = Some(-0.5),
                NotResumable::Penalty,
                "penalty",
            ),
            (
                |r| r.sampling.repetition_penalty = Some(1.1),
                NotResumable::Penalty,
                "penalty",
            ),
            (
                |r| r.guided = Some(GuidedDecoding::JsonObject.into()),
                NotResumable::Guided,
                "a schema",
            ),
            (
                |r| r.input = Input::Text("hi".into()),
                NotResumable::NotTokens,
                "text",
            ),
        ];
        for (ask, why, word) in asks {
            assert_eq!(asked(ask), Err(why));
            assert!(why.to_string().contains(word), "{why}");
        }
    }
}
