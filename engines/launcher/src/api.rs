//! What requests and answers look like on a server's HTTP API: one module an API, the same trait for all.

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
    Capabilities, EngineError, ErrorKind, GenerateRequest, TokenId, async_trait, config::InputKind,
    request::MediaKind,
};
use serde_json::Value;

pub(crate) use completions::{TRTLLM_NO_SALTS, trtllm_reuses_blocks};
pub(crate) use llama::PAST_LIMIT as LLAMA_PAST_LIMIT;
pub(crate) use wire::{error_of, token_logprob};
pub(crate) use withheld::{Withheld, Withholds};

use crate::config::{LauncherConfig, ServerInput};
use crate::dialect::Dialect;
use crate::http::{Client, HttpError};

/// Why an API is never asked for a leg: the instance was refused at its start.
const NO_LEGS: &str = "this server does not know prefill and decode apart";

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

/// What one event says.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Step {
    pub(crate) tokens: TokenChunk,
    /// The text of tokens of which only the last are named; `tokens` is empty then.
    pub(crate) withheld: Option<Withheld>,
    pub(crate) text: String,
    pub(crate) end: Option<End>,
    pub(crate) prompt_tokens: Option<u32>,
    pub(crate) cached_tokens: Option<u32>,
    /// Tokens generated so far, by a server whose answer is text.
    pub(crate) completion_tokens: Option<u32>,
}

/// How the server says that a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// At a token, where it is named.
    Stop(Option<TokenId>),
    Length,
    /// The server gave up on the request.
    Aborted(String),
}

/// What a server says about itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) context_length_tokens: Option<u32>,
    pub(crate) max_num_seqs: Option<u32>,
    /// Tokens per KV block.
    pub(crate) kv_block_size: Option<NonZeroU32>,
    pub(crate) kv_total_blocks: Option<u64>,
    /// Data-parallel ranks.
    pub(crate) ranks: Option<u32>,
    /// Why its KV events cannot be followed, if they cannot.
    pub(crate) no_kv_events: Option<&'static str>,
}

/// Reads the events of one answer.
pub(crate) trait Reader: Send {
    /// # Errors
    /// What the server says went wrong, or `Disconnected` for what cannot be read.
    fn read(&mut self, event: &[u8]) -> Result<Step, EngineError>;
}

/// A server's API.
#[async_trait]
pub(crate) trait Api: Send + Sync + std::fmt::Debug {
    /// What the API carries.
    fn capabilities(&self) -> Capabilities;

    /// The request on the wire; `max_tokens` is what it may generate, where that is known.
    ///
    /// # Errors
    /// `Unsupported` or `InvalidArgument` for what the API cannot carry.
    fn call(&self, request: &GenerateRequest, max_tokens: Option<u32>)
    -> Result<Call, EngineError>;

    /// A prefill on the wire: one token, answered whole, and the server keeps the KV blocks for another to fetch.
    ///
    /// # Errors
    /// As [`call`](Self::call); `Unsupported` where the API does not know prefills.
    fn prefill_call(&self, _request: &GenerateRequest) -> Result<Call, EngineError> {
        Err(EngineError::unsupported("role", NO_LEGS))
    }

    /// The request on the wire, for a server that is to fetch the KV blocks of its prompt as `params` say.
    ///
    /// # Errors
    /// As [`prefill_call`](Self::prefill_call).
    fn decode_call(
        &self,
        _request: &GenerateRequest,
        _max_tokens: Option<u32>,
        _params: &Value,
    ) -> Result<Call, EngineError> {
        Err(EngineError::unsupported("role", NO_LEGS))
    }

    /// What the answer to a prefill says about the KV blocks that are kept; `None` where it says nothing.
    ///
    /// # Errors
    /// `Disconnected` for what cannot be read.
    fn kept_blocks(&self, _answer: &[u8]) -> Result<Option<Value>, EngineError> {
        Ok(None)
    }

    /// What the server is probed with, where it cannot carry the usual probe.
    fn canary(&self, _model: &str) -> Option<GenerateRequest> {
        None
    }

    /// A reader for the answer to `request`.
    fn reader(&self, request: &GenerateRequest) -> Box<dyn Reader>;

    /// Whether an answer that the server ended at the model's end of a sequence can go on: with a call whose prompt has the answer
    /// so far.
    fn goes_on(&self) -> bool {
        false
    }

    /// Whether the usage of the answer to `request` comes in an event of its own, after the last token.
    fn tells_usage_later(&self, _request: &GenerateRequest) -> bool {
        false
    }

    /// What a server is asked that withholds tokens; `None` where it names and rates them all.
    fn withholds(&self) -> Option<&dyn Withholds> {
        None
    }

    /// Asks a healthy server about itself.
    async fn facts(&self, client: &Client) -> Result<Facts, HttpError>;

    /// The prompt's length, asked of a server that does not tell it with the answer.
    async fn prompt_tokens(
        &self,
        _client: &Client,
        _request: &GenerateRequest,
    ) -> Result<Option<u32>, HttpError> {
        Ok(None)
    }
}

/// The API of a program, as the config uses it.
///
/// # Errors
/// `Unsupported` for tokens to `llama_cpp.server`, which takes text only.
pub(crate) fn of(config: &LauncherConfig, dialect: Dialect) -> Result<Arc<dyn Api>, EngineError> {
    let model = config.model.display().to_string();
    let is_text = config.input == ServerInput::Text;
    let media = &config.media;
    Ok(match dialect {
        Dialect::Vllm => Arc::new(completions::Completions::vllm(
            model,
            config.extra.as_ref(),
            media,
        )),
        Dialect::Trtllm => Arc::new(completions::Completions::trtllm(
            model,
            config.extra.as_ref(),
        )),
        Dialect::Sglang => Arc::new(sglang::Sglang::new(config.extra.as_ref(), media)),
        Dialect::LlamaServer if is_text => Arc::new(text::Text::llama_server()),
        Dialect::LlamaServer => Arc::new(llama::Llama::default()),
        Dialect::LlamaCppPython if is_text => Arc::new(text::Text::llama_cpp_python()),
        Dialect::LlamaCppPython => {
            let problem = "llama_cpp.server takes text only; leave the folder with the tokenizer out, or install llama-server";
            return Err(EngineError::unsupported("--model-config", problem));
        }
    })
}

/// Declares chats for the media that may be in them: those without any come as tokens.
fn with_media(mut can: Capabilities, media: &BTreeSet<MediaKind>) -> Capabilities {
    if !media.is_empty() {
        can.inputs.insert(InputKind::Chat);
        can.media.clone_from(media);
    }
    can
}

/// An answer that is none.
pub(crate) fn unreadable(problem: impl std::fmt::Display) -> EngineError {
    let message = format!("the server's answer is not what its documentation says: {problem}");
    EngineError::new(ErrorKind::Disconnected, message)
}

/// The first model of `/v1/models`, whose context vLLM and SGLang tell.
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
