//! [`AdapterBoard`]: the engine's adapters, as the Worker publishes them. It loads the operator's adapters at start, and reloads
//! the previous ones once an engine has recovered.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::card::ModelCard;
use crate::controls::{Adapter, EngineControls, MAX_ADAPTERS};
use crate::engine::LLMEngine;
use crate::error::{At, EngineError, ErrorKind};

/// Limit of the engine's adapter listing. After it the known list counts, and the next change is not delayed.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// The known adapters of the engine. Clones share state.
#[derive(Debug, Clone, Default)]
pub(super) struct AdapterBoard {
    loaded: Arc<watch::Sender<Vec<Adapter>>>,
    /// The model's own names, once the engine has started with adapter support.
    model_names: Arc<Mutex<Option<Vec<String>>>>,
    /// Serializes listings, so that an older list cannot replace a newer one.
    listing: Arc<tokio::sync::Mutex<()>>,
}

impl AdapterBoard {
    /// Subscribes to the loaded adapters.
    pub(super) fn subscribe(&self) -> watch::Receiver<Vec<Adapter>> {
        self.loaded.subscribe()
    }

    /// Loads the adapters in `asked` that a started engine does not have.
    ///
    /// # Errors
    /// The engine does not support adapters, or cannot load one.
    pub(super) async fn begin(
        &self,
        engine: &dyn LLMEngine,
        asked: &[Adapter],
        card: &ModelCard,
    ) -> Result<(), EngineError> {
        if !card.capabilities.adapters {
            return match asked {
                [] => Ok(()),
                _ => Err(EngineError::unsupported(
                    "--adapter",
                    "this model's engine serves no LoRA adapters; leave it out",
                )),
            };
        }
        let names = std::iter::once(&card.name).chain(&card.aliases);
        *self.model_names.lock() = Some(names.cloned().collect());
        let Some(controls) = engine.controls() else {
            return match asked {
                [] => Ok(()),
                _ => Err(crate::controls::missing("load_adapter")),
            };
        };
        let there = known_to(controls).await?.unwrap_or_default();
        let mut loaded = there.clone();
        for adapter in asked {
            self.check(adapter).map_err(|error| of(adapter, error))?;
            if !there.iter().any(|known| known.name == adapter.name) {
                let load = controls.load_adapter(adapter.clone()).await;
                load.map_err(|error| of(adapter, error))?;
                loaded.push(adapter.clone());
            }
        }
        self.publish(controls, |known| *known = loaded).await;
        Ok(())
    }

    /// Returns whether any adapter is loaded.
    pub(super) fn has_any(&self) -> bool {
        !self.loaded.borrow().is_empty()
    }

    /// Reloads the adapters that a recovered engine has lost. Those that cannot be loaded are no longer listed.
    pub(super) async fn restore(&self, engine: &dyn LLMEngine) {
        let wanted = self.loaded.borrow().clone();
        let Some(controls) = engine.controls().filter(|_| !wanted.is_empty()) else {
            return;
        };
        let there = match known_to(controls).await {
            Ok(Some(there)) => there,
            // An engine that does not list its adapters is assumed to have kept them.
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "the engine does not say which adapters it has");
                return;
            }
        };
        let mut loaded = there.clone();
        for adapter in wanted {
            if there.iter().any(|known| known.name == adapter.name) {
                continue;
            }
            match controls.load_adapter(adapter.clone()).await {
                Ok(()) => loaded.push(adapter),
                Err(error) => {
                    tracing::error!(adapter = adapter.name, %error, "an adapter cannot be loaded again");
                }
            }
        }
        self.publish(controls, |known| *known = loaded).await;
    }

    /// Checks an adapter before it is loaded.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    pub(super) fn check(&self, adapter: &Adapter) -> Result<(), EngineError> {
        adapter.check()?;
        let is_models_own = match &*self.model_names.lock() {
            Some(names) => names.contains(&adapter.name),
            None => false,
        };
        if is_models_own {
            let problem = format!("{:?} is the model's own name; choose another", adapter.name);
            let at = At::other("adapter.name");
            return Err(EngineError::invalid_argument(at, problem));
        }
        if self.loaded.borrow().len() >= MAX_ADAPTERS {
            let problem = format!("a worker lists at most {MAX_ADAPTERS}; unload one");
            let at = At::other("adapter");
            return Err(EngineError::invalid_argument(at, problem));
        }
        Ok(())
    }

    /// Publishes the adapters that the engine lists; if it does not list them, applies `change` to the known ones.
    pub(super) async fn publish(
        &self,
        controls: &dyn EngineControls,
        change: impl FnOnce(&mut Vec<Adapter>),
    ) {
        if self.model_names.lock().is_none() {
            return;
        }
        let _turn = self.listing.lock().await;
        let told = tokio::time::timeout(LIST_TIMEOUT, known_to(controls)).await;
        let told = told.ok().and_then(Result::ok).flatten();
        self.loaded.send_if_modified(|known| {
            let before = known.clone();
            match told {
                Some(told) => *known = told,
                None => change(known),
            }
            known.retain(is_listable);
            known.sort_by(|a, b| a.name.cmp(&b.name));
            known.dedup_by(|a, b| a.name == b.name);
            known.truncate(MAX_ADAPTERS);
            *known != before
        });
    }
}

/// Returns the adapters that the engine lists; `None` if it does not support listing.
async fn known_to(controls: &dyn EngineControls) -> Result<Option<Vec<Adapter>>, EngineError> {
    match controls.adapters().await {
        Ok(adapters) => Ok(Some(adapters)),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether the adapter may be listed for clients.
fn is_listable(adapter: &Adapter) -> bool {
    adapter.check().is_ok()
}

/// Adds the adapter's name to an error. A folder that is not found is an error in the flag.
fn of(adapter: &Adapter, error: EngineError) -> EngineError {
    let message = format!("{}: {}", adapter.name, error.message());
    let kind = if error.kind() == ErrorKind::NotFound {
        ErrorKind::InvalidArgument
    } else {
        error.kind()
    };
    EngineError::new(kind, message)
        .with_at("--adapter")
        .with_source(error)
}
