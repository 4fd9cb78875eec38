//! [`Chosen`] selects the models to serve if workers announce more than the server may hold.
//!
//! Anyone who can write to discovery can announce any number of models, and each takes a tokenizer's memory here.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry};
use genset_runtime::LiveModel;
use prometheus_client::metrics::gauge::Gauge;

/// The names that are served. A model keeps its place as long as it is announced, even if its card changes.
#[derive(Debug)]
pub(super) struct Chosen {
    names: BTreeSet<String>,
    max: NonZeroUsize,
    left_out: Gauge,
}

impl Chosen {
    /// None yet, and at most `max`.
    pub(super) fn register(registry: &MetricsRegistry, max: NonZeroUsize) -> Self {
        let help = "Models that workers announce and that are not served, because of --max-models";
        Self {
            names: BTreeSet::new(),
            max,
            left_out: registry.create("genset_frontend_left_out_models", help),
        }
    }

    /// The models that are served now, and why each other one is not. Free places are filled in the order of names.
    pub(super) fn of<'a>(
        &mut self,
        announced: &'a BTreeMap<String, LiveModel>,
    ) -> (
        BTreeMap<String, &'a LiveModel>,
        BTreeMap<String, EngineError>,
    ) {
        self.names.retain(|name| announced.contains_key(name));
        for name in announced.keys() {
            if self.names.len() >= self.max.get() {
                break;
            }
            self.names.insert(name.clone());
        }
        let is_chosen = |name: &str| self.names.contains(name);
        let (mut served, mut left_out) = (BTreeMap::new(), BTreeMap::new());
        for (name, live) in announced {
            if is_chosen(name) {
                served.insert(name.clone(), live);
            } else {
                left_out.insert(name.clone(), self.refusal(name));
            }
        }
        self.note(&left_out);
        (served, left_out)
    }

    fn refusal(&self, name: &str) -> EngineError {
        let max = self.max;
        let message = format!(
            "the model '{name}' is not served: this server serves {max} others, its --max-models"
        );
        EngineError::new(ErrorKind::Overloaded, message)
    }

    /// Warns when the first model is left out; later ones are only counted.
    fn note(&self, left_out: &BTreeMap<String, EngineError>) {
        let count = i64::try_from(left_out.len()).unwrap_or(i64::MAX);
        if self.left_out.set(count) == 0
            && let Some((model, error)) = left_out.iter().next()
        {
            tracing::warn!(
                model,
                left_out = count,
                %error,
                "models are left out; genset_frontend_left_out_models counts them"
            );
        }
    }
}
