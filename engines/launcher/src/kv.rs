//! KV events of a launched server. The launcher reads them, and the worker publishes them like any engine's. [`KvFeed`] is where
//! they are read, [`KvFollower`] reads them, [`Clears`] handles caches that an operator clears.
//!
//! vLLM and SGLang publish them at a [`KvSource`], which the launcher enables. The events reveal the prompts, so they use sockets
//! in a folder that only this user can read, never a port. TensorRT-LLM gives them at a route of its server.
//!
//! # Source
//! vLLM 0.32.0, `vllm/distributed/kv_events.py`: a PUB socket for the batches, a ROUTER socket that replays the last ones.
//! SGLang 0.5.23, `sglang/srt/disaggregation/kv_events.py`: the same, in the same encoding; its format `dynamo` has hashes that
//! differ by salt and adapter.

mod batch;
mod follow;
mod route;
mod translate;

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use genset_backend_common::{EngineError, config::MAX_DATA_PARALLEL_SIZE};
use genset_process::{lock_folder, remove_left_folders};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) use follow::{Clears, KvFollower};

use crate::api::trtllm_event_blocks;
use crate::config::LauncherConfig;
use crate::dialect::Dialect;
use crate::ranks::said;

/// Server settings with which we do not follow its events: its own publisher, no prefix cache, and SGLang's speculation, whose
/// events may contain pairs of tokens.
const OWN_SETTINGS: [&str; 4] = [
    "kv-events-config",
    "no-enable-prefix-caching",
    "disable-radix-cache",
    "speculative-algorithm",
];

/// The socket names of rank 0. For each other rank the servers append `_dp` and the number, but only to names that contain
/// `inproc`. They refuse to derive several sockets from other names without a port.
const EVENTS: &str = "inproc-events";
const REPLAY: &str = "inproc-replay";

/// The maximum length of a socket path, in bytes: the kernel allows 108.
const MAX_PATH_BYTES: usize = 100;

/// The prefix of the folders.
const FOLDER_PREFIX: &str = "genset-kv-";

/// Where the KV events of a server are read.
#[derive(Debug, Clone)]
pub(crate) enum KvFeed {
    /// At the sockets of a server that publishes them.
    Sockets(Arc<KvSource>),
    /// At a route of TensorRT-LLM's server.
    Route,
}

impl KvFeed {
    /// The feed of a server that publishes at `source`, if it does; `None` if it tells nothing of its blocks.
    pub(crate) fn of(
        config: &LauncherConfig,
        dialect: Dialect,
        source: Option<Arc<KvSource>>,
    ) -> Option<Self> {
        let has_route = dialect == Dialect::Trtllm && trtllm_event_blocks(config).is_some();
        let route = has_route.then_some(Self::Route);
        source.map(Self::Sockets).or(route)
    }

    /// Whether a healthy server gives events of this rank.
    pub(crate) fn has_rank(&self, rank: u32) -> bool {
        match self {
            Self::Sockets(source) => source.is_bound(rank),
            Self::Route => rank == 0,
        }
    }
}

/// Where a server publishes its KV events: two sockets per rank, in a folder of ours. Dropping this removes the folder.
#[derive(Debug)]
pub(crate) struct KvSource {
    folder: TempDir,
    /// Locks the folder while it is in use: a server's guard removes it only while that server runs.
    _lock: Option<File>,
    dialect: Dialect,
}

impl KvSource {
    /// Creates the source for a server; `None` if the server publishes no events, or not to us. Also removes the folders of
    /// killed processes.
    ///
    /// # Errors
    /// `Internal` if the folder cannot be created.
    pub(crate) fn for_server(
        config: &LauncherConfig,
        dialect: Dialect,
    ) -> Result<Option<Arc<Self>>, EngineError> {
        let has_events = match dialect {
            Dialect::Vllm => true,
            Dialect::Sglang => has_blocks(config),
            Dialect::Trtllm => {
                if trtllm_event_blocks(config).is_none() {
                    tracing::info!(
                        "the KV events of TensorRT-LLM are not followed: kv_cache_config: {{event_buffer_max_size: 16384}} in --extra-engine-args enables them; without them frontends choose it by its requests alone, and with --use-kv-events=false by the prompts that they sent it too"
                    );
                }
                false
            }
            Dialect::LlamaServer | Dialect::LlamaCppPython => false,
        };
        if !has_events || has_own(config) {
            return Ok(None);
        }
        remove_left_folders(FOLDER_PREFIX);
        // Only this user can read the folder.
        let folder = tempfile::Builder::new()
            .prefix(FOLDER_PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|error| {
                let problem = format!("no folder for the server's KV events: {error}");
                EngineError::internal(problem).with_source(error)
            })?;
        let source = Self {
            _lock: lock_folder(folder.path()),
            folder,
            dialect,
        };
        if source.path(REPLAY, MAX_DATA_PARALLEL_SIZE).len() > MAX_PATH_BYTES {
            tracing::warn!(
                folder = %source.folder.path().display(),
                "KV events of the server are not followed: the path of the folder for temporary files (TMPDIR) is too long for a socket"
            );
            return Ok(None);
        }
        Ok(Some(Arc::new(source)))
    }

    /// The folder of the sockets.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The server's arguments.
    pub(crate) fn args(&self) -> [String; 2] {
        let mut config = json!({
            "publisher": "zmq",
            "endpoint": self.events(0),
            "replay_endpoint": self.replay(0),
        });
        match self.dialect {
            Dialect::Sglang => config["format"] = "dynamo".into(),
            Dialect::Vllm | Dialect::Trtllm | Dialect::LlamaServer | Dialect::LlamaCppPython => {
                config["enable_kv_cache_events"] = true.into();
            }
        }
        ["--kv-events-config".to_owned(), config.to_string()]
    }

    /// Whether a server has bound both sockets of a rank, which it does before it is healthy.
    pub(crate) fn is_bound(&self, rank: u32) -> bool {
        [EVENTS, REPLAY]
            .iter()
            .all(|name| Path::new(&self.path(name, rank)).exists())
    }

    pub(crate) fn events(&self, rank: u32) -> String {
        format!("ipc://{}", self.path(EVENTS, rank))
    }

    pub(crate) fn replay(&self, rank: u32) -> String {
        format!("ipc://{}", self.path(REPLAY, rank))
    }

    fn path(&self, name: &str, rank: u32) -> String {
        let name = match rank {
            0 => name.to_owned(),
            _ => format!("{name}_dp{rank}"),
        };
        self.folder.path().join(name).display().to_string()
    }
}

/// Whether SGLang has blocks of several tokens. Its default is one token, and an event per token would not help a router.
fn has_blocks(config: &LauncherConfig) -> bool {
    let said = said(config, &["--page-size"]).and_then(|(_, size)| size.parse().ok());
    let size = config.kv_block_size.map(u32::from).or(said);
    let has_blocks = size.is_some_and(|size| size > 1);
    if !has_blocks {
        tracing::info!(
            "the KV events of SGLang are not followed: its blocks are of one token; --kv-cache-block-size 16 makes larger ones"
        );
    }
    has_blocks
}

fn has_own(config: &LauncherConfig) -> bool {
    let is_said = |name: &&str| {
        let value = config.setting(name);
        value.is_some_and(|value| *value != Value::Bool(false) && !value.is_null())
    };
    OWN_SETTINGS.iter().any(is_said)
        || config.setting("enable-prefix-caching") == Some(&Value::Bool(false))
}

#[cfg(test)]
mod tests;
