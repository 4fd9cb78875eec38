//! Models that are not ready: which to wait for, and why others are not served.

use std::sync::Arc;

use genset_backend_common::{EngineError, ModelCard};
use genset_runtime::LiveModel;
use tokio::time::{Instant, timeout_at};

use super::{Failure, Failures, LiveMap, Models, ServedModel, named};

impl Models {
    /// Until when a model with this name or alias is expected back, if it was ready a moment ago and is not now.
    #[must_use]
    pub fn expected_until(&self, name: &str) -> Option<Instant> {
        self.lingering.expected_until(name)
    }

    /// Whether workers announce a model with this name or alias, or an adapter with this name, that is ready or will be: its
    /// files and settings are not known to be invalid.
    #[must_use]
    pub fn is_coming(&self, name: &str) -> bool {
        let failure = self.failure(&self.failures.borrow(), name);
        let announced = announced_as(&self.live.borrow(), name).is_some_and(LiveModel::is_servable);
        announced && !failure.as_ref().is_some_and(Failure::is_lasting)
    }

    /// Whether a model whose engine reads whole bodies may exist: one is announced or served, or any model is expected back,
    /// perhaps with another card.
    pub(crate) fn may_take_whole_bodies(&self) -> bool {
        let takes = |card: &ModelCard| card.capabilities.whole_bodies;
        let is_announced = || self.live.borrow().values().any(|live| takes(&live.card));
        let is_served = || self.map.borrow().values().any(|model| takes(&model.card));
        is_announced() || is_served() || self.lingering.any()
    }

    /// Waits until the model with this name or alias is ready; `None` if it is not by `until`, if given.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn get_by(&self, name: &str, until: Option<Instant>) -> Option<Arc<ServedModel>> {
        let mut map = self.map.subscribe();
        let there = map.wait_for(|map| named(map, name).is_some());
        let map = match until {
            Some(until) => timeout_at(until, there).await.ok()?,
            None => there.await,
        };
        let map = map.ok()?;
        named(&map, name).cloned()
    }

    /// Why an announced model with this name or alias is not served, if the server holds too many models.
    pub(crate) fn refusal(&self, name: &str) -> Option<EngineError> {
        match self.failure(&self.failures.borrow(), name)? {
            Failure::NoRoom(refusal) => Some(refusal),
            Failure::Unprepared(_) => None,
        }
    }

    /// The entry in `failures` of the announced model with this name or alias.
    pub(super) fn failure(&self, failures: &Failures, name: &str) -> Option<Failure> {
        let live = self.live.borrow();
        failures.get(&announced_as(&live, name)?.card.name).cloned()
    }
}

/// The announced model with this name or alias, or with an adapter of this name.
fn announced_as<'a>(live: &'a LiveMap, name: &str) -> Option<&'a LiveModel> {
    let is_so = |model: &&LiveModel| {
        let is_alias = model.card.aliases.iter().any(|alias| alias == name);
        is_alias || model.adapters.contains_key(name)
    };
    live.get(name).or_else(|| live.values().find(is_so))
}
