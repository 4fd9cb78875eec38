//! The requests and answers of the servers' HTTP APIs: one module per API, one trait for all.

mod chat;
mod completions;
pub(crate) mod controls;
mod guided;
mod llama;
mod sglang;
mod text;
mod wire;
mod withheld;

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use bytes::Bytes;
use genset_backend_common::output::TokenChunk;
use genset_backend_common::{
    Capabilities, EngineError, ErrorKind, GenerateRequest, SamplingOptions, TokenId, async_trait,
    config::InputKind, request::MediaKind,
};
use serde_json::{Map, Value};
use text::{Flavor, Text};

pub(crate) use completions::{TRTLLM_NO_SALTS, trtllm_event_blocks, trtllm_reuses_blocks};
pub(crate) use llama::{Llama, PAST_LIMIT as LLAMA_PAST_LIMIT};
pub(crate) use wire::{error_of, kept_blocks, token_logprob};
pub(crate) use withheld::Withheld;

use crate::apart::Leg;
use crate::bounds::NO_TOP_K;
use crate::config::{LauncherConfig, ServerInput};
use crate::dialect::Dialect;
use crate::http::{Client, HttpError};

/// A request as it is sent.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) path: &'static str,
    pub(crate) body: Bytes,
    pub(crate) headers: Vec<(&'static str, String)>,
}

impl Call {
    fn new(path: &'static str, body: &Value) -> Self {
        Self {
            path,
            body: body.to_string().into(),
            headers: Vec::new(),
        }
    }
}

/// The content of one event.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Step {
    pub(crate) tokens: TokenChunk,
    /// Text that stands for more tokens than the event names; `tokens` is empty then.
    pub(crate) withheld: Option<Withheld>,
    pub(crate) text: String,
    pub(crate) end: Option<End>,
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) cached_tokens: Option<u32>,
    /// The number of tokens generated so far, from a server that answers with text.
    pub(crate) completion_tokens: Option<u32>,
}

/// How a sequence ended, according to the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// At a token, if the server names it.
    Stop(Option<TokenId>),
    Length,
    /// The server gave up on the request.
    Aborted(String),
}

/// What a server reports about itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) context_length_tokens: Option<u32>,
    pub(crate) max_num_seqs: Option<u32>,
    /// Tokens per KV block.
    pub(crate) kv_block_size: Option<NonZeroU32>,
    pub(crate) kv_total_blocks: Option<u64>,
    /// Data-parallel ranks.
    pub(crate) ranks: Option<u32>,
    /// Why its KV events cannot be used, if they cannot.
    pub(crate) no_kv_events: Option<&'static str>,
}

/// Reads the events of one answer.
pub(crate) trait Reader: Send {
    /// # Errors
    /// The server's error, or `Disconnected` if the event cannot be decoded.
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError>;
}

/// A server's API.
#[async_trait]
pub(crate) trait Api: Send + Sync + std::fmt::Debug {
    /// The capabilities that the API can carry.
    fn capabilities(&self) -> Capabilities;

    /// Builds the HTTP request; `max_tokens` limits the answer, if known.
    ///
    /// # Errors
    /// `Unsupported` or `InvalidArgument` if the API cannot carry the request.
    fn call(&self, request: &GenerateRequest, max_tokens: Option<u32>)
    -> Result<Call, EngineError>;

    /// Builds the HTTP request for a leg of the request. A prefill asks for one token, not streamed; the server keeps the KV
    /// blocks for another server to fetch.
    ///
    /// # Errors
    /// As [`call`](Self::call); `Unsupported` if the API has no separate prefill.
    fn leg_call(
        &self,
        request: &GenerateRequest,
        max_tokens: Option<u32>,
        leg: &Leg,
    ) -> Result<Call, EngineError> {
        match leg {
            Leg::Whole => self.call(request, max_tokens),
            // An instance with such a role fails at its start, so reaching this is a bug.
            Leg::Prefill | Leg::Decode(_) => {
                let problem = "this server does not know prefill and decode apart";
                Err(EngineError::unsupported("role", problem))
            }
        }
    }

    /// The probe for a server that cannot carry the usual one.
    fn canary(&self, _model: &str) -> Option<GenerateRequest> {
        None
    }

    /// Returns a reader for the answer to `request`.
    fn reader(&self, request: &GenerateRequest) -> Box<dyn Reader>;

    /// Whether we can continue an answer after the server's own end of sequence, with a call whose prompt includes the answer
    /// so far.
    fn goes_on(&self) -> bool {
        false
    }

