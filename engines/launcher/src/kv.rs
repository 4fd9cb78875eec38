//! KV events of a launched vLLM or SGLang: its publisher is switched on, its events are read, and the worker publishes them as any
//! engine does. [`KvSource`] is where the server publishes, [`KvFollower`] who reads it,
//! [`Clears`] what an operator clears meanwhile.
//!
//! The events tell the prompts, so they go over sockets in a folder that only this user can read, and never over a port.
//!
//! # Source
//! vLLM 0.32.0, `vllm/distributed/kv_events.py`: a PUB socket for the batches, a ROUTER socket that gives the last ones again.
//! SGLang 0.5.23, `sglang/srt/disaggregation/kv_events.py`: the same, in the same encoding; its format `dynamo` has hashes that differ
//! with salts and adapters.

mod batch;
mod follow;
mod translate;

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use genset_backend_common::config::MAX_DATA_PARALLEL_SIZE;
use genset_process::{lock_folder, remove_left_folders};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) use follow::{Clears, KvFollower};

use crate::config::LauncherConfig;
use crate::dialect::Dialect;
use crate::extra::ExtraArgs;
use crate::ranks::said;

/// Settings of the server's own with which its events are not followed: its own publisher, no prefix cache; SGLang's speculation may
/// tell pairs of tokens.
const OWN_SETTINGS: [&str; 4] = [
    "kv-events-config",
    "no-enable-prefix-caching",
    "disable-radix-cache",
    "speculative-algorithm",
];

/// The sockets of rank 0. The servers add `_dp` and the number for each other rank, to names with `inproc` in them; of other names
/// that are no ports they refuse to make several.
const EVENTS: &str = "inproc-events";
const REPLAY: &str = "inproc-replay";

/// The longest path of a socket, in bytes: the kernel has room for 108.
const MAX_PATH_BYTES: usize = 100;

/// What the folders begin with.
const FOLDER_PREFIX: &str = "genset-kv-";

/// Where a server publishes its KV events: two sockets for each rank, in a folder of ours, which is removed with this.
#[derive(Debug)]
pub(crate) struct KvSource {
    folder: TempDir,
    /// For as long as the folder is used: a server's guard removes it only while that server runs.
    _lock: Option<File>,
    dialect: Dialect,
}

impl KvSource {
    /// The source for a server to be started; `None` for one that publishes nothing, or not to us. Folders of processes that were
    /// killed are removed.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub(crate) fn for_server(
        config: &LauncherConfig,
        dialect: Dialect,
    ) -> io::Result<Option<Arc<Self>>> {
        let has_events = match dialect {
            Dialect::Vllm => true,
            Dialect::Sglang => has_blocks(config),
            Dialect::Trtllm => {
                tracing::info!(
                    "TensorRT-LLM publishes no KV events: frontends choose it by its requests alone, and with --use-kv-events=false by the prompts that they sent it too"
                );
                false
            }
            Dialect::LlamaServer | Dialect::LlamaCppPython => false,
        };
        if !has_events || config.extra.as_ref().is_some_and(has_own) {
            return Ok(None);
        }
        remove_left_folders(FOLDER_PREFIX);
        // Nobody else may look into it.
        let folder = tempfile::Builder::new()
            .prefix(FOLDER_PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir()?;
        let source = Self {
            _lock: lock_folder(folder.path()),
            folder,
            dialect,
        };
        if source.path(REPLAY, MAX_DATA_PARALLEL_SIZE).len() > MAX_PATH_BYTES {
            tracing::warn!(
                folder = %source.folder.path().display(),
                "KV events of the server are not followed: the folder for temporary files has too long a name for a socket"
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

/// Whether SGLang was given blocks of several tokens. Its own are of one, and an event for each token of a prompt helps no router.
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

fn has_own(extra: &ExtraArgs) -> bool {
    let is_said = |name: &&str| {
        extra
            .get(name)
            .is_some_and(|value| *value != Value::Bool(false) && !value.is_null())
    };
    OWN_SETTINGS.iter().any(is_said)
        || extra.get("enable-prefix-caching") == Some(&Value::Bool(false))
}

#[cfg(test)]
mod tests;
