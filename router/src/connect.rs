//! [`connect`]: stacks the layers for a model.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, MetricsRegistry, Role};
use genset_runtime::{
    Ejections, GenerateClient, KvBlocksClient, LiveModel, ModelDirectory, Runtime, SelectionMode,
    endpoints,
};

use crate::config::{RouterConfig, RouterMode};
use crate::disaggregating::{Disaggregating, Legs, Pools};
use crate::kv::{Feed, RouterMetrics, Selecting};
use crate::migrating::{Migrating, Migrations};
use crate::queueing::{QueueMetrics, Queueing};
use crate::route::{Route, Whoever};

/// What the layers of all models share: routing settings and metrics. Clones share state.
#[derive(Debug, Clone)]
pub struct Layers {
    config: RouterConfig,
    selection: RouterMetrics,
    ejections: Ejections,
    legs: Legs,
    queue: QueueMetrics,
    migrations: Migrations,
}

impl Layers {
    /// Registers the metrics, once per registry.
    #[must_use]
    pub fn register(registry: &MetricsRegistry, config: RouterConfig) -> Self {
        Self {
            selection: RouterMetrics::register(registry, config.mode),
            ejections: Ejections::register(registry, config.ejection),
            legs: Legs::register(registry),
            queue: QueueMetrics::register(registry, config.max_waiting > 0),
            migrations: Migrations::register(registry, config.migration),
            config,
        }
    }

    /// From now on no request of any model waits for an instance: this process is shutting down.
    pub fn expect_nobody(&self) {
        self.migrations.expect_nobody();
    }
}

/// Returns a route to the instances of a model, once at least one of them can complete requests.
///
/// # Errors
/// `Unavailable` when none is live within `timeout`.
///
/// # Cancel safety
/// Nothing is lost when the future is dropped.
pub async fn connect(
    directory: &ModelDirectory,
    model: &LiveModel,
    layers: &Layers,
    timeout: Duration,
) -> Result<Arc<dyn Generate>, EngineError> {
    let config = &layers.config;
    let below: Arc<dyn Route> = if model.card.capabilities.can_be_apart() {
        let pools = Pools::follow(directory, model, layers, timeout).await?;
        let blocks = KvBlocksClient::new(directory.runtime());
        let (card, legs) = (&model.card, &layers.legs);
        Arc::new(Disaggregating::new(pools, card, config, Some(blocks), legs))
    } else {
        pool_route(directory, model, model.whole_role(), layers, timeout).await?
    };
    let below = if config.max_waiting == 0 {
        below
    } else {
        let (name, metrics) = (&model.card.name, &layers.queue);
        Arc::new(Queueing::new(below, config.max_waiting, name, metrics))
    };
    if model.card.migration_limit == 0 {
        return Ok(Arc::new(Whoever(below)));
    }
    let migrating = Migrating::new(below, &model.card, layers.migrations.clone());
    Ok(Arc::new(migrating))
}

/// Returns a route to the instances of a model in `role`.
///
/// # Errors
/// As [`connect`].
pub(crate) async fn pool_route(
    directory: &ModelDirectory,
    model: &LiveModel,
    role: Role,
    layers: &Layers,
    timeout: Duration,
) -> Result<Arc<dyn Route>, EngineError> {
    let mode = match layers.config.mode {
        RouterMode::Plain(mode) => mode,
        RouterMode::Kv => SelectionMode::LeastLoaded,
    };
    let name = match role {
        Role::Aggregated => model.card.name.clone(),
        Role::Prefill | Role::Decode => format!("{}.{role}", model.card.name),
    };
    let client = pool_client(directory, model, role, mode, timeout).await?;
    let client = client.with_ejections(&layers.ejections, &name);
    match layers.config.mode {
        RouterMode::Plain(_) => Ok(Arc::new(client)),
        RouterMode::Kv => selecting(directory.runtime(), model, role, &name, client, layers),
    }
}

/// Returns a client of the instances in `role`. It waits for an instance if neither [`Migrating`] nor [`Disaggregating`] does.
async fn pool_client(
    directory: &ModelDirectory,
    model: &LiveModel,
    role: Role,
    mode: SelectionMode,
    timeout: Duration,
) -> Result<GenerateClient, EngineError> {
    let client = directory.pool_client(model, role, mode, timeout).await?;
    let card = &model.card;
    let waits = card.migration_limit == 0 && !card.capabilities.can_be_apart();
    Ok(if waits { client } else { client.without_wait() })
}

/// Selects by cached prefix, load and affinity.
fn selecting(
    runtime: &Runtime,
    model: &LiveModel,
    role: Role,
    name: &str,
    client: GenerateClient,
    layers: &Layers,
) -> Result<Arc<dyn Route>, EngineError> {
    let Some(pool) = model.pools.get(&role) else {
        return Ok(Arc::new(client));
    };
    let sibling = |name: &str| {
        let sibling = pool.endpoint.sibling(name);
        let sibling = sibling.map_err(|error| EngineError::invalid_argument("endpoint", error))?;
        Ok::<_, EngineError>(runtime.endpoint(sibling))
    };
    let whole = sibling(endpoints::KV_EVENTS)?.client();
    let feed = if model.card.capabilities.kv_ranks {
        Feed::Ranks(whole, sibling(endpoints::KV_RANK_EVENTS)?.client())
    } else {
        Feed::Whole(whole)
    };
    let (config, metrics) = (layers.config.kv.clone(), &layers.selection);
    let selecting = Selecting::new(runtime, &model.card, name, client, feed, config, metrics);
    Ok(Arc::new(selecting))
}
