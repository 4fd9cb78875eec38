//! [`ModelCard`]: what a worker publishes about the model it serves, enough for a frontend that has none of its files.

mod known;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Bounds, Capabilities, EngineConfig, InputKind};
use crate::controls::{Adapter, MAX_ADAPTERS};
use crate::engine::Role;
use crate::error::{At, EngineError};
use crate::request::GenerateRequest;

/// Tokens per KV block where neither engine nor operator says otherwise.
pub const DEFAULT_KV_BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(16).unwrap();

/// How often a request may move to another instance where the operator does not say.
pub const DEFAULT_MIGRATION_LIMIT: u32 = 3;

/// The most bytes of an artifact: room for a tokenizer of a quarter million entries.
pub const MAX_ARTIFACT_BYTES: u64 = 64 << 20;

/// The most artifacts of a model.
pub const MAX_ARTIFACTS: usize = 16;

/// The most bytes of all artifacts of a model: what a frontend holds while it prepares the model.
pub const MAX_ARTIFACTS_BYTES: u64 = 128 << 20;

crate::named! {
    /// An API a model answers.
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
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| {
                EngineError::invalid_argument(
                    "endpoint_types",
                    format!("{text:?} is none of chat, completions, embeddings, scores"),
                )
            })
    }
}

/// A file of the model's that a frontend needs, by its BLAKE3 hash.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ArtifactRef {
    /// The file's name in a Hub checkout: `tokenizer.json`, `tokenizer_config.json`, ...
    pub name: String,
    /// BLAKE3 of the content, 64 lower-case hex digits.
    pub blake3: String,
    /// Bytes.
    pub size: u64,
}

/// An artifact and its content, as a worker holds it. Cheap to clone.
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

    /// Whether `content` is what the hash names.
    #[must_use]
    pub fn matches(&self, content: &[u8]) -> bool {
        self.reference.matches(content)
    }
}

impl ArtifactRef {
    /// Whether `content` is what the hash names.
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
    /// Other names for it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// The APIs it answers.
    #[serde(deserialize_with = "known::endpoint_types")]
    pub endpoint_types: BTreeSet<EndpointType>,
    /// The part its instances play.
    #[serde(default)]
    pub role: Role,
    /// The most tokens of prompt and output together.
    pub context_length_tokens: u32,
    /// Tokens per KV block.
    pub kv_block_size: NonZeroU32,
    /// Data-parallel ranks inside the instance, at least 1. Instances of one model may differ in it.
    #[serde(default = "one_rank")]
    pub data_parallel_size: u32,
    /// Sequences that the instance runs at once; `None` where its engine does not say. Instances of one model may differ in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_num_seqs: Option<u32>,
    /// Token ids are below this, where known.
    #[serde(default)]
    pub vocab_size: Option<NonZeroU32>,
    /// What the engine can do.
    #[serde(deserialize_with = "known::capabilities")]
    pub capabilities: Capabilities,
    /// The tool-call parser by name; `None` when the model calls no tools.
    #[serde(default)]
    pub tool_parser: Option<String>,
    /// The reasoning parser by name.
    #[serde(default)]
    pub reasoning_parser: Option<String>,
    /// How often a request may move to another instance; 0 for never.
    #[serde(default)]
    pub migration_limit: u32,
    /// Files a frontend needs.
    #[serde(default)]
    pub artifacts: Vec<ArtifactRef>,
    /// The LoRA adapters that the instance has at the moment, at most [`MAX_ADAPTERS`]. Instances of one model may differ in them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<Adapter>,
    /// The operator's own metadata. Instances of one model may differ in it.
    #[serde(default)]
    pub user_data: Value,
}

const fn one_rank() -> u32 {
    1
}

impl ModelCard {
    /// The card of an engine that has started, before the operator's overrides.
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

    /// The same, without what instances of one model may differ in: their role, their ranks, how many sequences they run at once,
    /// their adapters and the operator's metadata.
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

    /// The card of an adapter of the model as a model of its own: without what is the model's alone, its files and the operator's
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

    /// Whether the instance has the adapter of this name.
    #[must_use]
    pub fn has_adapter(&self, name: &str) -> bool {
        self.adapters.iter().any(|adapter| adapter.name == name)
    }

    /// Checks number, names and sources of the adapters: what a card says is its worker's word alone.
    ///
    /// # Errors
    /// `InvalidArgument`, naming what is wrong.
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

    /// Checks a request as the model's engines will, where only the card is known: the sooner the better.
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

    /// Checks number and sizes of the artifacts. A worker does before it publishes the card, and a frontend before it
    /// fetches a byte: what a card says is its worker's word alone.
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

    /// Whether the model takes prompt token ids; otherwise its engine templates and tokenizes by itself.
    #[must_use]
    pub fn takes_tokens(&self) -> bool {
        self.capabilities.inputs.contains(&InputKind::Tokens)
    }

    /// An artifact by name.
    #[must_use]
    pub fn artifact(&self, name: &str) -> Option<&ArtifactRef> {
        self.artifacts.iter().find(|artifact| artifact.name == name)
    }
}
