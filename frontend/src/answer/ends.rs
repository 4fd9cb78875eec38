//! How answers end, and what they cost: [`AnswerEnd`] and [`Ending`] of one that is read piece by piece, [`Completed`] of a whole one,
//! [`TotalUsage`] of a request.

use genset_backend_common::FinishReason;
use genset_backend_common::output::Usage;

use super::TokenLogprobs;
use crate::markup::Message;

/// How an answer ended and what it cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerEnd {
    /// Why it ended.
    pub reason: FinishReason,
    /// What it cost.
    pub usage: Usage,
    /// Whether it is the first answer to its prompt, which pays for the prompt.
    pub pays_for_prompt: bool,
    /// The stop string that cut it, by its place among the request's.
    pub stop_string: Option<usize>,
}

impl AnswerEnd {
    /// Adds what this answer cost to the cost of a request. A prompt counts once, however many answers it has.
    pub fn add_to(&self, sum: &mut Usage) {
        sum.completion_tokens = sum
            .completion_tokens
            .saturating_add(self.usage.completion_tokens);
        if let Some(predictions) = self.usage.predictions {
            sum.predictions.get_or_insert_default().add(predictions);
        }
        if self.pays_for_prompt {
            sum.prompt_tokens = sum.prompt_tokens.saturating_add(self.usage.prompt_tokens);
            if let Some(cached) = self.usage.cached_tokens {
                sum.cached_tokens = Some(sum.cached_tokens.unwrap_or(0).saturating_add(cached));
            }
        }
    }
}

/// What the answers to a request cost together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TotalUsage {
    /// What engines count.
    pub usage: Usage,
    /// How many of the completion tokens were thoughts, with the markers around them.
    pub reasoning_tokens: u32,
}

impl TotalUsage {
    /// Adds an answer that ended so, and had so many tokens of thoughts.
    pub fn add(&mut self, end: &AnswerEnd, reasoning_tokens: u32) {
        end.add_to(&mut self.usage);
        self.reasoning_tokens = self.reasoning_tokens.saturating_add(reasoning_tokens);
    }
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Completed {
    /// What it says.
    pub message: Message,
    /// How it ended and what it cost.
    pub end: AnswerEnd,
    /// Its tokens' log probabilities; `None` where they were not asked for.
    pub rated: Option<Vec<TokenLogprobs>>,
    /// How many of its tokens were thoughts.
    pub reasoning_tokens: u32,
    /// Whether its last tool call is not whole.
    pub has_open_call: bool,
}

/// The end of an answer that was read piece by piece.
#[derive(Debug, Clone, PartialEq)]
pub struct Ending {
    /// Whether it calls tools.
    pub has_calls: bool,
    /// Whether the last of them is not whole.
    pub has_open_call: bool,
    /// Log probabilities that no piece took along.
    pub rated: Vec<TokenLogprobs>,
    /// How many of its tokens were thoughts.
    pub reasoning_tokens: u32,
}

impl Ending {
    /// What an answer cost that ended so, alone in its request.
    #[must_use]
    pub fn spent(&self, end: &AnswerEnd) -> TotalUsage {
        let mut spent = TotalUsage::default();
        spent.add(end, self.reasoning_tokens);
        spent
    }
}
