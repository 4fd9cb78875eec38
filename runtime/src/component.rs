//! The component model: [`Runtime`], and from it namespaces, components and endpoints.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use genset_backend_common::{EngineError, MetricsRegistry};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::client::Client;
use crate::discovery::{Discovery, InstanceRecord, Lease, MemoryDiscovery, Records, prefix_of};
use crate::instances::{Accepts, Instances};
use crate::names::{EndpointName, InstanceId, NameError};
use crate::plane::{ErasedHandler, Handler, MemoryPlane, Payload, RequestPlane, Served};
use crate::vital::VitalRuntime;

/// How long a shutdown waits for cancelled tasks. Nothing can end a task that blocks its thread.
const TASK_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Discovery, request plane, metrics and tasks of one process. Clones share state.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use futures_util::{StreamExt, stream};
/// use genset_backend_common::{EngineError, RequestContext, async_trait};
/// use genset_runtime::{Runtime, plane::{Handler, ResponseStream}};
///
/// struct Upper;
///
/// #[async_trait]
/// impl Handler<String, String> for Upper {
///     async fn handle(&self, text: String, _ctx: RequestContext) -> Result<ResponseStream<String>, EngineError> {
///         Ok(Box::pin(stream::iter([Ok(text.to_uppercase())])))
///     }
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let runtime = Runtime::in_process();
/// let endpoint = runtime.namespace("demo")?.component("text")?.endpoint("upper")?;
/// let serving = endpoint.serve(Arc::new(Upper)).await?;
/// serving.list(None).await?;
///
/// let client = endpoint.client::<String, String>();
/// client.wait_for_instances(Duration::from_secs(1)).await?;
/// let mut answer = client.random("hello".into(), RequestContext::new("1")).await?;
/// assert_eq!(answer.next().await.unwrap()?, "HELLO");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Runtime {
    shared: Arc<Shared>,
}

struct Shared {
    discovery: Arc<dyn Discovery>,
    plane: Arc<dyn RequestPlane>,
    metrics: MetricsRegistry,
    records: Records,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    vital: Option<VitalRuntime>,
    /// The listed endpoints; several may belong to one instance.
    listed: Mutex<HashSet<(EndpointName, InstanceId)>>,
}

impl Runtime {
    /// A runtime on the given discovery and request plane.
    #[must_use]
    pub fn new(discovery: Arc<dyn Discovery>, plane: Arc<dyn RequestPlane>) -> Self {
        Self::on(None, discovery, plane, MetricsRegistry::default())
    }

    /// Like [`Self::new`], with the registry in which discovery and the plane already record metrics, and the runtime that
    /// follows discovery and serves the health endpoints; `None` for the caller's runtime.
    #[must_use]
    pub fn on(
        vital: Option<VitalRuntime>,
        discovery: Arc<dyn Discovery>,
        plane: Arc<dyn RequestPlane>,
        metrics: MetricsRegistry,
    ) -> Self {
        metrics.register(
            "genset_discovery_outages",
            "Watches and leases of this process that cannot reach discovery",
            discovery.outages(),
        );
        let shared = Shared {
            discovery,
            plane,
            records: Records::register(&metrics),
            metrics,
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            vital,
            listed: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// A runtime inside one process, with no socket and no external server.
    #[must_use]
    pub fn in_process() -> Self {
        Self::new(
            Arc::new(MemoryDiscovery::new()),
            Arc::new(MemoryPlane::new()),
        )
    }

    /// A namespace: a pipeline, usually a model.
    ///
    /// # Errors
    /// [`NameError`] if `name` is not a valid name.
    pub fn namespace(&self, name: &str) -> Result<Namespace, NameError> {
        let name = EndpointName::try_new(name, "x", "x")?;
        Ok(Namespace {
            runtime: self.clone(),
            name,
        })
    }

    /// An endpoint by its full name.
    #[must_use]
    pub fn endpoint(&self, name: EndpointName) -> Endpoint {
        Endpoint {
            runtime: self.clone(),
            name,
        }
    }

    /// The process's metrics.
    #[must_use]
    pub fn metrics(&self) -> &MetricsRegistry {
        &self.shared.metrics
    }

    /// The process's discovery.
    #[must_use]
    pub fn discovery(&self) -> &Arc<dyn Discovery> {
        &self.shared.discovery
    }

    pub(crate) fn records(&self) -> &Records {
        &self.shared.records
    }

    pub(crate) fn plane(&self) -> &Arc<dyn RequestPlane> {
        &self.shared.plane
    }

    /// Runs work that needs the runtime that [`Self::spawn`] uses, such as listening.
    pub(crate) async fn run_vital<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, EngineError> {
        match &self.shared.vital {
            Some(vital) => vital.run(work).await,
            None => work.await,
        }
    }

    /// Starts a task that the runtime owns. It is dropped at [`shutdown`](Self::shutdown) or with the handle. It runs on a runtime
    /// that no request may delay, so it must not do a request's work.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
        let shutdown = self.shared.shutdown.clone();
        let task = async move {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => {}
                () = task => {}
            }
        };
        let tasks = &self.shared.tasks;
        AbortOnDropHandle::new(match &self.shared.vital {
            Some(vital) => tasks.spawn_on(task, vital.handle()),
            None => tasks.spawn(task),
        })
    }

