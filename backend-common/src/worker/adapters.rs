//! [`AdapterBoard`]: the adapters that the engine has, as the Worker publishes them. It has the engine load those that the operator
//! named at start, and, once an engine has come up again, those that it had before.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};

use crate::card::ModelCard;
use crate::controls::{Adapter, EngineControls, MAX_ADAPTERS};
use crate::engine::LLMEngine;
use crate::error::{At, EngineError, ErrorKind};

/// How long the engine may take to say what it has. Then what is known without it counts, and the next change is not held up.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// What is known of the engine's adapters. Clones share.
#[derive(Debug, Clone)]
pub(super) struct AdapterBoard {
    loaded: Arc<watch::Sender<Vec<Adapter>>>,
    /// The model's own names, once the engine has started and declares adapters.
    model_names: Arc<Mutex<Option<Vec<String>>>>,
    /// One asks for the list at a time, so that no older list takes the place of a newer one.
    listing: Arc<Semaphore>,
}

impl Default for AdapterBoard {
    fn default() -> Self {
        Self {
            loaded: Arc::default(),
            model_names: Arc::default(),
            listing: Arc::new(Semaphore::new(1)),
        }
    }
}

impl AdapterBoard {
    /// Follows the adapters that are loaded.
    pub(super) fn subscribe(&self) -> watch::Receiver<Vec<Adapter>> {
        self.loaded.subscribe()
    }

    /// Has an engine that has just started load what it has not of `asked`.
    ///
    /// # Errors
    /// The engine serves no adapters, or cannot load one.
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

    /// Whether any adapter is loaded.
    pub(super) fn has_any(&self) -> bool {
        !self.loaded.borrow().is_empty()
    }

    /// Has an engine that came up again load what it has lost. What it cannot load is off the list from then on.
    pub(super) async fn restore(&self, engine: &dyn LLMEngine) {
        let wanted = self.loaded.borrow().clone();
        let Some(controls) = engine.controls().filter(|_| !wanted.is_empty()) else {
            return;
        };
        let there = match known_to(controls).await {
            Ok(Some(there)) => there,
            // Who does not say keeps what it had, as far as anybody can know.
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

    /// Checks an adapter that is to be loaded.
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

    /// Publishes what the engine says that it has now; where it says nothing, what `change` makes of what was known.
    pub(super) async fn publish(
        &self,
        controls: &dyn EngineControls,
        change: impl FnOnce(&mut Vec<Adapter>),
    ) {
        if self.model_names.lock().is_none() {
            return;
        }
        // Nobody closes the semaphore.
        let _turn = self.listing.acquire().await;
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

/// The adapters that the engine says it has; `None` where it does not say.
async fn known_to(controls: &dyn EngineControls) -> Result<Option<Vec<Adapter>>, EngineError> {
    match controls.adapters().await {
        Ok(adapters) => Ok(Some(adapters)),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether clients can be told of it.
fn is_listable(adapter: &Adapter) -> bool {
    adapter.check().is_ok()
}

/// An error with the adapter's name. A folder that is not found is the flag's mistake.
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
