//! [`ModelCard`]: what a worker publishes about its model, enough for a frontend without the model's files.

mod known;
mod template_parsers;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Bounds, Capabilities, EngineConfig, InputKind};
use crate::controls::{Adapter, MAX_ADAPTERS, check_text};
use crate::engine::Role;
use crate::error::{At, EngineError};
use crate::request::GenerateRequest;
use crate::spelling::none_of;

pub use template_parsers::TemplateParsers;

/// Default number of tokens per KV block, if neither engine nor operator sets one.
pub const DEFAULT_KV_BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(16).unwrap();

/// Default number of times a request may migrate, if the operator sets none.
pub const DEFAULT_MIGRATION_LIMIT: u32 = 3;

/// The longest name or alias of a model, in bytes.
pub const MAX_MODEL_NAME_BYTES: usize = 1024;

/// Size limit of an artifact, in bytes: enough for a tokenizer with 250,000 entries.
pub const MAX_ARTIFACT_BYTES: u64 = 64 << 20;

/// The maximum number of artifacts of a model.
pub const MAX_ARTIFACTS: usize = 16;

/// Size limit of all artifacts of a model, in bytes: a frontend holds them while it prepares the model.
pub const MAX_ARTIFACTS_BYTES: u64 = 128 << 20;

crate::named! {
    /// An API that a model serves.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum EndpointType {
        /// `/v1/chat/completions`.
        Chat = "chat",
        /// `/v1/completions`.
        Completions = "completions",
        /// `/v1/embeddings`.
        Embeddings = "embeddings",
        /// `/v1/rerank` and `/v1/score`.
        Scores = "scores",
    }
}

impl FromStr for EndpointType {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        Self::from_name(text).ok_or_else(|| {
            let problem = none_of(text, Self::ALL.map(Self::name));
            EngineError::invalid_argument("endpoint_types", problem)
        })
    }
}

/// A model file that a frontend needs, identified by its BLAKE3 hash.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ArtifactRef {
    /// The file's name in a Hub checkout: `tokenizer.json`, `tokenizer_config.json`, ...
    pub name: String,
    /// BLAKE3 of the content, 64 lower-case hex digits.
    pub blake3: String,
    /// Size in bytes.
    pub size: u64,
}

/// An artifact with its content, as held by a worker. Cheap to clone.
#[derive(Clone, PartialEq, Eq)]
pub struct Artifact {
    /// Name, hash and size.
    pub reference: ArtifactRef,
    /// The content.
    pub content: Arc<[u8]>,
}

impl Artifact {
    /// Hashes `content`.
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::card::Artifact;
    ///
    /// let artifact = Artifact::new("tokenizer.json", b"{}".to_vec());
    /// assert!(artifact.reference.blake3.len() == 64 && artifact.matches(b"{}") && !artifact.matches(b"[]"));
    /// ```
    #[must_use]
    pub fn new(name: impl Into<String>, content: impl Into<Arc<[u8]>>) -> Self {
        let content = content.into();
        let reference = ArtifactRef {
            name: name.into(),
            blake3: blake3::hash(&content).to_hex().to_string(),
            size: content.len() as u64,
        };
        Self { reference, content }
    }

    /// Returns whether `content` matches the hash.
    #[must_use]
    pub fn matches(&self, content: &[u8]) -> bool {
        self.reference.matches(content)
    }
}

impl ArtifactRef {
    /// Returns whether `content` matches the hash.
    #[must_use]
    pub fn matches(&self, content: &[u8]) -> bool {
        blake3::hash(content).to_hex().as_str() == self.blake3
    }
}

impl fmt::Debug for Artifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Artifact").field(&self.reference).finish()
    }
}

/// Everything a frontend or router must know about a served model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name clients use.
    pub name: String,
    /// Other names for the model.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// The APIs that the model serves.
    #[serde(deserialize_with = "known::endpoint_types")]
    pub endpoint_types: BTreeSet<EndpointType>,
    /// The role of its instances.
    #[serde(default)]
    pub role: Role,
    /// The maximum length of prompt and output together, in tokens.
    pub context_length_tokens: u32,
    /// Tokens per KV block.
    pub kv_block_size: NonZeroU32,
    /// Data-parallel ranks inside the instance, at least 1. May differ between instances of a model.
    #[serde(default = "one_rank")]
    pub data_parallel_size: u32,
    /// Sequences that the instance runs at once; `None` if its engine does not report it. May differ between instances of a
    /// model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_num_seqs: Option<u32>,
    /// The vocabulary size, if known: token ids are below it.
    #[serde(default)]
    pub vocab_size: Option<NonZeroU32>,
    /// What the engine can do.
    #[serde(deserialize_with = "known::capabilities")]
    pub capabilities: Capabilities,
    /// The name of the tool-call parser; `None` if the model does not call tools, or `none`.
    #[serde(default)]
    pub tool_parser: Option<String>,
    /// The name of the reasoning parser; `None` or `none` for no parser.
    #[serde(default)]
    pub reasoning_parser: Option<String>,
    /// How often a request may migrate to another instance; 0 disables migration.
    #[serde(default)]
    pub migration_limit: u32,
    /// Files a frontend needs.
    #[serde(default)]
    pub artifacts: Vec<ArtifactRef>,
    /// The LoRA adapters currently loaded, at most [`MAX_ADAPTERS`]. May differ between instances of a model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<Adapter>,
    /// The operator's metadata. May differ between instances of a model.
    #[serde(default)]
    pub user_data: Value,
}

