//! [`SeenModels`]: the models that were there since a batch began. A request to one of them that is gone is asked again: its workers
//! may be away for longer than a model lingers.

use std::collections::HashSet;

use parking_lot::Mutex;

use crate::model::Models;

/// The models that were there since a batch began, by the names that its requests have for them.
#[derive(Debug)]
pub struct SeenModels {
    models: Models,
    names: Mutex<HashSet<String>>,
}

impl SeenModels {
    /// None yet, of these.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self {
            models,
            names: Mutex::default(),
        }
    }

    /// Notes whether a model is there, or was a moment ago.
    pub(super) fn look(&self, name: &str) {
        let models = &self.models;
        let is_there = || models.get(name).is_some() || models.expected_until(name).is_some();
        if !self.was_there(name) && is_there() {
            self.names.lock().insert(name.to_owned());
        }
    }

    /// Whether the model was there, or is being prepared: one that was never there may turn out to be at fault.
    pub(super) fn has(&self, name: &str) -> bool {
        self.was_there(name) || self.models.is_coming(name)
    }

    fn was_there(&self, name: &str) -> bool {
        self.names.lock().contains(name)
    }

    /// As if the model had been there.
    #[cfg(test)]
    pub(super) fn insert(&self, name: &str) {
        self.names.lock().insert(name.to_owned());
    }
}
