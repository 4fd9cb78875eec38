//! [`LauncherConfig`]: the model, how the server is started, and its time limits.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use genset_backend_common::{EngineError, Role, error::At, request::MediaKind};
use genset_process::{InheritedEnv, LogLimit, RestartPolicy};
use serde_json::Value;

use crate::api::{TRTLLM_NO_SALTS, trtllm_reuses_blocks};
use crate::command::Plan;
use crate::dialect::Dialect;
use crate::extra::ExtraArgs;
use crate::kind::ServerKind;

/// What requests carry to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerInput {
    /// Prompts are token ids, and so are answers.
    Tokens {
        /// The vocabulary size, if known. Token ids are below it.
        vocab_size: Option<NonZeroU32>,
    },
    /// Text and chat messages; the server applies the template and tokenizes. llama.cpp only.
    Text,
}

/// The nodes that run one model together. The server started here is the leader, rank 0. The others are started by hand.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes {
    /// The number of nodes.
    pub num_nodes: Option<u32>,
    /// This node's rank, which must be 0.
    pub node_rank: Option<u32>,
    /// The leader's `HOST:PORT`, as the others reach it.
    pub leader_addr: Option<String>,
}

/// The configuration of a [`LauncherEngine`](crate::LauncherEngine).
///
/// # Examples
/// ```
/// use genset_engine_launcher::{LauncherConfig, ServerInput, ServerKind};
///
/// let input = ServerInput::Tokens { vocab_size: None };
/// let config = LauncherConfig::new(ServerKind::Vllm, "/models/Qwen3-4B", input);
/// assert_eq!(config.name, "Qwen3-4B");
/// config.validate().unwrap();
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LauncherConfig {
    /// Which server.
    pub kind: ServerKind,
    /// The model to pass to the server: a folder, or a GGUF file.
    pub model: PathBuf,
    /// The model's name in the engine's config.
    pub name: String,
    /// What requests carry to the server.
    pub input: ServerInput,
    /// What the model takes in chats besides text. vLLM and SGLang only.
    pub media: BTreeSet<MediaKind>,
    /// The program and its first arguments, instead of the default: `["/opt/vllm/bin/vllm", "serve"]`.
    pub command: Option<Vec<String>>,
    /// The interpreter for servers that are Python modules: a path, or a name to look up in `PATH`.
    pub python: PathBuf,
    /// Which of this process's environment variables the server inherits.
    pub inherited_env: InheritedEnv,
    /// Variables to set in addition.
    pub env: BTreeMap<String, String>,
    /// The context length to request from the server, in tokens.
    pub context_length_tokens: Option<u32>,
    /// The context length from the model's files, in tokens, for servers that report none.
    pub model_context_length_tokens: Option<u32>,
    /// GPUs that share each layer.
    pub tensor_parallel_size: Option<u32>,
    /// The first GPU to use.
    pub base_gpu_id: Option<u32>,
    /// The nodes that run the model together.
    pub nodes: Nodes,
    /// Tokens per KV block.
    pub kv_block_size: Option<NonZeroU32>,
    /// The address of this machine at which other workers' servers reach this server's KV blocks.
    pub kv_transfer_host: IpAddr,
    /// How long a prefill instance holds KV blocks that are not fetched.
    pub kv_lease: Duration,
    /// The server's own settings.
    pub extra: Option<ExtraArgs>,
    /// How long the server may take to be healthy, including loading the model.
    pub start_timeout: Duration,
    /// The interval between health checks of a serving server.
    pub health_interval: Duration,
    /// How long health checks may fail, without a part of an answer, before the server counts as hung.
    pub health_timeout: Duration,
    /// Whether and when a server that died is restarted; with `None`, never: the engine is dead then.
    pub restart: Option<RestartPolicy>,
    /// How much of its output is logged.
    pub log_limit: LogLimit,
}

impl LauncherConfig {
    /// A server for `model`, named as its folder or file, with the default limits.
    #[must_use]
    pub fn new(kind: ServerKind, model: impl Into<PathBuf>, input: ServerInput) -> Self {
        let model = model.into();
        let name = model.file_stem().map_or_else(
            || kind.name().to_owned(),
            |stem| match model.extension() {
                Some(end) if !end.eq_ignore_ascii_case("gguf") => {
                    format!("{}.{}", stem.to_string_lossy(), end.to_string_lossy())
                }
                _ => stem.to_string_lossy().into_owned(),
            },
        );
        Self {
            kind,
            model,
            name,
            input,
            media: BTreeSet::new(),
            command: None,
            python: "python3".into(),
            inherited_env: InheritedEnv::All,
            env: BTreeMap::new(),
            context_length_tokens: None,
            model_context_length_tokens: None,
            tensor_parallel_size: None,
            base_gpu_id: None,
            nodes: Nodes::default(),
            kv_block_size: None,
            kv_transfer_host: Ipv4Addr::LOCALHOST.into(),
            kv_lease: Duration::from_secs(30),
            extra: None,
            start_timeout: Duration::from_secs(1800),
            health_interval: Duration::from_secs(5),
            health_timeout: Duration::from_secs(60),
            restart: None,
            log_limit: LogLimit::default(),
        }
    }

