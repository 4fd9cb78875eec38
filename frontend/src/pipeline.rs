//! From a validated request to running answers: template, tokenize, generate. Used by HTTP and the text chat.
//!
//! Work that may take long runs on [`WorkThreads`](crate::WorkThreads), or yields in between. So no request occupies an async
//! thread for longer than a few milliseconds.

mod chat;
mod chat_body;
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
use crate::text::StopStrings;
use crate::work::SHORT_WORK_BYTES;

/// The memory of a running answer, without its text: its request, its stream, its bookkeeping.
const ANSWER_BYTES: usize = 10 << 10;

/// The memory of an ended answer, without its text, until all have ended.
const ENDED_ANSWER_BYTES: usize = 512;

/// The work of one request: its prompts, ready for the engine.
#[derive(Debug)]
pub struct Job {
    model: Arc<ServedModel>,
    params: CommonParams,
    inputs: Vec<Input>,
    /// How the answers are split; `None` if all of their text is content.
    splitting: Option<Splitting>,
    guided: Option<Shared<GuidedDecoding>>,
    /// The approximate memory of `guided` and of the schemas in `splitting`.
    schema_bytes: usize,
    /// Whether `guided` constrains only the content of an answer that may call tools instead.
    may_call_instead: bool,
    /// The client's field that asks for `guided`.
    bound_by: Option<Arc<str>>,
    /// Whether the answers' text continues their prompts' text; never for chats.
    continues_prompts: bool,
    /// The prompts with which the answers begin, if they echo them.
    echoes: Vec<Arc<str>>,
}

/// Resources for the preparation of a request's prompts: deadline, memory, and cache salt.
#[derive(Debug)]
pub struct Room {
    /// When the prompts are no longer needed.
    pub deadline: Option<Instant>,
    /// The memory that the work takes of the budget. It is released when the work ends, not
    /// when the client leaves.
    pub memory: MemoryShare,
    /// Cached tokens of prompts with the same salt may be reused.
    pub salt: Option<String>,
}

/// A prepared request.
pub(crate) trait Prepared {
    /// The approximate memory that it takes until the request is answered.
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
    /// Includes its answers, except their text.
    fn held_bytes(&self) -> usize {
        let answers = self.answer_count();
        let running = answers.min(self.model.max_running_choices.get());
        let inputs: usize = self.inputs.iter().map(input_bytes).sum();
        let echoes: usize = self.echoes.iter().map(|echo| echo.len()).sum();
        let stops = StopStrings::prepared_bytes(&self.params.stop_strings);
        let answers = running * ANSWER_BYTES + answers * ENDED_ANSWER_BYTES;
        inputs + echoes + self.schema_bytes + stops + answers
    }
}

impl Job {
    /// The parameters shared by all answers.
    #[must_use]
    pub fn params(&self) -> &CommonParams {
        &self.params
    }
}

/// The constraint on the answers, and the client's field that asks for it.
type Bound = (GuidedDecoding, Arc<str>);

/// Checks the capabilities that a request needs besides generation, and takes out its constraint.
fn bind(model: &ServedModel, params: &mut CommonParams) -> Result<Option<Bound>, ApiError> {
    let can = &model.card.capabilities;
    if let Some(logprobs) = &params.logprobs {
        // Text that an engine detokenizes itself has no log probabilities.
        logprobs.check(can.max_logprobs.filter(|_| model.text.is_some()))?;
    }
    let guided = params.guided.take();
    let checked = guided.map(|guided| {
        let field = guided.field.as_str().into();
        Ok((guided.check(&can.guided)?, field))
    });
    checked.transpose()
}

/// An engine that tokenizes itself has token ids and counts of its own.
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

/// The approximate memory of an input.
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

/// The approximate memory of a pair.
fn pair_bytes(pair: &ScorePair) -> usize {
    size_of::<ScorePair>() + size_of_val(pair.token_ids.as_slice())
}

/// The approximate bytes of text in the values, or any number that is too large for an async thread.
fn bytes_to_work_on<'a>(values: impl Iterator<Item = &'a Value>) -> usize {
    values.fold(0, add_text_bytes)
}

/// Adds the approximate bytes of text to process in a part of a message or tool, unless `sum` is large already, so that counting
/// is short too.
fn add_text_bytes(sum: usize, value: &Value) -> usize {
    /// The cost of a value with any content.
    const A_VALUE: usize = 8;
    if sum >= SHORT_WORK_BYTES {
        return sum;
    }
    let sum = sum + A_VALUE;
    match value {
        Value::String(text) => sum + text.len(),
        Value::Array(items) => items.iter().fold(sum, add_text_bytes),
        Value::Object(fields) => fields.iter().fold(sum, |sum, (name, value)| {
            add_text_bytes(sum + name.len(), value)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => sum,
    }
}
