//! The LoRA adapters of a server: [`Takes`] says when it takes them, [`AtStart`] has those of its start, and [`Served`] those that
//! requests may name. [`Controls`](crate::controls::Controls) loads and unloads them.

use std::sync::Arc;

use genset_backend_common::controls::Adapter;
use genset_backend_common::{EngineError, RequestField};
use parking_lot::Mutex;

use crate::api::controls::vllm;
use crate::config::LauncherConfig;
use crate::dialect::Dialect;
use crate::ranks::said;
use crate::server::Server;

/// When a server takes adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    /// Never.
    Nothing,
    /// Only at its start.
    AtStart,
    /// Also while it serves.
    WhileServing,
}

impl Takes {
    /// Asks a server that was started with this config and these adapters.
    pub(crate) async fn of(config: &LauncherConfig, at_start: &AtStart, server: &Server) -> Self {
        let is_on = !at_start.list().is_empty() || said(config, &["--enable-lora"]).is_some();
        if server.dialect() != Dialect::Vllm || !is_on {
            Self::Nothing
        } else if vllm::loads_adapters(server).await {
            Self::WhileServing
        } else {
            Self::AtStart
        }
    }
}

/// The adapters that a server is started with, also again after its death. Clones share state.
#[derive(Debug, Clone, Default)]
pub(crate) struct AtStart(Arc<Mutex<Vec<Adapter>>>);

impl AtStart {
    pub(crate) fn new(adapters: Vec<Adapter>) -> Self {
        Self(Arc::new(Mutex::new(adapters)))
    }

    pub(crate) fn list(&self) -> Vec<Adapter> {
        self.0.lock().clone()
    }

    /// Leaves the adapter out of the next start.
    pub(crate) fn forget(&self, name: &str) {
        self.0.lock().retain(|adapter| adapter.name != name);
    }
}

/// An adapter that requests may name.
#[derive(Debug, Clone)]
pub(crate) struct ServedAdapter {
    pub(crate) adapter: Adapter,
    /// Its name in the server.
    pub(crate) model: String,
}

/// The adapters of one server that requests may name. A new server begins with those of its start; the Worker loads the others
/// again.
#[derive(Debug, Default)]
pub(crate) struct Served(Mutex<Inside>);

#[derive(Debug, Default)]
struct Inside {
    adapters: Vec<ServedAdapter>,
    /// The number of names that were made up.
    names: u64,
}

impl Served {
    /// The adapters of a start. The server has them by their own names.
    pub(crate) fn of_start(adapters: Vec<Adapter>) -> Self {
        let adapters = adapters.into_iter().map(|adapter| ServedAdapter {
            model: adapter.name.clone(),
            adapter,
        });
        Self(Mutex::new(Inside {
            adapters: adapters.collect(),
            names: 0,
        }))
    }

    pub(crate) fn list(&self) -> Vec<Adapter> {
        let inside = self.0.lock();
        let adapters = inside.adapters.iter();
        adapters.map(|served| served.adapter.clone()).collect()
    }

    /// The adapter with this name.
    ///
    /// # Errors
    /// `NotFound`. The server itself might answer with its base model.
    pub(crate) fn find(&self, name: &str) -> Result<ServedAdapter, EngineError> {
        let inside = self.0.lock();
        let found = inside
            .adapters
            .iter()
            .find(|served| served.adapter.name == name);
        found.cloned().ok_or_else(|| unknown(name))
    }

    /// A name for an adapter in the server that no adapter had before: vLLM finds KV blocks by this name, those of a former
    /// adapter too.
    pub(crate) fn new_name(&self, name: &str) -> String {
        let mut inside = self.0.lock();
        inside.names += 1;
        format!("{name}#{}", inside.names)
    }

    /// Adds an adapter that the server has.
    pub(crate) fn add(&self, served: ServedAdapter) {
        self.0.lock().adapters.push(served);
    }

    /// Takes an adapter away from new requests.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) fn take(&self, name: &str) -> Result<ServedAdapter, EngineError> {
        let mut inside = self.0.lock();
        let mut adapters = inside.adapters.iter();
        let place = adapters.position(|served| served.adapter.name == name);
        let place = place.ok_or_else(|| unknown(name))?;
        Ok(inside.adapters.remove(place))
    }
}

fn unknown(name: &str) -> EngineError {
    let message = format!("no adapter {name:?} is loaded");
    EngineError::not_found(message).with_at(RequestField::Adapter)
}
