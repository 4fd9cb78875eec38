//! [`Frontends`]: they send requests to the workers. Each has its own directory, layers and metrics, like a separate process,
//! and knows about the others only what workers publish.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ports::Generate, random::mix};
use genset_runtime::{ModelDirectory, Runtime};
use parking_lot::Mutex;

use crate::fleet::Fleet;
use crate::policy::Policy;
use crate::random::Random;
use crate::run::Plan;

/// The random stream that distributes requests to frontends.
const DEALING: u64 = 3;

/// How long a restarting frontend looks for a worker.
const START_TIME: Duration = Duration::from_secs(1);

/// One started frontend.
pub(crate) struct Frontend {
    pub(crate) layers: Arc<dyn Generate>,
    _directory: ModelDirectory,
}

/// The frontends.
pub(crate) struct Frontends {
    /// The frontends' runtimes, one per start; they share the workers' discovery and request plane.
    runtimes: Mutex<Vec<Runtime>>,
    serving: Mutex<Vec<Arc<Frontend>>>,
    fleet: Arc<Fleet>,
    policy: Policy,
    /// The seed for distributing requests.
    deal: u64,
    /// The configuration of every frontend.
    plan: Plan,
}

impl Frontends {
    /// Starts the plan's frontends; each knows every worker.
    pub(crate) async fn start(
        policy: Policy,
        plan: &Plan,
        fleet: &Arc<Fleet>,
    ) -> Result<Self, EngineError> {
        let frontends = Self {
            runtimes: Mutex::default(),
            serving: Mutex::default(),
            fleet: Arc::clone(fleet),
            policy,
            deal: Random::new(plan.seed, DEALING).next(),
            plan: plan.clone(),
        };
        for number in 0..plan.frontends {
            let frontend = frontends.start_one(number, plan.workers).await?;
            frontends.serving.lock().push(Arc::new(frontend));
        }
        Ok(frontends)
    }

    /// Starts one once `workers` workers are listed.
    async fn start_one(&self, number: usize, workers: usize) -> Result<Frontend, EngineError> {
        let runtime = self.fleet.runtime_beside();
        self.runtimes.lock().push(runtime.clone());
        let directory = ModelDirectory::follow(&runtime);
        let model = self.fleet.model(&directory, workers).await?;
        // The first one has the same seed as the only frontend of a fleet.
        let seed = self.plan.seed ^ mix(u64::try_from(number).unwrap_or(0));
        let layers = (self.policy).connect(&self.plan, seed, &self.fleet, &directory, &model);
        Ok(Frontend {
            layers: layers.await?,
            _directory: directory,
        })
    }

    /// Selects a frontend for a request at random, like a load balancer without knowledge.
    pub(crate) fn of(&self, session: usize, turn: usize) -> Option<Arc<Frontend>> {
        let number = |number: usize| u64::try_from(number).unwrap_or(0);
        let mut random = Random::new(self.deal ^ mix(number(session)), number(turn));
        let serving = self.serving.lock();
        let place = random.below(number(serving.len()));
        serving.get(usize::try_from(place).ok()?).cloned()
    }

    /// Replaces a frontend by one without any state; the old one finishes its requests. If no worker can be found, it is not
    /// replaced.
    pub(crate) async fn restart(&self, number: usize) {
        let started = tokio::time::timeout(START_TIME, self.start_one(number, 1)).await;
        if let Ok(Ok(frontend)) = started
            && let Some(serving) = self.serving.lock().get_mut(number)
        {
            *serving = Arc::new(frontend);
        }
    }

    /// Stops all of them.
    pub(crate) async fn stop(&self) {
        self.serving.lock().clear();
        let runtimes = std::mem::take(&mut *self.runtimes.lock());
        for runtime in runtimes {
            runtime.shutdown().await;
        }
    }
}