/// Checks a name or an alias of a model.
pub(crate) fn check_name(at: At, name: &str) -> Result<(), EngineError> {
    check_text(at, name, MAX_MODEL_NAME_BYTES)
}

const fn one_rank() -> u32 {
    1
}

impl ModelCard {
    /// Creates the card of a started engine, before the operator's overrides.
    #[must_use]
    pub fn from_config(config: &EngineConfig) -> Self {
        let inputs = &config.capabilities.inputs;
        let mut endpoint_types = BTreeSet::new();
        if inputs.iter().any(|kind| kind.is_prompt()) {
            endpoint_types.extend([EndpointType::Chat, EndpointType::Completions]);
        }
        if inputs.contains(&InputKind::Embed) {
            endpoint_types.insert(EndpointType::Embeddings);
        }
        if inputs.contains(&InputKind::Score) {
            endpoint_types.insert(EndpointType::Scores);
        }
        Self {
            name: config.model.clone(),
            aliases: Vec::new(),
            endpoint_types,
            role: Role::default(),
            context_length_tokens: config.context_length_tokens,
            kv_block_size: config.kv_block_size.unwrap_or(DEFAULT_KV_BLOCK_SIZE),
            data_parallel_size: config.data_parallel_size,
            max_num_seqs: config.max_num_seqs,
            vocab_size: config.vocab_size,
            capabilities: config.capabilities.clone(),
            tool_parser: None,
            reasoning_parser: None,
            migration_limit: DEFAULT_MIGRATION_LIMIT,
            artifacts: Vec::new(),
            adapters: Vec::new(),
            user_data: Value::Null,
        }
    }

    /// Returns the card without the fields that may differ between instances of a model: role, ranks, the number of sequences run
    /// at once, adapters and the operator's metadata.
    #[must_use]
    pub fn in_common(&self) -> Self {
        Self {
            role: Role::default(),
            data_parallel_size: one_rank(),
            max_num_seqs: None,
            adapters: Vec::new(),
            user_data: Value::Null,
            ..self.clone()
        }
    }

    /// Returns the card of an adapter, which clients see as a model of its own: without the model's files and the operator's
    /// metadata.
    #[must_use]
    pub fn of_adapter(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            aliases: Vec::new(),
            artifacts: Vec::new(),
            adapters: Vec::new(),
            user_data: Value::Null,
            ..self.clone()
        }
    }

    /// Returns whether the instance has the adapter `name`.
    #[must_use]
    pub fn has_adapter(&self, name: &str) -> bool {
        self.adapters.iter().any(|adapter| adapter.name == name)
    }

    /// Checks name and aliases: none may be blank, longer than [`MAX_MODEL_NAME_BYTES`] or contain control characters. A card is
    /// untrusted input from its worker.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the problem.
    pub fn check_names(&self) -> Result<(), EngineError> {
        check_name(At::other("model name"), &self.name)?;
        let mut aliases = self.aliases.iter();
        aliases.try_for_each(|alias| check_name(At::other("alias"), alias))
    }

    /// Checks number, names and sources of the adapters: a card is untrusted input from its worker.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the problem.
    pub fn check_adapters(&self) -> Result<(), EngineError> {
        if self.adapters.len() > MAX_ADAPTERS {
            let count = self.adapters.len();
            let problem = format!("are {count}, and a worker may have {MAX_ADAPTERS}");
            return Err(EngineError::invalid_argument(
                At::other("adapters"),
                problem,
            ));
        }
        self.adapters.iter().try_for_each(Adapter::check)
    }

    /// Checks a request as the model's engines will, with the card alone, so that errors surface early.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported` or `ContextLengthExceeded`, naming the field.
    pub fn check(&self, request: &GenerateRequest) -> Result<(), EngineError> {
        let bounds = Bounds {
            capabilities: &self.capabilities,
            vocab_size: self.vocab_size,
            context_length_tokens: self.context_length_tokens,
        };
        bounds.check(request)
    }

    /// Checks number and sizes of the artifacts. A worker checks before it publishes the card, and a frontend before it fetches a
    /// byte: a card is untrusted input.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `artifacts`, naming the artifact and the limit.
    pub fn check_artifacts(&self) -> Result<(), EngineError> {
        let bad = |problem| {
            Err(EngineError::invalid_argument(
                At::other("artifacts"),
                problem,
            ))
        };
        if self.artifacts.len() > MAX_ARTIFACTS {
            let count = self.artifacts.len();
            return bad(format!("are {count}, and a model may have {MAX_ARTIFACTS}"));
        }
        let mut all = 0_u64;
        for ArtifactRef { name, size, .. } in &self.artifacts {
            if *size > MAX_ARTIFACT_BYTES {
                return bad(format!(
                    "has {name:.64} of {size} bytes, and one may have {MAX_ARTIFACT_BYTES}"
                ));
            }
            all += size;
        }
        if all > MAX_ARTIFACTS_BYTES {
            return bad(format!(
                "have {all} bytes together, and a model's may have {MAX_ARTIFACTS_BYTES}"
            ));
        }
        Ok(())
    }

    /// Returns whether the model takes prompt token ids; otherwise its engine applies the template and tokenizes.
    #[must_use]
    pub fn takes_tokens(&self) -> bool {
        self.capabilities.inputs.contains(&InputKind::Tokens)
    }

    /// Returns an artifact by name.
    #[must_use]
    pub fn artifact(&self, name: &str) -> Option<&ArtifactRef> {
        self.artifacts.iter().find(|artifact| artifact.name == name)
    }
}
