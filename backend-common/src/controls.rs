//! [`EngineControls`]: administrative operations of an engine beside generation. All are typed and optional; an engine without an
//! operation refuses it by name.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{At, EngineError};
use crate::ports::Control;

/// How deep an engine sleeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SleepLevel {
    /// KV blocks are freed; weights stay.
    #[default]
    KvCache,
    /// Weights are freed too and are loaded again on waking.
    Weights,
}

/// A LoRA adapter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Adapter {
    /// The name in requests.
    pub name: String,
    /// Where the engine loads it from: a folder, or a Hub repository id.
    pub source: String,
}

/// The maximum number of adapters that a worker lists.
pub const MAX_ADAPTERS: usize = 1024;

/// The maximum length of an adapter's name, in bytes.
pub const MAX_ADAPTER_NAME_BYTES: usize = 256;

/// The maximum length of an adapter's source, in bytes.
pub const MAX_ADAPTER_SOURCE_BYTES: usize = 4096;

impl Adapter {
    /// Checks name and source: neither may be blank, too long or contain control characters; the name must not begin or end with
    /// a space.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::controls::Adapter;
    ///
    /// let adapter = |name: &str| Adapter { name: name.into(), source: "adapters/french".into() };
    /// adapter("french").check().unwrap();
    /// assert!(adapter(" ").check().is_err() && adapter("fre\nnch").check().is_err());
    /// ```
    pub fn check(&self) -> Result<(), EngineError> {
        let fields = [
            ("adapter.name", &self.name, MAX_ADAPTER_NAME_BYTES),
            ("adapter.source", &self.source, MAX_ADAPTER_SOURCE_BYTES),
        ];
        for (field, value, most) in fields {
            check_text(At::other(field), value, most)?;
        }
        if self.name.trim() != self.name {
            let problem = "must not begin or end with a space";
            let at = At::other("adapter.name");
            return Err(EngineError::invalid_argument(at, problem));
        }
        Ok(())
    }
}

/// Checks a text that clients and logs show: not blank, at most `most` bytes, no control characters.
pub(crate) fn check_text(at: At, text: &str, most: usize) -> Result<(), EngineError> {
    let problem = if text.trim().is_empty() {
        "must not be empty".to_owned()
    } else if text.len() > most {
        format!("must have at most {most} bytes, got {}", text.len())
    } else if text.chars().any(char::is_control) {
        "must have no control characters".to_owned()
    } else {
        return Ok(());
    };
    Err(EngineError::invalid_argument(at, problem))
}

/// An administrative request, in its wire form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub enum ControlRequest {
    /// Free device memory until woken.
    Sleep {
        /// How much to free.
        #[serde(default)]
        level: SleepLevel,
    },
    /// Undo `Sleep`.
    Wake,
    /// Drop every reusable KV block.
    ClearPrefixCache,
    /// Make an adapter available.
    LoadAdapter {
        /// The adapter.
        adapter: Adapter,
    },
    /// Remove an adapter.
    UnloadAdapter {
        /// Its name.
        name: String,
    },
    /// List the adapters.
    ListAdapters,
    /// Replace the weights.
    UpdateWeights {
        /// The source of the weights, in the engine's own format.
        source: Value,
    },
    /// Start recording a profile.
    StartProfile,
    /// Stop recording the profile.
    StopProfile,
    /// Change the log filter of the worker's process. The runtime handles it; the engine is not involved.
    LogLevel {
        /// The new filter, in the syntax of `RUST_LOG`.
        filter: String,
    },
}

impl ControlRequest {
    /// Returns the operation's name on the wire.
    #[must_use]
    pub fn op(&self) -> &'static str {
        match self {
            Self::Sleep { .. } => "sleep",
            Self::Wake => "wake",
            Self::ClearPrefixCache => "clear_prefix_cache",
            Self::LoadAdapter { .. } => "load_adapter",
            Self::UnloadAdapter { .. } => "unload_adapter",
            Self::ListAdapters => "list_adapters",
            Self::UpdateWeights { .. } => "update_weights",
            Self::StartProfile => "start_profile",
            Self::StopProfile => "stop_profile",
            Self::LogLevel { .. } => "log_level",
        }
    }
}