    /// A setting of the server's own, from the extra arguments.
    pub(crate) fn setting(&self, name: &str) -> Option<&Value> {
        self.extra.as_ref()?.get(name)
    }

    /// Checks that the server supports the role.
    ///
    /// # Errors
    /// `Unsupported`, with the reason and the alternative.
    pub fn validate_role(&self, role: Role) -> Result<(), EngineError> {
        if role == Role::Aggregated {
            return Ok(());
        }
        let why_not = match self.kind {
            ServerKind::Vllm => return Ok(()),
            ServerKind::Sglang => {
                "SGLang's prefill gives its token only when a decode server has fetched the KV blocks, so both want the request at \
                 the same time, and Genset sends it to one after the other; its own flags for it change nothing about that"
            }
            ServerKind::Trtllm => "its servers for prefill and decode are not driven",
            ServerKind::LlamaCpp => "llama.cpp computes prompts and answers in one server",
        };
        let problem = format!(
            "{} cannot be a {role} instance: {why_not}; leave --role out, or use out=vllm or out=candle",
            self.kind.title()
        );
        Err(EngineError::unsupported("--role", problem))
    }

    /// Checks that the server isolates the KV blocks of requests with different API keys.
    ///
    /// # Errors
    /// `Unsupported`, with the setting that would do so.
    pub fn validate_api_keys(&self) -> Result<(), EngineError> {
        if self.kind == ServerKind::Trtllm && trtllm_reuses_blocks(self) {
            return Err(EngineError::unsupported("--api-keys", TRTLLM_NO_SALTS));
        }
        Ok(())
    }

    /// Checks what the types do not enforce, and that the server has a flag for each setting.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming the flag or the field at fault.
    pub fn validate(&self) -> Result<(), EngineError> {
        if self.input == ServerInput::Text && self.kind != ServerKind::LlamaCpp {
            let problem = format!(
                "{} is driven by tokens; give the model's folder",
                self.kind.title()
            );
            return Err(EngineError::unsupported(At::other("MODEL"), problem));
        }
        if !self.media.is_empty() && !matches!(self.kind, ServerKind::Vllm | ServerKind::Sglang) {
            let problem = format!(
                "{} gets no images and no audio from here; use out=vllm or out=sglang",
                self.kind.title()
            );
            return Err(EngineError::unsupported("--media", problem));
        }
        let problem = if self
            .command
            .as_ref()
            .is_some_and(|command| command.iter().all(String::is_empty))
        {
            ("--server-cmd", "must name a program")
        } else if self.tensor_parallel_size == Some(0) {
            ("--tensor-parallel-size", "must be at least 1")
        } else if self.context_length_tokens == Some(0) {
            ("--context-length", "must be at least 1")
        } else if self.health_interval.is_zero() {
            ("health_interval", "must be more than 0")
        } else {
            self.nodes.validate()?;
            self.restart.map_or(Ok(()), |policy| policy.validate())?;
            // All programs of one kind lack the same settings.
            return Plan::new(self, Dialect::first_of(self.kind)).map(drop);
        };
        Err(EngineError::invalid_argument(problem.0, problem.1))
    }
}

impl Nodes {
    fn validate(&self) -> Result<(), EngineError> {
        let problem = if self.num_nodes == Some(0) {
            ("--num-nodes", "must be at least 1")
        } else if self.node_rank.is_some_and(|rank| rank > 0) {
            (
                "--node-rank",
                "genset starts the leader, rank 0; start the other ranks with the server's own command",
            )
        } else if self.num_nodes.is_some_and(|nodes| nodes > 1) && self.leader_addr.is_none() {
            (
                "--leader-addr",
                "several nodes need it, as HOST:PORT that the others reach",
            )
        } else if self.leader_addr.is_some() && self.num_nodes.is_none_or(|nodes| nodes == 1) {
            (
                "--leader-addr",
                "is for several nodes; say how many with --num-nodes",
            )
        } else if self
            .leader_addr
            .as_deref()
            .is_some_and(|addr| split_address(addr).is_none())
        {
            ("--leader-addr", "must be HOST:PORT")
        } else {
            return Ok(());
        };
        Err(EngineError::invalid_argument(problem.0, problem.1))
    }
}

/// Splits `HOST:PORT` and removes the brackets of an IPv6 address.
pub(crate) fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then_some(())?;
    Some((host, port.parse().ok()?))
}
