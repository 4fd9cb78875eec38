//! [`NotResumable`]: why an answer that has begun cannot continue at another instance. Pure.
//!
//! The router checks before it resumes a request, and the Worker's adapter refuses requests that should not resume: both call
//! [`Capabilities::resumes`](crate::Capabilities::resumes).

use std::error::Error;
use std::fmt;

use super::{GenerateRequest, Input, is_set};

/// Why an answer that has begun cannot continue at another instance.
///
/// `Display` is a clause for the client. The value is also the source of the error of a lost answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotResumable {
    /// The engine declares no way to resume from another instance's tokens.
    Undeclared,
    /// The prompt or the answer is not tokens, but text or media.
    NotTokens,
    /// The seed draws by the position in the answer.
    Seed,
    /// A penalty counts the answer's tokens.
    Penalty,
    /// A grammar depends on the answer's text.
    Guided,
}

impl NotResumable {
    /// Returns the clause for the client.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Undeclared => {
                "this model's engine cannot continue an answer that another worker began"
            }
            Self::NotTokens => {
                "this request is text or media to its engine, so its answer cannot continue on another worker"
            }
            Self::Seed => {
                "this request has a seed, so its answer cannot continue on another worker of this engine"
            }
            Self::Penalty => {
                "this request has a presence, frequency or repetition penalty, so its answer cannot continue on another worker of \
                 this engine"
            }
            Self::Guided => {
                "this request binds its answer to a schema, a grammar or a tool call, so it cannot continue on another worker of \
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
    /// Returns whether the rest of the answer depends on the tokens so far only as on any other context, so that a longer prompt
    /// has the same rest: for engines that declare [`resume_as_prompt`](crate::Capabilities::resume_as_prompt).
    ///
    /// Length limits do not prevent it, since the router subtracts the tokens already streamed. Log probabilities, biases and
    /// stop tokens do not either: they concern each token alone. Engines never see stop strings.
    ///
    /// # Errors
    /// What prevents it.
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
        if !matches!(self.input, Input::Tokens(_)) {
            return Err(NotResumable::NotTokens);
        }
        if self.guided.is_some() {
            return Err(NotResumable::Guided);
        }
        if sampling.seed.is_some() {
            return Err(NotResumable::Seed);
        }
        // Some engines do not count prompt tokens, not even for the repetition penalty.
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
            // These options have no effect.
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
