//! An engine that sleeps, profiles and serves adapters, and the faults that the checks of CT and LR catch.

use std::sync::Arc;

use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, ErrorKind, GenerateRequest, Input, OutputStream,
    RequestField, async_trait,
    controls::{Adapter, SleepLevel},
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;

use super::cut::{Then, cut_after};
use super::fault::{Call, Fault, Inner, at_tokens, others, with_fault};
use super::{Clean, Mutant};
use crate::subject::{Scenario, Subject};

pub(super) const CONTROLS: &[Mutant] = &[Mutant {
    name: "is-operated",
    stands_for: "nothing: an engine that sleeps, profiles and serves adapters",
    killed_by: &[],
    build: |clean, scenario| operated(clean, scenario, Flaw::None),
}];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "wakes-with-other-weights",
        stands_for: "weights that come back in another layout than the one they were quantised to",
        killed_by: &["CT01"],
        build: |clean, scenario| operated(clean, scenario, Flaw::WakesWrong),
    },
    Mutant {
        name: "asleep-is-internal",
        stands_for: "a step that finds no weights: the client is told of an internal error, and nobody tries elsewhere",
        killed_by: &["CT01"],
        build: |clean, scenario| operated(clean, scenario, Flaw::AsleepIsInternal),
    },
    Mutant {
        name: "second-wake-fails",
        stands_for: "memory that is given back twice",
        killed_by: &["CT01"],
        build: |clean, scenario| operated(clean, scenario, Flaw::SecondWakeFails),
    },
    Mutant {
        name: "missing-weights-are-loaded",
        stands_for: "weights replaced tensor by tensor as they are read: a source that is not there leaves random ones",
        killed_by: &["CT02"],
        build: |clean, scenario| operated(clean, scenario, Flaw::UpdateBreaks),
    },
    Mutant {
        name: "profile-is-nowhere",
        stands_for: "a profiler whose folder is told in its own log alone",
        killed_by: &["CT03"],
        build: |clean, scenario| operated(clean, scenario, Flaw::ProfileIsNowhere),
    },
    Mutant {
        name: "adapter-merged-into-the-base",
        stands_for: "an adapter added to the weights in place: everybody else has it too",
        killed_by: &["LR01"],
        build: |clean, scenario| operated(clean, scenario, Flaw::Merged),
    },
    Mutant {
        name: "unloaded-adapter-answers",
        stands_for: "an adapter that is taken off the list and left in its slot: who names it has the next one's weights",
        killed_by: &["LR01"],
        build: |clean, scenario| operated(clean, scenario, Flaw::UnloadKeeps),
    },
    Mutant {
        name: "unload-cuts-requests",
        stands_for: "a slot freed under the requests that use it",
        killed_by: &["LR02"],
        build: |clean, scenario| operated(clean, scenario, Flaw::UnloadCuts),
    },
    Mutant {
        name: "failed-adapter-is-listed",
        stands_for: "a list that is written before the load",
        killed_by: &["LR03"],
        build: |clean, scenario| operated(clean, scenario, Flaw::ListsFailed),
    },
    Mutant {
        name: "adapter-reads-the-base-cache",
        stands_for: "blocks hashed without the adapter (vLLM had it so once)",
        killed_by: &["LR04"],
        build: |clean, scenario| operated(clean, scenario, Flaw::CacheShared),
    },
    Mutant {
        name: "adapter-for-the-whole-batch",
        stands_for: "one adapter a batch: the neighbours of its requests have it too",
        killed_by: &["LR05"],
        build: |clean, scenario| operated(clean, scenario, Flaw::Spreads),
    },
    Mutant {
        name: "adapters-name-is-burnt",
        stands_for: "a slot that is never given back: the second load of a name fails",
        killed_by: &["LR06"],
        build: |clean, scenario| operated(clean, scenario, Flaw::NameIsBurnt),
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    WakesWrong,
    AsleepIsInternal,
    SecondWakeFails,
    UpdateBreaks,
    ProfileIsNowhere,
    Merged,
    UnloadKeeps,
    UnloadCuts,
    ListsFailed,
    CacheShared,
    Spreads,
    NameIsBurnt,
}

/// The source of the subject's adapter.
const SOURCE: &str = "adapters/poems";

fn operated(clean: &Clean, scenario: &Scenario, flaw: Flaw) -> Subject {
    let fault = Operated {
        flaw,
        state: Mutex::default(),
    };
    with_fault(clean, scenario, fault).with_adapter(Adapter {
        name: "poems".into(),
        source: SOURCE.into(),
    })
}

struct Operated {
    flaw: Flaw,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_asleep: bool,
    is_profiling: bool,
    /// Whether the weights were replaced.
    is_changed: bool,
    /// The adapters, each with a sender that ends its requests.
    adapters: Vec<(Adapter, watch::Sender<()>)>,
    /// Prompts that the base model has cached.
    cached: Vec<Input>,
    /// Cloned by the active requests of adapters.
    under_way: Arc<()>,
    /// The names of unloaded adapters.
    burnt: Vec<String>,
}