    /// Starts a short task without a handle. It is dropped at [`shutdown`](Self::shutdown), and where there is no runtime to run it:
    /// destructors call this, and may run outside of the caller's.
    pub(crate) fn spawn_detached(&self, task: impl Future<Output = ()> + Send + 'static) {
        if self.shared.vital.is_none() && Handle::try_current().is_err() {
            return;
        }
        // Detached, since dropping the handle would abort the task.
        drop(self.spawn(task).detach());
    }

    /// Ends every task of the runtime and its request plane, and waits for them. First writes the responses in progress to
    /// their end, within a time limit. Does not wait long for a task that an engine blocks.
    ///
    /// # Cancel safety
    /// Tasks end even if the future is dropped.
    pub async fn shutdown(&self) {
        self.shared.shutdown.cancel();
        self.shared.plane.shutdown().await;
        until_ended(&self.shared.tasks, "runtime").await;
    }

    /// The number of live tasks of the runtime.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.shared.tasks.len()
    }
}

/// Waits until all cancelled tasks have ended, except those that block their threads.
pub(crate) async fn until_ended(tasks: &TaskTracker, whose: &'static str) {
    tasks.close();
    let ended = tokio::time::timeout(TASK_END_TIMEOUT, tasks.wait()).await;
    if ended.is_err() {
        tracing::error!(
            tasks = tasks.len(),
            whose,
            "tasks block their threads and cannot be ended"
        );
    }
}

genset_backend_common::debug_as!(|it| Runtime {
    tasks: it.tasks(),
    ..
});

/// A namespace of a runtime.
#[derive(Debug, Clone)]
pub struct Namespace {
    runtime: Runtime,
    name: EndpointName,
}

impl Namespace {
    /// A component: a load-balanced service of the pipeline.
    ///
    /// # Errors
    /// [`NameError`] if `name` is not a valid name.
    pub fn component(&self, name: &str) -> Result<Component, NameError> {
        let name = EndpointName::try_new(&self.name.namespace, name, "x")?;
        Ok(Component {
            runtime: self.runtime.clone(),
            name,
        })
    }
}

/// A component of a namespace.
#[derive(Debug, Clone)]
pub struct Component {
    runtime: Runtime,
    name: EndpointName,
}

impl Component {
    /// An endpoint: one function of the component.
    ///
    /// # Errors
    /// [`NameError`] if `name` is not a valid name.
    pub fn endpoint(&self, name: &str) -> Result<Endpoint, NameError> {
        Ok(self.runtime.endpoint(self.name.sibling(name)?))
    }
}

/// An endpoint of a component.
#[derive(Debug, Clone)]
pub struct Endpoint {
    runtime: Runtime,
    name: EndpointName,
}

impl Endpoint {
    /// The full name.
    #[must_use]
    pub fn name(&self) -> &EndpointName {
        &self.name
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Serves `handler` as a new instance, which is reachable but not yet listed.
    ///
    /// # Errors
    /// `Unavailable` if the request plane cannot serve.
    pub async fn serve<Req: Payload, Resp: Payload>(
        &self,
        handler: Arc<dyn Handler<Req, Resp>>,
    ) -> Result<Serving, EngineError> {
        self.serve_as(InstanceId::random(), handler).await
    }

    /// Like [`Self::serve`], under the id that the caller gives.
    ///
    /// # Errors
    /// Same as [`Self::serve`]; `InvalidArgument` if the instance already serves the endpoint.
    pub async fn serve_as<Req: Payload, Resp: Payload>(
        &self,
        instance: InstanceId,
        handler: Arc<dyn Handler<Req, Resp>>,
    ) -> Result<Serving, EngineError> {
        let handler = Arc::new(ErasedHandler::new(handler));
        let served = self
            .runtime
            .plane()
            .serve(&self.name, instance, handler)
            .await?;
        let lease = tokio::sync::Mutex::new(None);
        Ok(Serving {
            endpoint: self.clone(),
            instance,
            served,
            started_ms: now_ms(),
            lease,
        })
    }

    /// A client of the endpoint's instances. It follows discovery until it is dropped.
    #[must_use]
    pub fn client<Req: Payload, Resp: Payload>(&self) -> Client<Req, Resp> {
        self.client_of(Arc::new(|_| true))
    }

    /// Like [`Self::client`], but only for instances whose records `accepts` accepts.
    pub(crate) fn client_of<Req: Payload, Resp: Payload>(
        &self,
        accepts: Accepts,
    ) -> Client<Req, Resp> {
        let records = self.runtime.records().clone();
        let instances = Instances::new(accepts, records, Arc::clone(self.runtime.plane()));
        let discovery = Arc::clone(self.runtime.discovery());
        let follow = self
            .runtime
            .spawn(instances.clone().follow(discovery, prefix_of(&self.name)));
        Client::new(self.clone(), instances, follow)
    }
}

/// Milliseconds since the Unix epoch.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0))
}

