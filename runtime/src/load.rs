//! The load that workers publish. [`LoadClient`] asks for it once, for operators; clients that select by load follow it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::{EngineError, ErrorKind, RequestContext, Role, handles::Load};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::client::Client;
use crate::component::Runtime;
use crate::discovery::InstanceRecord;
use crate::instances::Instances;
use crate::models::LiveModel;
use crate::names::{EndpointName, InstanceId};
use crate::plane::Payload;
use crate::registrar::endpoints;

/// Pause before resubscribing to a stream that ended.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(500);

/// How long a worker may take to report its load.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long discovery of an endpoint's workers continues after a call, so that the next call finds them at once.
const KEPT_TIME: Duration = Duration::from_secs(60);

/// Asks workers for their load. Clones share state.
#[derive(Debug, Clone)]
pub struct LoadClient {
    runtime: Runtime,
    clients: Arc<Mutex<HashMap<EndpointName, Asked>>>,
}

/// The client of an endpoint, and its last use.
#[derive(Debug)]
struct Asked {
    client: Arc<Client<(), Load>>,
    last: Instant,
}

/// A worker and its load.
#[derive(Debug)]
pub struct WorkerLoad {
    /// The worker.
    pub worker: InstanceId,
    /// Its role.
    pub role: Role,
    /// Its load, or why it reported none.
    pub load: Result<Load, EngineError>,
}

impl LoadClient {
    /// Creates a client on the runtime's request plane.
    #[must_use]
    pub fn new(runtime: &Runtime) -> Self {
        Self {
            runtime: runtime.clone(),
            clients: Arc::default(),
        }
    }

    /// Asks all workers of a model concurrently. Returns their loads within a second, ordered by role and id.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn of_model(&self, model: &LiveModel) -> Vec<WorkerLoad> {
        let mut workers = Vec::new();
        for (role, pool) in &model.pools {
            let ids = pool.instances.iter();
            workers.extend(ids.map(|worker| (*role, pool.endpoint.clone(), *worker)));
        }
        let asked = workers
            .into_iter()
            .map(|(role, generate, worker)| async move {
                let load = self.of_worker(&generate, worker).await;
                WorkerLoad { worker, role, load }
            });
        join_all(asked).await
    }

    /// Asks one worker that serves the endpoint `generate`.
    ///
    /// # Errors
    /// `NotFound` or `Unavailable` if there is no such worker; `Unavailable` if it reports no load within a second; otherwise
    /// the error of the call.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn of_worker(
        &self,
        generate: &EndpointName,
        worker: InstanceId,
    ) -> Result<Load, EngineError> {
        let client = self.client(generate.sibling(endpoints::LOAD)?);
        let none = || {
            let message = "the worker did not report its load in time";
            EngineError::new(ErrorKind::Unavailable, message)
        };
        let first = async {
            client.wait_for_instances(ANSWER_TIMEOUT).await?;
            let ctx = RequestContext::new("load");
            let mut loads = client.direct(worker, (), ctx).await?;
            loads.next().await.unwrap_or_else(|| Err(none()))
        };
        timeout(ANSWER_TIMEOUT, first)
            .await
            .unwrap_or_else(|_| Err(none()))
    }

    /// The client of the `load` endpoint `name`. Drops clients that were not used for [`KEPT_TIME`].
    fn client(&self, name: EndpointName) -> Arc<Client<(), Load>> {
        let now = Instant::now();
        let mut clients = self.clients.lock();
        clients.retain(|_, asked| now.duration_since(asked.last) < KEPT_TIME);
        let asked = clients.entry(name).or_insert_with_key(|name| Asked {
            client: Arc::new(self.runtime.endpoint(name.clone()).client()),
            last: now,
        });
        asked.last = now;
        Arc::clone(&asked.client)
    }
}

/// Passes on every item of an endless stream of `instance`, forever, and `None` whenever the call fails or its stream ends.
pub(crate) async fn follow_items<T: Payload>(
    client: Arc<Client<(), T>>,
    instance: InstanceId,
    request_id: &'static str,
    mut pass_on: impl FnMut(Option<T>) + Send,
) {
    loop {
        let ctx = RequestContext::new(request_id);
        if let Ok(mut items) = client.direct(instance, (), ctx).await {
            while let Some(Ok(item)) = items.next().await {
                pass_on(Some(item));
            }
        }
        pass_on(None);
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

/// Keeps the published load of every instance up to date, as instances come and go.
pub(crate) async fn follow_loads(
    runtime: Runtime,
    instances: Instances,
    client: Arc<Client<(), Load>>,
) {
    let all = instances.clone();
    for_each_instance(runtime, instances, move |record| {
        let id = record.instance;
        let all = all.clone();
        let publish = move |load: Option<Load>| {
            if let Some(instance) = all.get(id) {
                instance.publish(load);
            }
        };
        follow_items(Arc::clone(&client), id, "load", publish)
    })
    .await;
}

/// Runs a task for every live instance, and drops it when the instance goes away.
pub(crate) async fn for_each_instance<F>(
    runtime: Runtime,
    instances: Instances,
    task: impl Fn(&InstanceRecord) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut live = instances.subscribe();
    let mut tasks: HashMap<InstanceId, AbortOnDropHandle<()>> = HashMap::new();
    loop {
        let now = live.borrow_and_update().clone();
        tasks.retain(|id, _| now.contains_key(id));
        for (id, instance) in now.iter() {
            tasks
                .entry(*id)
                .or_insert_with(|| runtime.spawn(task(&instance.record)));
        }
        // Otherwise the next change would be made to a copy of the whole map.
        drop(now);
        if live.changed().await.is_err() {
            return;
        }
    }
}
