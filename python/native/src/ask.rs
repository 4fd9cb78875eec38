//! Calls from Python: [`Caller`] is a client of an endpoint, [`Asking`] one of its requests in progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use genset_backend_common::spelling::none_of;
use genset_backend_common::{EngineError, ErrorKind, RequestContext};
use genset_runtime::plane::{Encoded, ResponseStream};
use genset_runtime::selection::Selector;
use genset_runtime::{Client, InstanceId, SelectionMode};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::call::Call;
use crate::inbox::{Event, Inbox};

/// The most items of an answer that wait for Python.
const CREDIT: usize = 64;

/// The most times that a request is sent if instances refuse it.
const MAX_ATTEMPTS: usize = 3;

/// How long a request waits for the endpoint's first instance: a new client knows none yet.
const INSTANCE_TIME: Duration = Duration::from_secs(10);

/// Numbers Python's requests that have no parent.
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(1);

/// A client of one endpoint.
#[pyclass(frozen, module = "genset._native")]
pub(crate) struct Caller {
    pub(crate) client: Arc<Client<Encoded, Encoded>>,
    pub(crate) selectors: Selectors,
    pub(crate) inbox: Inbox,
    pub(crate) tasks: TaskTracker,
    pub(crate) handle: Handle,
}

/// A selector per mode. Each keeps its turn across this client's requests.
pub(crate) struct Selectors(Vec<(&'static str, Arc<dyn Selector>)>);

impl Selectors {
    pub(crate) fn new() -> Self {
        let all = SelectionMode::ALL.into_iter();
        Self(
            all.map(|mode| (mode.name(), Arc::from(mode.selector())))
                .collect(),
        )
    }

    fn get(&self, name: &str) -> PyResult<Arc<dyn Selector>> {
        let found = self.0.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, selector)| Arc::clone(selector))
            .ok_or_else(|| {
                let known = self.0.iter().map(|(name, _)| *name);
                PyValueError::new_err(none_of(name, known))
            })
    }
}

/// The instance that receives the request.
enum Target {
    Chosen(Arc<dyn Selector>),
    Instance(InstanceId),
}

#[pymethods]
impl Caller {
    /// How long a request waits for the endpoint's first instance.
    #[classattr]
    const INSTANCE_S: f64 = INSTANCE_TIME.as_secs_f64();

    /// The name of the model that the endpoint serves, if any, and whether its handler reads whole bodies. `None` while no instance is
    /// known.
    fn model(&self) -> Option<(Option<String>, bool)> {
        let instances = self.client.instances();
        let card = instances.first()?.card.as_ref();
        let reads_bodies = card.is_some_and(|card| card.capabilities.whole_bodies);
        Some((card.map(|card| card.name.clone()), reads_bodies))
    }

    /// The ids of the live instances, in their order.
    fn instance_ids(&self) -> Vec<u64> {
        let instances = self.client.instances();
        instances.iter().map(|record| record.instance.0).collect()
    }

    /// The user data that a model's live instances publish: ids and JSON. Leaves out instances that publish none.
    fn user_data(&self) -> Vec<(u64, String)> {
        let published = self.client.instances().into_iter().filter_map(|record| {
            let data = record.card?.user_data;
            (!data.is_null()).then(|| (record.instance.0, data.to_string()))
        });
        published.collect()
    }

    /// Waits, as operation `op`, for an instance.
    fn wait_for_instances(&self, op: u64, timeout_s: f64) -> PyResult<()> {
        let timeout = timeout_of(timeout_s)?;
        let (client, inbox) = (Arc::clone(&self.client), self.inbox.clone());
        let wait = async move {
            let done = client.wait_for_instances(timeout).await;
            inbox.put(Event::Done(op, done.map(|()| None)));
        };
        self.tasks.spawn_on(wait, &self.handle);
        Ok(())
    }

