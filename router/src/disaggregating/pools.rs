//! [`Pools`]: follows the instances of a model by role.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use genset_backend_common::{EngineError, ErrorKind, ModelCard, Role};
use genset_runtime::{LiveModel, ModelDirectory, Pool};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::connect::{Layers, pool_route};
use crate::route::Route;

/// Limit for connecting to a new pool, after which the next change is handled; handling it retries the pool.
const POOL_TIMEOUT: Duration = Duration::from_secs(5);

/// A route for each role; `None` if the role has no instance.
#[derive(Clone, Default)]
pub(crate) struct PoolSet {
    pub(crate) aggregated: Option<Arc<dyn Route>>,
    pub(crate) prefill: Option<Arc<dyn Route>>,
    pub(crate) decode: Option<Arc<dyn Route>>,
}

impl PoolSet {
    fn set(&mut self, role: Role, route: Option<Arc<dyn Route>>) {
        match role {
            Role::Aggregated => self.aggregated = route,
            Role::Prefill => self.prefill = route,
            Role::Decode => self.decode = route,
        }
    }

    /// Returns whether there is a prefill or decode instance.
    pub(crate) fn is_apart(&self) -> bool {
        self.prefill.is_some() || self.decode.is_some()
    }

    /// Returns whether some instance can serve a whole request.
    fn is_servable(&self) -> bool {
        self.aggregated.is_some() || self.decode.is_some()
    }
}

/// Tracks the pools of a model.
pub(crate) struct Pools {
    now: watch::Receiver<Arc<PoolSet>>,
    _follow: Option<AbortOnDropHandle<()>>,
}

impl Pools {
    /// Returns pools that never change.
    #[cfg(test)]
    pub(crate) fn fixed(set: PoolSet) -> Self {
        Self {
            now: watch::channel(Arc::new(set)).1,
            _follow: None,
        }
    }

    /// Follows the pools of `model`, and waits until a request can be served.
    ///
    /// # Errors
    /// `Unavailable` when none can within `timeout`.
    pub(crate) async fn follow(
        directory: &ModelDirectory,
        model: &LiveModel,
        layers: &Layers,
        timeout: Duration,
    ) -> Result<Self, EngineError> {
        let (sender, mut now) = watch::channel(Arc::new(PoolSet::default()));
        let follower = Follower {
            directory: directory.clone(),
            card: model.card.clone(),
            layers: layers.clone(),
            known: BTreeMap::new(),
            set: PoolSet::default(),
        };
        let follow = directory.runtime().spawn(follower.run(sender));
        let servable = now.wait_for(|set| set.is_servable());
        if !matches!(tokio::time::timeout(timeout, servable).await, Ok(Ok(_))) {
            let message = format!(
                "no instance that can serve {} appeared within {} s",
                model.card.name,
                timeout.as_secs_f64()
            );
            return Err(EngineError::new(ErrorKind::Unavailable, message));
        }
        Ok(Self {
            now,
            _follow: Some(follow),
        })
    }

    pub(crate) fn now(&self) -> Arc<PoolSet> {
        Arc::clone(&self.now.borrow())
    }
}

/// Maintains a route for each pool.
struct Follower {
    directory: ModelDirectory,
    card: ModelCard,
    layers: Layers,
    /// The endpoints of the pools in `set`, by role.
    known: BTreeMap<Role, Pool>,
    set: PoolSet,
}

impl Follower {
    async fn run(mut self, sender: watch::Sender<Arc<PoolSet>>) {
        let mut models = self.directory.subscribe();
        loop {
            let model = models.borrow_and_update().get(&self.card.name).cloned();
            // If discovery now prefers another card for the name, that is another model with its own connection. Requests in
            // flight stay with this one.
            let model = model.as_ref().and_then(|model| model.by_card(&self.card));
            let is_whole = self.update(model, &sender).await;
            let changed = models.changed();
            if is_whole {
                if changed.await.is_err() {
                    return;
                }
                continue;
            }
            // Retry a pool that could not be reached, even without a change.
            if let Ok(Err(_)) = tokio::time::timeout(POOL_TIMEOUT, changed).await {
                return;
            }
        }
    }

