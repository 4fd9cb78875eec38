//! [`SeenModels`]: the models that were served since a batch began. A request to one that is gone is retried: its
//! workers may be away for longer than a model lingers.

use std::collections::HashSet;

use parking_lot::Mutex;

use crate::model::Models;

/// The models that were served since a batch began, by the names that its requests use.
#[derive(Debug)]
pub struct SeenModels {
    models: Models,
    names: Mutex<HashSet<String>>,
}

impl SeenModels {
    /// No model seen yet; looks them up in `models`.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self {
            models,
            names: Mutex::default(),
        }
    }

    /// Notes whether a model is served, or was a moment ago.
    pub(super) fn look(&self, name: &str) {
        let models = &self.models;
        let is_there = || models.get(name).is_some() || models.expected_until(name).is_some();
        if !self.was_there(name) && is_there() {
            self.names.lock().insert(name.to_owned());
        }
    }

    /// Whether the model was served, or is being prepared. A model that was never served may turn out to be broken.
    pub(super) fn has(&self, name: &str) -> bool {
        self.was_there(name) || self.models.is_coming(name)
    }

    fn was_there(&self, name: &str) -> bool {
        self.names.lock().contains(name)
    }

    /// Adds the model as if it had been served.
    #[cfg(test)]
    pub(super) fn insert(&self, name: &str) {
        self.names.lock().insert(name.to_owned());
    }
}