    /// Sends `request`, MessagePack, whose answer is stream `stream`, to `instance` or to one that `mode` selects. With `parent` the
    /// request has the parent's id, trace and deadline, and ends with it.
    #[pyo3(signature = (stream, request, mode, instance=None, parent=None, timeout_s=None, headers=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "one call across the border for each request"
    )]
    fn ask(
        &self,
        stream: u64,
        request: &[u8],
        mode: &str,
        instance: Option<u64>,
        parent: Option<PyRef<'_, Call>>,
        timeout_s: Option<f64>,
        headers: Option<BTreeMap<String, String>>,
    ) -> PyResult<Asking> {
        let target = match instance {
            Some(id) => Target::Instance(InstanceId(id)),
            None => Target::Chosen(self.selectors.get(mode)?),
        };
        let parent = parent.as_deref().map(|call| call.0.context().child());
        let mut ctx = parent.unwrap_or_else(|| RequestContext::new(new_id()));
        if let Some(timeout_s) = timeout_s {
            // A time that is too long for the clock never comes.
            if let Some(deadline) = Instant::now().checked_add(timeout_of(timeout_s)?) {
                ctx = ctx.with_deadline(deadline);
            }
        }
        let ctx = ctx.with_headers(headers.unwrap_or_default());
        let credit = Arc::new(Semaphore::new(CREDIT));
        let pump = Pump {
            stream,
            client: Arc::clone(&self.client),
            inbox: self.inbox.clone(),
            credit: Arc::clone(&credit),
        };
        let request = Encoded(Bytes::copy_from_slice(request));
        let task = pump.run(target, request, ctx);
        let task = AbortOnDropHandle::new(self.tasks.spawn_on(task, &self.handle));
        Ok(Asking { credit, task })
    }
}

/// The time that a caller gives as `timeout`. One that is too long to count, such as `math.inf`, is as long as there is.
fn timeout_of(seconds: f64) -> PyResult<Duration> {
    if seconds >= 0.0 {
        return Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
    }
    let problem = format!("timeout: {seconds} is no number of seconds from 0");
    Err(PyValueError::new_err(problem))
}

fn new_id() -> String {
    let number = NEXT_REQUEST.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", InstanceId::random())
}

/// Carries one answer to Python.
struct Pump {
    stream: u64,
    client: Arc<Client<Encoded, Encoded>>,
    inbox: Inbox,
    credit: Arc<Semaphore>,
}

impl Pump {
    async fn run(self, target: Target, request: Encoded, ctx: RequestContext) {
        let waiting = ctx.clone();
        let work = async {
            let items = self.call(target, request, ctx).await?;
            self.carry(items).await
        };
        let ended = tokio::select! {
            biased;
            error = waiting.over() => Err(error),
            ended = work => ended,
        };
        self.inbox.put(Event::Ended(self.stream, ended.err()));
    }

    /// If an instance is unreachable, full or shutting down, tries another one, unless the caller named it. None of them has sent an item.
    /// A draining instance may have begun the request and cut it: that counts as a refusal.
    async fn call(
        &self,
        target: Target,
        request: Encoded,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Encoded>, EngineError> {
        self.client.wait_for_instances(INSTANCE_TIME).await?;
        let selector = match target {
            Target::Instance(id) => return self.client.direct(id, request, ctx).await,
            Target::Chosen(selector) => selector,
        };
        for _ in 1..MAX_ATTEMPTS {
            let called = self.client.call(&*selector, request.clone(), ctx.clone());
            match called.await {
                Err(error) if is_refusal(&error) => {
                    tracing::debug!(request_id = ctx.id(), %error, "trying another instance");
                }
                called => return called,
            }
        }
        self.client.call(&*selector, request, ctx).await
    }

    async fn carry(&self, mut items: ResponseStream<Encoded>) -> Result<(), EngineError> {
        loop {
            // The semaphore is never closed.
            if let Ok(permit) = self.credit.acquire().await {
                permit.forget();
            }
            let Some(item) = items.next().await else {
                return Ok(());
            };
            self.inbox.put(Event::Item(self.stream, item?.0));
        }
    }
}

/// Whether a request may be sent again automatically. If its instance was lost, it may have begun, and a handler's effects need not be
/// idempotent. If a shutdown cut it, the error says so: handlers are documented to be called again then.
fn is_refusal(error: &EngineError) -> bool {
    let is_refused = matches!(
        error.kind(),
        ErrorKind::CannotConnect | ErrorKind::Overloaded | ErrorKind::EngineShutdown
    );
    is_refused && !error.is_own_shortage()
}

/// A request in progress. Dropping it, or `cancel`, also ends it at the other end.
#[pyclass(frozen, module = "genset._native")]
pub(crate) struct Asking {
    credit: Arc<Semaphore>,
    task: AbortOnDropHandle<()>,
}

#[pymethods]
impl Asking {
    /// The initial credit, in items.
    #[classattr]
    const CREDIT: usize = CREDIT;

    /// Grants credit for more items.
    fn grant(&self, items: usize) {
        self.credit.add_permits(items.min(CREDIT));
    }

    /// Ends the request. No events follow except those already in the inbox.
    fn cancel(&self) {
        self.task.abort();
    }
}