/// An admitted request.
struct Admitted {
    /// The change to its tokens.
    change: u32,
    /// Ends it early.
    gone: watch::Receiver<()>,
    /// Set for a request that names an adapter, until its end.
    place: Option<Arc<()>>,
}

impl Operated {
    fn admit(&self, request: &mut GenerateRequest) -> Result<Admitted, EngineError> {
        let mut state = self.state.lock();
        if state.is_asleep {
            let kind = if self.flaw == Flaw::AsleepIsInternal {
                ErrorKind::Internal
            } else {
                ErrorKind::Unavailable
            };
            return Err(EngineError::new(kind, "the engine sleeps"));
        }
        let mut change = u32::from(state.is_changed);
        let never = watch::Sender::new(()).subscribe();
        let Some(name) = request.adapter.take() else {
            state.cached.push(request.input.clone());
            if self.flaw == Flaw::Spreads && others(&state.under_way) > 0 {
                change ^= 2;
            }
            return Ok(Admitted {
                change,
                gone: never,
                place: None,
            });
        };
        change ^= 2;
        let place = Some(Arc::clone(&state.under_way));
        if self.flaw == Flaw::CacheShared && state.cached.contains(&request.input) {
            change ^= 1;
        }
        let mut loaded = state.adapters.iter();
        let gone = match loaded.find(|(adapter, _)| adapter.name == name) {
            Some((_, gone)) if self.flaw == Flaw::UnloadCuts => gone.subscribe(),
            Some(_) => never,
            None if self.flaw == Flaw::UnloadKeeps && name == "poems" => never,
            None => {
                return Err(EngineError::not_found("no such adapter is loaded")
                    .with_at(RequestField::Adapter));
            }
        };
        Ok(Admitted {
            change,
            gone,
            place,
        })
    }
}

#[async_trait]
impl Fault for Operated {
    fn declare(&self, config: &mut EngineConfig) {
        config.capabilities.adapters = true;
    }

    async fn generate(&self, inner: &Inner, mut call: Call) -> Result<OutputStream, EngineError> {
        let Admitted {
            change,
            mut gone,
            place,
        } = self.admit(&mut call.request)?;
        let outputs = inner.generate(call.request, call.ctx).await?;
        let outputs = at_tokens(outputs, move |chunk| {
            let _until_the_end = &place;
            let tokens = chunk.token_ids.iter_mut();
            tokens.for_each(|token| *token ^= change);
        });
        if self.flaw != Flaw::UnloadCuts || change < 2 {
            return Ok(outputs);
        }
        let lost = Then::Fail(EngineError::internal("the adapter is gone"));
        Ok(cut_after(outputs, lost, async move {
            // An error means that the adapter is gone.
            let _ = gone.changed().await;
        }))
    }

    fn controls<'a>(&'a self, _inner: &'a Inner) -> Option<&'a dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for Operated {
    async fn sleep(&self, _level: SleepLevel) -> Result<(), EngineError> {
        self.state.lock().is_asleep = true;
        Ok(())
    }

    async fn wake(&self) -> Result<(), EngineError> {
        let mut state = self.state.lock();
        let was_asleep = std::mem::take(&mut state.is_asleep);
        if !was_asleep && self.flaw == Flaw::SecondWakeFails {
            return Err(EngineError::internal("no such memory"));
        }
        state.is_changed |= self.flaw == Flaw::WakesWrong;
        Ok(())
    }

    async fn update_weights(&self, _source: Value) -> Result<(), EngineError> {
        self.state.lock().is_changed |= self.flaw == Flaw::UpdateBreaks;
        Err(EngineError::not_found("no weights are there"))
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        self.state.lock().is_profiling = true;
        Ok(())
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        if !std::mem::take(&mut self.state.lock().is_profiling) {
            return Err(EngineError::invalid_argument("op", "no profile was begun"));
        }
        let is_nowhere = self.flaw == Flaw::ProfileIsNowhere;
        Ok(if is_nowhere { "" } else { "profiles/1" }.into())
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        let is_there = adapter.source == SOURCE;
        let mut state = self.state.lock();
        if self.flaw == Flaw::NameIsBurnt && state.burnt.contains(&adapter.name) {
            return Err(EngineError::invalid_argument("adapter", "it is loaded"));
        }
        if is_there || self.flaw == Flaw::ListsFailed {
            state.is_changed |= self.flaw == Flaw::Merged;
            let is_other = |(loaded, _): &(Adapter, _)| loaded.name != adapter.name;
            state.adapters.retain(is_other);
            state.adapters.push((adapter, watch::Sender::new(())));
        }
        match is_there {
            true => Ok(()),
            false => Err(EngineError::not_found("no adapter is there")),
        }
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let mut state = self.state.lock();
        let mut loaded = state.adapters.iter();
        match loaded.position(|(adapter, _)| adapter.name == name) {
            Some(place) => {
                state.adapters.remove(place);
                state.burnt.push(name.to_owned());
                Ok(())
            }
            None => Err(EngineError::not_found("no such adapter is loaded")),
        }
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        let state = self.state.lock();
        Ok(state
            .adapters
            .iter()
            .map(|(adapter, _)| adapter.clone())
            .collect())
    }
}