    /// Applies the current directory. Returns false if a pool could not be reached yet.
    async fn update(
        &mut self,
        model: Option<&LiveModel>,
        sender: &watch::Sender<Arc<PoolSet>>,
    ) -> bool {
        let mut reaching = Vec::new();
        for role in Role::ALL {
            let pool = model.and_then(|model| model.pools.get(&role));
            let known = self.known.get(&role);
            if known.map(|known| &known.endpoint) != pool.map(|pool| &pool.endpoint) {
                reaching.push(self.reach(role, model.zip(pool)));
            }
        }
        // All at once: a pool that hangs delays the others no longer than its limit.
        let reached = join_all(reaching).await;
        let mut is_whole = true;
        let is_changed = !reached.is_empty();
        for (role, pool, route) in reached {
            is_whole &= route.is_some() == pool.is_some();
            match pool.filter(|_| route.is_some()) {
                Some(pool) => drop(self.known.insert(role, pool.clone())),
                None => drop(self.known.remove(&role)),
            }
            tracing::info!(
                model = self.card.name,
                %role,
                instances = pool.map_or(0, |pool| pool.instances.len()),
                "pool changed"
            );
            self.set.set(role, route);
        }
        if is_changed {
            sender.send_replace(Arc::new(self.set.clone()));
        }
        is_whole
    }

    /// Connects to the instances in a role, if it has any.
    async fn reach<'a>(
        &self,
        role: Role,
        pool: Option<(&LiveModel, &'a Pool)>,
    ) -> (Role, Option<&'a Pool>, Option<Arc<dyn Route>>) {
        let Some((model, pool)) = pool else {
            return (role, None, None);
        };
        let route = pool_route(&self.directory, model, role, &self.layers, POOL_TIMEOUT);
        let route = route.await.inspect_err(|error| {
            tracing::debug!(model = self.card.name, %role, %error, "a pool cannot be reached");
        });
        (role, Some(pool), route.ok())
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::{Capabilities, EngineConfig, MetricsRegistry};
    use genset_runtime::discovery::MemoryDiscovery;
    use genset_runtime::plane::MemoryPlane;
    use genset_runtime::{InstanceId, Runtime};
    use tokio::time::Instant;

    use super::*;
    use crate::config::RouterConfig;

    #[tokio::test(start_paused = true)]
    async fn pools_that_hang_are_waited_for_at_once() {
        let discovery = Arc::new(MemoryDiscovery::new());
        let runtime = Runtime::new(discovery, Arc::new(MemoryPlane::new()));
        let can = Capabilities::tokens().with_roles(Role::ALL);
        let config = EngineConfig::new("m", 64).with_capabilities(can);
        let unlisted = |role: Role| {
            let endpoint = format!("test.{role}.generate").parse().unwrap();
            let instances = vec![InstanceId(1)];
            (
                role,
                Pool {
                    endpoint,
                    instances,
                },
            )
        };
        let model = LiveModel {
            card: ModelCard::from_config(&config),
            pools: Role::ALL.map(unlisted).into(),
            adapters: BTreeMap::new(),
            left_out: Vec::new(),
            others: Vec::new(),
        };
        let mut follower = Follower {
            directory: ModelDirectory::follow(&runtime),
            card: model.card.clone(),
            layers: Layers::register(&MetricsRegistry::default(), RouterConfig::default()),
            known: BTreeMap::new(),
            set: PoolSet::default(),
        };
        let (sender, _now) = watch::channel(Arc::new(PoolSet::default()));
        let since = Instant::now();
        assert!(!follower.update(Some(&model), &sender).await);
        assert_eq!(since.elapsed().as_secs(), POOL_TIMEOUT.as_secs());
    }
}
