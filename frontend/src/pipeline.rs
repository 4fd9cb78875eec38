//! From a checked request to running answers: template, tokenize, generate. HTTP and the text chat both use it.
//!
//! What may take long goes to [`WorkThreads`](crate::WorkThreads), or yields in between: a request never keeps an async
//! thread for longer than some milliseconds, whatever it holds.

mod chat;
mod choices;
mod completion;
mod embedding;
mod encode;
mod score;
mod timings;
mod tokens;
mod unless_called;

use std::sync::Arc;

use genset_backend_common::{
    GuidedDecoding, Input, TokenId,
    request::{ScorePair, Shared},
};
use serde_json::Value;
use tokio::time::Instant;

pub(crate) use chat::REASONING_EFFORT;
pub use choices::Answers;
pub use embedding::{EmbedJob, Embedded};
pub use score::{ScoreJob, Scored};
pub use timings::PromptTimings;
pub(crate) use tokens::no_tokenizer;
pub use tokens::{detokenize, token_strings, tokenize_prompt};

use crate::budget::MemoryShare;
use crate::error::ApiError;
use crate::json::value_bytes;
use crate::model::ServedModel;
use crate::openai::CommonParams;
use crate::parsers::Splitting;

/// What an answer takes while it runs, its text aside: its request, its stream, its place among the others.
const ANSWER_BYTES: usize = 10 << 10;

/// What one takes that has ended, its text aside, until all have.
const ENDED_ANSWER_BYTES: usize = 512;

/// The work of one request: its prompts, ready for the engine.
#[derive(Debug)]
pub struct Job {
    model: Arc<ServedModel>,
    params: CommonParams,
    inputs: Vec<Input>,
    /// How the answers are taken apart; `None` where all of their text is content.
    splitting: Option<Splitting>,
    guided: Option<Shared<GuidedDecoding>>,
    /// Whether `guided` binds the content alone, of an answer that may call tools instead.
    may_call_instead: bool,
    /// The client's field that asks for `guided`.
    bound_by: Option<Arc<str>>,
    /// Whether the text of the answers goes on with that of their prompts, as no chat's does.
    continues_prompts: bool,
    /// What the answers to each input begin with, if with their prompts.
    echoes: Vec<Arc<str>>,
}

/// What the work on a request's prompts has: until when they are wanted, its memory, and whose tokens it may know.
#[derive(Debug)]
pub struct Room {
    /// When nobody wants them any more.
    pub deadline: Option<Instant>,
    /// What the work takes of the memory budget. It is given back where the work ends, also when its client has left before.
    pub memory: MemoryShare,
    /// What is known of other prompts with the same salt need not be tokenized again.
    pub salt: Option<String>,
}

/// What is made of a request and kept for it.
pub(crate) trait Prepared {
    /// About how much memory it takes until the request is answered.
    fn held_bytes(&self) -> usize;
}

impl Prepared for Vec<TokenId> {
    fn held_bytes(&self) -> usize {
        size_of_val(self.as_slice())
    }
}

impl Prepared for String {
    fn held_bytes(&self) -> usize {
        self.len()
    }
}

impl Prepared for Job {
    /// Of its answers too, but for what they say.
    fn held_bytes(&self) -> usize {
        let answers = self.answer_count();
        let running = answers.min(self.model.max_running_choices.get());
        let inputs: usize = self.inputs.iter().map(input_bytes).sum();
        let echoes: usize = self.echoes.iter().map(|echo| echo.len()).sum();
        inputs + echoes + running * ANSWER_BYTES + answers * ENDED_ANSWER_BYTES
    }
}

impl Job {
    /// The parameters shared by all answers.
    #[must_use]
    pub fn params(&self) -> &CommonParams {
        &self.params
    }
}

/// What binds the answers, and the client's field that asks for it.
type Bound = (GuidedDecoding, Arc<str>);

/// Checks what the model must be able to do beside generating, and takes out what binds the answers.
fn bind(model: &ServedModel, params: &mut CommonParams) -> Result<Option<Bound>, ApiError> {
    let can = &model.card.capabilities;
    if can.whole_bodies {
        let why = "this model's engine reads requests to /v1/chat/completions and /v1/completions itself, and no other API's";
        return Err(ApiError::unsupported("model", why));
    }
    if let Some(logprobs) = &params.logprobs {
        // Text that an engine makes by itself comes without.
        logprobs.check(can.max_logprobs.filter(|_| model.text.is_some()))?;
    }
    let guided = params.guided.take();
    let checked = guided.map(|guided| {
        let field = guided.field.as_str().into();
        Ok((guided.check(&can.guided)?, field))
    });
    checked.transpose()
}

/// An engine that tokenizes by itself counts and knows tokens of its own.
fn refuse_token_options(params: &CommonParams) -> Result<(), ApiError> {
    let why = "this model's engine takes text, not tokens";
    if !params.stop.stop_token_ids.is_empty() {
        return Err(ApiError::unsupported("stop_token_ids", why));
    }
    if params.stop.min_tokens > 0 {
        return Err(ApiError::unsupported("min_tokens", why));
    }
    Ok(())
}

/// About how much memory an input takes.
fn input_bytes(input: &Input) -> usize {
    match input {
        Input::Tokens(tokens) => size_of_val(tokens.as_slice()),
        Input::Text(text) => text.len(),
        Input::Chat(chat) => chat
            .messages
            .iter()
            .chain(&chat.tools)
            .map(value_bytes)
            .sum(),
        Input::Embed(inputs) => inputs
            .iter()
            .map(|tokens| size_of_val(tokens.as_slice()))
            .sum(),
        Input::Score(pairs) => pairs.iter().map(pair_bytes).sum(),
    }
}

/// About how much memory a pair takes.
fn pair_bytes(pair: &ScorePair) -> usize {
    size_of::<ScorePair>() + size_of_val(pair.token_ids.as_slice())
}

/// About the bytes of text in a message or a tool that are to be worked on, or any number from `enough` on: so that counting
/// is short too.
fn text_bytes(value: &Value, enough: usize) -> usize {
    /// What a value takes whatever is in it.
    const A_VALUE: usize = 8;
    let inside = |sum: usize, value: &Value| match enough.checked_sub(sum) {
        Some(rest) if rest > 0 => sum + text_bytes(value, rest),
        Some(_) | None => sum,
    };
    match value {
        Value::String(text) => A_VALUE + text.len(),
        Value::Array(items) => items.iter().fold(A_VALUE, inside),
        Value::Object(fields) => fields.iter().fold(A_VALUE, |sum, (name, value)| {
            inside(sum + name.len(), value)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => A_VALUE,
    }
}