/// An instance of an endpoint: reachable, and listed or not. Dropping it unlists it and ends the service.
pub struct Serving {
    endpoint: Endpoint,
    instance: InstanceId,
    served: Served,
    started_ms: u64,
    lease: tokio::sync::Mutex<Option<Arc<dyn Lease>>>,
}

impl Serving {
    /// The instance's id.
    #[must_use]
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// The record for discovery.
    #[must_use]
    pub fn record(&self, card: Option<genset_backend_common::ModelCard>) -> InstanceRecord {
        InstanceRecord {
            endpoint: self.endpoint.name.clone(),
            instance: self.instance,
            address: self.served.address.clone(),
            card,
            started_ms: self.started_ms,
        }
    }

    /// Lists the instance under a new lease, so that clients find it. Listing it again refreshes it.
    ///
    /// # Errors
    /// `Unavailable` when discovery cannot be reached.
    pub async fn list(
        &self,
        card: Option<genset_backend_common::ModelCard>,
    ) -> Result<(), EngineError> {
        let entry = self.record(card).to_entry()?;
        // Locked until it is listed: who unlists it meanwhile must find the lease.
        let mut lease = self.lease.lock().await;
        let new_lease: Arc<dyn Lease> = Arc::from(self.endpoint.runtime.discovery().lease().await?);
        new_lease.put(entry).await?;
        *lease = Some(new_lease);
        self.remember();
        Ok(())
    }

    /// Records that the instance is listed, until it is forgotten or dropped.
    pub(crate) fn remember(&self) {
        let key = (self.endpoint.name.clone(), self.instance);
        self.endpoint.runtime.shared.listed.lock().insert(key);
    }

    /// Records that the endpoint is no longer listed. Returns whether the instance has no other listed endpoint.
    pub(crate) fn forget(&self) -> bool {
        let mut listed = self.endpoint.runtime.shared.listed.lock();
        listed.remove(&(self.endpoint.name.clone(), self.instance));
        !listed.iter().any(|(_, other)| *other == self.instance)
    }

    /// Unlists the endpoint; it stays reachable. If it is the instance's last one, connected clients are first notified that the
    /// instance leaves.
    ///
    /// # Errors
    /// `Unavailable` if discovery cannot be reached; the lease is released anyway.
    pub async fn unlist(&self) -> Result<(), EngineError> {
        let lease = self.lease.lock().await.take();
        // Before the discovery call, which may be slow.
        if self.forget() {
            self.endpoint.runtime.plane().leaving(self.instance);
        }
        match lease {
            Some(lease) => lease.remove(&self.record(None).key()).await,
            None => Ok(()),
        }
    }

    /// Waits until discovery loses the instance while it is listed.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn lost(&self) {
        let lease = self.lease.lock().await.clone();
        match lease {
            Some(lease) => lease.lost().await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.forget();
    }
}

genset_backend_common::debug_as!(|it| Serving {
    endpoint: it.endpoint.name,
    instance: it.instance,
    ..
});

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use futures_util::{future, stream};
    use genset_backend_common::RequestContext;

    use super::*;
    use crate::discovery::gated::GatedDiscovery;
    use crate::plane::ResponseStream;

    struct Empty;

    #[async_trait]
    impl Handler<(), ()> for Empty {
        async fn handle(
            &self,
            (): (),
            _ctx: RequestContext,
        ) -> Result<ResponseStream<()>, EngineError> {
            Ok(Box::pin(stream::empty()))
        }
    }

    #[tokio::test]
    async fn an_endpoint_that_is_unlisted_while_it_is_being_listed_does_not_stay_listed() {
        let discovery = GatedDiscovery::new();
        let plane = Arc::new(MemoryPlane::new());
        let runtime = Runtime::new(Arc::new(discovery.clone()), plane);
        let endpoint = runtime.endpoint(EndpointName::default());
        let serving = endpoint.serve(Arc::new(Empty)).await.unwrap();
        let open = async { discovery.open() };
        let all = future::join3(serving.list(None), serving.unlist(), open);
        let (listed, unlisted, ()) = all.await;
        listed.unwrap();
        unlisted.unwrap();
        assert!(discovery.get("").await.unwrap().is_empty());
        assert!(runtime.shared.listed.lock().is_empty());
    }

    #[test]
    fn a_detached_task_is_dropped_where_nothing_runs_it() {
        let runtime = Runtime::in_process();
        runtime.spawn_detached(async {});
        assert_eq!(runtime.tasks(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_cannot_be_ended_keeps_no_shutdown() {
        let runtime = Runtime::in_process();
        let blocked = runtime.shared.tasks.token();
        runtime.shutdown().await;
        assert_eq!(runtime.tasks(), 1);
        drop(blocked);
        runtime.shutdown().await;
        assert_eq!(runtime.tasks(), 0);
    }
}