/// The answer to a [`ControlRequest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub enum ControlReply {
    /// Done.
    Done,
    /// The adapters.
    Adapters {
        /// All that are loaded.
        adapters: Vec<Adapter>,
    },
    /// Where the profile was written.
    Profile {
        /// A path or URL, as the engine documents.
        location: String,
    },
}

/// Administrative operations. Every method refuses by default, so an engine implements only those it supports.
///
/// # Errors
/// Every method: `Unsupported` if the engine lacks the operation, else the engine's error.
#[async_trait]
pub trait EngineControls: Send + Sync {
    /// Frees device memory until [`wake`](Self::wake). A request that arrives meanwhile waits, or is refused with a retryable
    /// error. Sleeping is idempotent.
    ///
    /// The Worker keeps the instance listed, so that it can be woken, and keeps sending canaries. Refuse requests as `Overloaded`:
    /// if a canary ends with another error, or never ends, the Worker considers the engine dead.
    async fn sleep(&self, _level: SleepLevel) -> Result<(), EngineError> {
        Err(missing("sleep"))
    }

    /// Undoes `sleep`: from now on the engine answers as before. Does nothing if the engine is awake.
    async fn wake(&self) -> Result<(), EngineError> {
        Err(missing("wake"))
    }

    /// Drops every reusable KV block, and publishes the event.
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        Err(missing("clear_prefix_cache"))
    }

    /// Loads an adapter for requests that name it; other requests are not affected. An adapter that cannot be loaded is refused
    /// and not listed.
    async fn load_adapter(&self, _adapter: Adapter) -> Result<(), EngineError> {
        Err(missing("load_adapter"))
    }

    /// Unloads an adapter. Running requests with it continue; new ones are refused as `NotFound`.
    async fn unload_adapter(&self, _name: &str) -> Result<(), EngineError> {
        Err(missing("unload_adapter"))
    }

    /// Returns the loaded adapters.
    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        Err(missing("list_adapters"))
    }

    /// Replaces the weights; running requests end with a retryable error. If the new weights are missing, the old ones stay.
    async fn update_weights(&self, _source: Value) -> Result<(), EngineError> {
        Err(missing("update_weights"))
    }

    /// Starts recording a profile.
    async fn start_profile(&self) -> Result<(), EngineError> {
        Err(missing("start_profile"))
    }

    /// Stops the profile and returns its location.
    async fn stop_profile(&self) -> Result<String, EngineError> {
        Err(missing("stop_profile"))
    }
}

/// Controls that run elsewhere: in another process, language or worker. Each method sends the request of its name and checks the
/// reply.
#[async_trait]
impl<T: Control> EngineControls for T {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        self.control(ControlRequest::Sleep { level }).await?.done()
    }

    async fn wake(&self) -> Result<(), EngineError> {
        self.control(ControlRequest::Wake).await?.done()
    }

    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        self.control(ControlRequest::ClearPrefixCache).await?.done()
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        let request = ControlRequest::LoadAdapter { adapter };
        self.control(request).await?.done()
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let name = name.to_owned();
        let request = ControlRequest::UnloadAdapter { name };
        self.control(request).await?.done()
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        match self.control(ControlRequest::ListAdapters).await? {
            ControlReply::Adapters { adapters } => Ok(adapters),
            other @ (ControlReply::Done | ControlReply::Profile { .. }) => Err(other.unexpected()),
        }
    }

    async fn update_weights(&self, source: Value) -> Result<(), EngineError> {
        let request = ControlRequest::UpdateWeights { source };
        self.control(request).await?.done()
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        self.control(ControlRequest::StartProfile).await?.done()
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        match self.control(ControlRequest::StopProfile).await? {
            ControlReply::Profile { location } => Ok(location),
            other @ (ControlReply::Done | ControlReply::Adapters { .. }) => Err(other.unexpected()),
        }
    }
}

impl ControlReply {
    fn done(self) -> Result<(), EngineError> {
        match self {
            Self::Done => Ok(()),
            other @ (Self::Adapters { .. } | Self::Profile { .. }) => Err(other.unexpected()),
        }
    }

    fn unexpected(&self) -> EngineError {
        EngineError::internal(format!(
            "a control request was answered with {self:?}, the reply to another operation"
        ))
    }
}

/// Returns the error for an operation that the engine lacks.
pub(crate) fn missing(op: &str) -> EngineError {
    EngineError::unsupported(
        At::other("op"),
        format!("this engine does not support {op}"),
    )
}
