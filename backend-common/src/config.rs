//! What an engine declares at start: [`EngineConfig`] with its [`Capabilities`]. Requests for undeclared abilities are refused
//! before they reach the engine.

mod bounds;
mod capabilities;
#[cfg(test)]
mod tests;

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

pub(crate) use self::bounds::Bounds;
pub use self::capabilities::{
    Capabilities, Deviation, GuidedKind, InputKind, SamplingOption, no_media,
};
use crate::error::{At, EngineError, RequestField};
use crate::request::GenerateRequest;

/// The maximum number of data-parallel ranks of an instance.
pub const MAX_DATA_PARALLEL_SIZE: u32 = 1024;

/// The properties of a started engine.
///
/// # Examples
/// ```
/// use genset_backend_common::{Capabilities, EngineConfig};
///
/// let config = EngineConfig::new("tiny-chat", 2048)
///     .with_vocab_size(2048)
///     .with_capabilities(Capabilities::tokens().with_point_mass_sampling());
/// config.validate().unwrap();
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The model's name; not empty.
    pub model: String,
    /// The maximum length of prompt and output together, in tokens; at least 1.
    pub context_length_tokens: u32,
    /// The vocabulary size: token ids are below it; `None` when the engine does not know.
    pub vocab_size: Option<NonZeroU32>,
    /// Tokens per KV block; `None` for engines without KV blocks.
    pub kv_block_size: Option<NonZeroU32>,
    /// The total number of KV blocks.
    pub kv_total_blocks: Option<u64>,
    /// Sequences the engine runs at once; it queues others or refuses them as `Overloaded`. Informs operators and the conformance
    /// kit. A Worker ignores it: it sends up to [`RequestLimits::max_running`](crate::worker::RequestLimits::max_running)
    /// requests.
    pub max_num_seqs: Option<u32>,
    /// The maximum number of tokens in one step.
    pub max_num_batched_tokens: Option<u32>,
    /// Data-parallel ranks inside the instance, from 1 to [`MAX_DATA_PARALLEL_SIZE`].
    pub data_parallel_size: u32,
    /// What the engine can do.
    pub capabilities: Capabilities,
    /// The request with which the Worker probes the engine; `None` for a one-token default.
    pub canary: Option<Box<GenerateRequest>>,
}

impl EngineConfig {
    /// Returns a config with the two required values; it takes tokens and declares nothing else.
    #[must_use]
    pub fn new(model: impl Into<String>, context_length_tokens: u32) -> Self {
        Self {
            model: model.into(),
            context_length_tokens,
            vocab_size: None,
            kv_block_size: None,
            kv_total_blocks: None,
            max_num_seqs: None,
            max_num_batched_tokens: None,
            data_parallel_size: 1,
            capabilities: Capabilities::tokens(),
            canary: None,
        }
    }

    /// Sets the vocabulary size; 0 means unknown.
    #[must_use]
    pub fn with_vocab_size(mut self, vocab_size: u32) -> Self {
        self.vocab_size = NonZeroU32::new(vocab_size);
        self
    }

    /// Sets what the engine can do.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Checks the config itself.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field: empty model name, zero context length, no input kind, media without chat, a number of
    /// ranks out of range, or an ability that answers cannot carry.
    pub fn validate(&self) -> Result<(), EngineError> {
        let problem = if self.model.trim().is_empty() {
            (
                "model",
                "the engine returned an empty model name from start",
            )
        } else if self.context_length_tokens == 0 {
            ("context_length_tokens", "must be at least 1")
        } else if self.capabilities.inputs.is_empty() {
            ("capabilities.inputs", "declare at least one kind of input")
        } else if !self.capabilities.media.is_empty()
            && !self.capabilities.inputs.contains(&InputKind::Chat)
        {
            (
                "capabilities.media",
                "are parts of chat messages; declare that input too",
            )
        } else if !(1..=MAX_DATA_PARALLEL_SIZE).contains(&self.data_parallel_size) {
            ("data_parallel_size", "must be between 1 and 1024")
        } else if self.capabilities.prompt_logprobs {
            (
                "capabilities.prompt_logprobs",
                "no item of an answer can carry them yet; declare false",
            )
        } else {
            return Ok(());
        };
        Err(EngineError::invalid_argument(
            At::other(problem.0),
            problem.1,
        ))
    }

    /// Checks a request against ranges, capabilities, vocabulary and context, before the engine sees it.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported` or `ContextLengthExceeded`, naming the field.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let bounds = Bounds {
            capabilities: &self.capabilities,
            vocab_size: self.vocab_size,
            context_length_tokens: self.context_length_tokens,
        };
        bounds.check(request)?;
        match request.data_parallel_rank {
            Some(rank) if rank >= self.data_parallel_size => Err(EngineError::invalid_argument(
                RequestField::DataParallelRank,
                format!(
                    "must be below {}, the number of ranks that can be named, got {rank}",
                    self.data_parallel_size
                ),
            )),
            Some(_) | None => Ok(()),
        }
    }
}
