//! LoRA adapters as models: each is its base model under another name, and shares everything with the base.

use std::collections::BTreeMap;
use std::sync::Arc;

use genset_backend_common::controls::Adapter;
use genset_runtime::LiveModel;

use super::ServedModel;
use crate::clock::now;

/// What makes a model an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedAdapter {
    /// The adapter, as workers publish it.
    pub adapter: Adapter,
    /// The name of its base model.
    pub base: String,
}

impl ServedModel {
    /// The adapter that its requests name to the engine.
    pub(crate) fn adapter_name(&self) -> Option<String> {
        let served = self.adapter.as_ref();
        served.map(|served| served.adapter.name.clone())
    }

    /// The model for an adapter of this one.
    fn with_adapter(&self, adapter: &Adapter) -> Self {
        Self {
            card: self.card.of_adapter(&adapter.name),
            adapter: Some(ServedAdapter {
                adapter: adapter.clone(),
                base: self.card.name.clone(),
            }),
            created: now(),
            ..self.clone()
        }
    }

    /// Whether it is this adapter of `base`, as `base` is served now.
    fn is_adapter_of(&self, base: &Self, adapter: &Adapter) -> bool {
        let is_same =
            |served: &ServedAdapter| served.base == base.card.name && served.adapter == *adapter;
        self.adapter.as_ref().is_some_and(is_same) && Arc::ptr_eq(&self.engine, &base.engine)
    }
}

/// Adds the adapters of the models in `map`, and removes those that are gone. `live` are the announced models: an adapter
/// yields to a model with its name, and to the first adapter with its name. Returns true if anything changed.
pub(super) fn renew(
    map: &mut BTreeMap<String, Arc<ServedModel>>,
    live: &BTreeMap<String, &LiveModel>,
) -> bool {
    let models = map.values().filter(|model| model.adapter.is_none());
    let models: Vec<Arc<ServedModel>> = models.cloned().collect();
    let is_models = |name: &String| {
        live.contains_key(name)
            || models
                .iter()
                .any(|model| model.card.name == *name || model.card.aliases.contains(name))
    };
    let mut wanted: BTreeMap<String, Arc<ServedModel>> = BTreeMap::new();
    let mut is_new = false;
    for base in &models {
        let live = live.get(&base.card.name);
        let service = live.and_then(|live| base.base_in(live));
        let adapters = service.map(|service| service.adapters.values());
        for adapter in adapters.into_iter().flatten() {
            let name = &adapter.name;
            if wanted.contains_key(name) || is_models(name) {
                continue;
            }
            let known = map.get(name);
            let known = known.filter(|known| known.is_adapter_of(base, adapter));
            let model = known.cloned().unwrap_or_else(|| {
                is_new = true;
                tracing::info!(model = name, base = base.card.name, "adapter ready");
                Arc::new(base.with_adapter(adapter))
            });
            wanted.insert(name.clone(), model);
        }
    }
    let known = map.len();
    map.retain(|name, model| model.adapter.is_none() || wanted.contains_key(name));
    let has_gone = map.len() != known;
    if is_new {
        map.extend(wanted);
    }
    is_new || has_gone
}
