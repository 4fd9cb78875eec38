//! How answers end and their usage: [`AnswerEnd`] and [`Ending`] for a streamed answer, [`Completed`] for a whole one,
//! [`TotalUsage`] for a request.

use genset_backend_common::FinishReason;
use genset_backend_common::output::Usage;

use super::TokenLogprobs;
use crate::markup::Message;

/// How an answer ended, and its usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerEnd {
    /// Why it ended.
    pub reason: FinishReason,
    /// Its usage.
    pub usage: Usage,
    /// Whether it is the first answer to its prompt, which pays for the prompt.
    pub pays_for_prompt: bool,
    /// The stop string that cut the answer, as an index into the request's.
    pub stop_string: Option<usize>,
}

impl AnswerEnd {
    /// Adds this answer's usage to a request's. A prompt counts once, however many answers it has.
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

/// The usage of all answers to a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TotalUsage {
    /// The usage that engines report.
    pub usage: Usage,
    /// How many of the completion tokens were reasoning, with the markers around it.
    pub reasoning_tokens: u32,
}

impl TotalUsage {
    /// Adds an answer that ended with `end` and had `reasoning_tokens`.
    pub fn add(&mut self, end: &AnswerEnd, reasoning_tokens: u32) {
        end.add_to(&mut self.usage);
        self.reasoning_tokens = self.reasoning_tokens.saturating_add(reasoning_tokens);
    }
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Completed {
    /// Its message.
    pub message: Message,
    /// How it ended, and its usage.
    pub end: AnswerEnd,
    /// Its tokens' log probabilities; `None` if the request did not ask for them.
    pub rated: Option<Vec<TokenLogprobs>>,
    /// How many of its tokens were reasoning.
    pub reasoning_tokens: u32,
    /// Whether its last tool call is incomplete.
    pub has_open_call: bool,
}

/// The end of a streamed answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ending {
    /// Whether it calls tools.
    pub has_calls: bool,
    /// Whether the last call is incomplete.
    pub has_open_call: bool,
    /// Log probabilities that no delta carried.
    pub rated: Vec<TokenLogprobs>,
    /// How many of its tokens were reasoning.
    pub reasoning_tokens: u32,
}

impl Ending {
    /// The total usage of a request with this answer alone.
    #[must_use]
    pub fn total_usage(&self, end: &AnswerEnd) -> TotalUsage {
        let mut total = TotalUsage::default();
        total.add(end, self.reasoning_tokens);
        total
    }
}