    /// Whether the usage of the answer to `request` arrives in a separate event after the last token.
    fn tells_usage_later(&self, _request: &GenerateRequest) -> bool {
        false
    }

    /// The API of a server that withholds tokens; `None` if it names and rates all tokens.
    fn withholds(&self) -> Option<&Llama> {
        None
    }

    /// Queries a healthy server about itself.
    async fn facts(&self, client: &Client) -> Result<Facts, HttpError>;

    /// Queries the prompt's length, for a server that does not report it with the answer.
    async fn prompt_tokens(
        &self,
        _client: &Client,
        _request: &GenerateRequest,
    ) -> Result<Option<u32>, HttpError> {
        Ok(None)
    }
}

/// The API of a program, for this config.
///
/// # Errors
/// `Unsupported` for token input to `llama_cpp.server`, which takes only text.
pub(crate) fn of(config: &LauncherConfig, dialect: Dialect) -> Result<Arc<dyn Api>, EngineError> {
    let is_text = config.input == ServerInput::Text;
    Ok(match dialect {
        Dialect::Vllm => Arc::new(completions::Completions::vllm(config)),
        Dialect::Trtllm => Arc::new(completions::Completions::trtllm(config)),
        Dialect::Sglang => Arc::new(sglang::Sglang::new(config)),
        Dialect::LlamaServer if is_text => Arc::new(Text::new(Flavor::LlamaServer)),
        Dialect::LlamaServer => Arc::new(Llama::default()),
        Dialect::LlamaCppPython if is_text => Arc::new(Text::new(Flavor::LlamaCppPython)),
        Dialect::LlamaCppPython => {
            let problem = "llama_cpp.server takes text only; leave the folder with the tokenizer out, or install llama-server";
            return Err(EngineError::unsupported("--model-config", problem));
        }
    })
}

/// Declares chat input if the model takes media; chats without media arrive as tokens.
fn with_media(mut can: Capabilities, media: &BTreeSet<MediaKind>) -> Capabilities {
    if !media.is_empty() {
        can.inputs.insert(InputKind::Chat);
        can.media.clone_from(media);
    }
    can
}

/// A field of a body, by its name, if it is given.
type Field = (&'static str, Option<Value>);

/// The sampling options that all servers take under one name, and the repetition penalty under the name `repetition_penalty`.
/// `no_top_k` is the server's `top_k` that is no limit.
fn sampling_fields(
    sampling: &SamplingOptions,
    repetition_penalty: &'static str,
    no_top_k: i32,
) -> [Field; 7] {
    let top_k = |top_k| match top_k {
        NO_TOP_K => Value::from(no_top_k),
        top_k => Value::from(top_k),
    };
    [
        ("temperature", sampling.temperature.map(Value::from)),
        ("top_p", sampling.top_p.map(Value::from)),
        ("top_k", sampling.top_k.map(top_k)),
        ("min_p", sampling.min_p.map(Value::from)),
        (
            "presence_penalty",
            sampling.presence_penalty.map(Value::from),
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty.map(Value::from),
        ),
        (
            repetition_penalty,
            sampling.repetition_penalty.map(Value::from),
        ),
    ]
}

/// The biases by token, if there are any.
fn biases(sampling: &SamplingOptions) -> Option<Value> {
    let biases = sampling.logit_bias.iter();
    let biases: Map<String, Value> = biases
        .map(|(token, bias)| (token.to_string(), Value::from(*bias)))
        .collect();
    (!biases.is_empty()).then_some(Value::Object(biases))
}

/// The fields that are given.
fn given(fields: impl IntoIterator<Item = Field>) -> impl Iterator<Item = (String, Value)> {
    let given = fields.into_iter();
    given.filter_map(|(name, value)| Some((name.to_owned(), value?)))
}

/// The error for an answer that cannot be decoded.
pub(crate) fn unreadable(problem: impl std::fmt::Display) -> EngineError {
    let message = format!("the server's answer is not what its documentation says: {problem}");
    EngineError::new(ErrorKind::Disconnected, message)
}

/// The error for an answer without the log probabilities that were asked for.
fn no_logprobs() -> EngineError {
    unreadable("it has no log probabilities, which the request asks for")
}

/// The first model of `/v1/models`, which for vLLM and SGLang includes the context length.
async fn first_model(client: &Client) -> Result<Facts, HttpError> {
    let models: wire::Models = client.get("/v1/models").await?;
    let context = models
        .data
        .into_iter()
        .next()
        .and_then(|model| model.max_model_len);
    Ok(Facts {
        context_length_tokens: context,
        ..Facts::default()
    })
}

#[cfg(test)]
mod tests;
