//! [`Pools`]: the instances of a model by role, as they come and go.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind, ModelCard, Role};
use genset_runtime::{LiveModel, ModelDirectory, Pool};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::config::RouterConfig;
use crate::connect::pool_route;
use crate::kv::RouterMetrics;
use crate::route::Route;

/// How long a pool that is new may take to be reachable before the next change is looked at; the next one tries again.
const POOL_TIMEOUT: Duration = Duration::from_secs(5);

/// The ways to the instances of each role; `None` where there is no instance.
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

    /// Whether there is an instance that does a part alone.
    pub(crate) fn is_apart(&self) -> bool {
        self.prefill.is_some() || self.decode.is_some()
    }

    /// Whether there is an instance that a whole request can be sent to.
    fn is_servable(&self) -> bool {
        self.aggregated.is_some() || self.decode.is_some()
    }
}

/// Follows the pools of a model.
pub(crate) struct Pools {
    now: watch::Receiver<Arc<PoolSet>>,
    _follow: Option<AbortOnDropHandle<()>>,
}

impl Pools {
    /// Pools that stay as they are.
    #[cfg(test)]
    pub(crate) fn fixed(set: PoolSet) -> Self {
        Self {
            now: watch::channel(Arc::new(set)).1,
            _follow: None,
        }
    }

    /// Follows the pools of `model`, and waits until a request could be served.
    ///
    /// # Errors
    /// `Unavailable` when none could be within `timeout`.
    pub(crate) async fn follow(
        directory: &ModelDirectory,
        model: &LiveModel,
        config: &RouterConfig,
        metrics: &RouterMetrics,
        timeout: Duration,
    ) -> Result<Self, EngineError> {
        let (sender, mut now) = watch::channel(Arc::new(PoolSet::default()));
        let follower = Follower {
            directory: directory.clone(),
            card: model.card.clone(),
            config: config.clone(),
            metrics: metrics.clone(),
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

    /// The pools of this moment.
    pub(crate) fn now(&self) -> Arc<PoolSet> {
        Arc::clone(&self.now.borrow())
    }
}

/// Keeps a way to each pool that there is.
struct Follower {
    directory: ModelDirectory,
    card: ModelCard,
    config: RouterConfig,
    metrics: RouterMetrics,
    /// The endpoints of the pools in `set`, by role.
    known: BTreeMap<Role, Pool>,
    set: PoolSet,
}

impl Follower {
    async fn run(mut self, sender: watch::Sender<Arc<PoolSet>>) {
        let mut models = self.directory.subscribe();
        loop {
            let model = models.borrow_and_update().get(&self.card.name).cloned();
            // Where another card of the name is preferred, that is another model, which is connected anew; what began by this one
            // goes on by it.
            let model = model.as_ref().and_then(|model| model.by_card(&self.card));
            let is_whole = self.update(model, &sender).await;
            let changed = models.changed();
            if is_whole {
                if changed.await.is_err() {
                    return;
                }
                continue;
            }
            // A pool that was not reached is tried again, also where nothing changes.
            if let Ok(Err(_)) = tokio::time::timeout(POOL_TIMEOUT, changed).await {
                return;
            }
        }
    }

    /// Takes in what is there now. False where a pool could not be reached yet.
    async fn update(
        &mut self,
        model: Option<&LiveModel>,
        sender: &watch::Sender<Arc<PoolSet>>,
    ) -> bool {
        let mut is_whole = true;
        let mut is_changed = false;
        for role in Role::ALL {
            let pool = model.and_then(|model| model.pools.get(&role));
            let known = self.known.get(&role);
            if known.map(|known| &known.endpoint) == pool.map(|pool| &pool.endpoint) {
                continue;
            }
            let route = match model.zip(pool) {
                Some((model, _)) => self.reach(model, role).await,
                None => None,
            };
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
            is_changed = true;
        }
        if is_changed {
            sender.send_replace(Arc::new(self.set.clone()));
        }
        is_whole
    }

    /// A way to the instances of a role.
    async fn reach(&self, model: &LiveModel, role: Role) -> Option<Arc<dyn Route>> {
        let route = pool_route(
            &self.directory,
            model,
            role,
            &self.config,
            &self.metrics,
            POOL_TIMEOUT,
        );
        match route.await {
            Ok(route) => Some(route),
            Err(error) => {
                tracing::debug!(model = self.card.name, %role, %error, "a pool cannot be reached");
                None
            }
        }
    }
}
