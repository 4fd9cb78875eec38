//! [`EngineControls`]: what an operator may ask of an engine beside generation. Typed, optional, and refused by name
//! where an engine does not have it.

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
    /// The name requests use.
    pub name: String,
    /// Where the engine finds it: a folder, or a Hub repository id.
    pub source: String,
}

/// The most adapters that a worker lists.
pub const MAX_ADAPTERS: usize = 1024;

/// The longest name of an adapter, in bytes.
pub const MAX_ADAPTER_NAME_BYTES: usize = 256;

/// The longest source of an adapter, in bytes.
pub const MAX_ADAPTER_SOURCE_BYTES: usize = 4096;

impl Adapter {
    /// Checks name and source: they are not blank, not too long, have no control characters, and the name neither begins nor ends
    /// with a space.
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
            let problem = if value.trim().is_empty() {
                "must not be empty".to_owned()
            } else if value.len() > most {
                format!("must have at most {most} bytes, got {}", value.len())
            } else if value.chars().any(char::is_control) {
                "must have no control characters".to_owned()
            } else {
                continue;
            };
            return Err(EngineError::invalid_argument(At::other(field), problem));
        }
        if self.name.trim() != self.name {
            let problem = "must not begin or end with a space";
            let at = At::other("adapter.name");
            return Err(EngineError::invalid_argument(at, problem));
        }
        Ok(())
    }
}

/// One administrative request, as it travels to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub enum ControlRequest {
    /// Free device memory until woken.
    Sleep {
        /// How much to free.
        #[serde(default)]
        level: SleepLevel,
    },
    /// Take back what `Sleep` freed.
    Wake,
    /// Drop every reusable KV block.
    ClearPrefixCache,
    /// Make an adapter available.
    LoadAdapter {
        /// The adapter.
        adapter: Adapter,
    },
    /// Make an adapter unavailable.
    UnloadAdapter {
        /// Its name.
        name: String,
    },
    /// List the adapters.
    ListAdapters,
    /// Replace the weights.
    UpdateWeights {
        /// The engine's own description of where they come from.
        source: Value,
    },
    /// Begin to record a profile.
    StartProfile,
    /// End the profile.
    StopProfile,
    /// Change what the worker's process logs. The runtime does it, and no engine is asked.
    LogLevel {
        /// The new filter, in the syntax of `RUST_LOG`.
        filter: String,
    },
}

impl ControlRequest {
    /// The operation's name, as it stands on the wire.
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

/// Administrative abilities. Every method has a default that refuses, so an engine writes those it has.
///
/// # Errors
/// Every method: `Unsupported` where the engine lacks the ability, else what the engine returns.
#[async_trait]
pub trait EngineControls: Send + Sync {
    /// Frees device memory until [`wake`](Self::wake). A request that comes meanwhile waits for that, or is refused with an
    /// error that clients send again. Sleeping twice is sleeping once.
    ///
    /// The Worker goes on to list the instance, for whoever is to wake it finds it there, and to send it canaries. Refuse with
    /// `Overloaded`: of an engine whose canaries end in any other error, or in none, it takes that it is dead.
    async fn sleep(&self, _level: SleepLevel) -> Result<(), EngineError> {
        Err(missing("sleep"))
    }

    /// Takes back what `sleep` freed: from here on the engine answers as before. Nothing happens to one that is awake.
    async fn wake(&self) -> Result<(), EngineError> {
        Err(missing("wake"))
    }

    /// Drops every reusable KV block, and publishes the event.
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        Err(missing("clear_prefix_cache"))
    }

    /// Makes an adapter available to requests that name it; no other request notices. One that cannot be loaded is refused, and
    /// is not listed.
    async fn load_adapter(&self, _adapter: Adapter) -> Result<(), EngineError> {
        Err(missing("load_adapter"))
    }

    /// Makes an adapter unavailable; requests that use it go on, and new ones are refused as `NotFound`.
    async fn unload_adapter(&self, _name: &str) -> Result<(), EngineError> {
        Err(missing("unload_adapter"))
    }

    /// The adapters that are loaded.
    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        Err(missing("list_adapters"))
    }

    /// Replaces the weights; requests under way end with a retryable error. Where the new ones are not there, the old ones stay.
    async fn update_weights(&self, _source: Value) -> Result<(), EngineError> {
        Err(missing("update_weights"))
    }

    /// Begins to record a profile.
    async fn start_profile(&self) -> Result<(), EngineError> {
        Err(missing("start_profile"))
    }

    /// Ends the profile and says where it is.
    async fn stop_profile(&self) -> Result<String, EngineError> {
        Err(missing("stop_profile"))
    }
}

/// Controls that something else performs: a process, a program in another language, a worker elsewhere. Each method is the request of
/// its name, and its answer is checked.
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
            "a control request was answered with {self:?}, which is not what was asked"
        ))
    }
}

/// The error for an ability an engine does not have.
pub(crate) fn missing(op: &str) -> EngineError {
    EngineError::unsupported(
        At::other("op"),
        format!("this engine does not support {op}"),
    )
}
