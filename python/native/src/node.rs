//! [`Node`]: a Python program's place in the fleet: its runtime, what it serves, and its event loop's inbox.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Parser;
use genset_backend_common::{EngineError, log_limit::OncePerMinute};
use genset_runtime::plane::{Encoded, Handler};
use genset_runtime::{
    EndpointName, InstanceId, Logging, NetworkArgs, Reach, Runtime, Serving, StatusArgs,
    init_logging,
};
use genset_wire::decode_payload;
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::ask::{Caller, Selectors};
use crate::call::{Call, CallHandler};
use crate::engine::Published;
use crate::inbox::{Event, Inbox};
use crate::model::{self, ModelSpec};
use crate::served::{EarlyStops, Reservation, Served, ServedByNumber};
use crate::status::StatusPort;

/// Network threads. Engines compute elsewhere, and these threads never run Python.
const THREADS: usize = 2;

/// The pause between two attempts to list what discovery has lost.
const RELIST_PAUSE: Duration = Duration::from_secs(1);

/// The log and the export of spans, for the lifetime of the program.
static LOGGING: Mutex<Option<Logging>> = Mutex::new(None);

/// Sets up the log on standard error. Call it once per process.
#[pyfunction]
pub(crate) fn start_logging(verbose: u8) {
    LOGGING
        .lock()
        .get_or_insert_with(|| init_logging(verbose, false));
}

/// Sends the remaining spans.
#[pyfunction]
pub(crate) fn end_logging(py: Python<'_>) {
    py.detach(|| drop(LOGGING.lock().take()));
}

#[derive(Parser)]
#[command(name = "genset", no_binary_name = true)]
struct Flags {
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    status: StatusArgs,
}

/// A runtime, and the flags it was made from.
struct Connected {
    runtime: Runtime,
    flags: Flags,
}

/// A Python program in the fleet.
#[pyclass(frozen, module = "genset._native")]
pub(crate) struct Node {
    threads: Mutex<Option<tokio::runtime::Runtime>>,
    handle: tokio::runtime::Handle,
    tasks: TaskTracker,
    inbox: Inbox,
    connected: Arc<OnceLock<Connected>>,
    served: ServedByNumber,
    status: Arc<tokio::sync::Mutex<StatusPort>>,
}

#[pymethods]
impl Node {
    #[new]
    fn open() -> PyResult<Self> {
        let os_error = |error: std::io::Error| PyOSError::new_err(error.to_string());
        let inbox = Inbox::open().map_err(os_error)?;
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("genset-network")
            .enable_all()
            .build()
            .map_err(os_error)?;
        Ok(Self {
            handle: threads.handle().clone(),
            threads: Mutex::new(Some(threads)),
            tasks: TaskTracker::new(),
            inbox,
            connected: Arc::default(),
            served: Arc::default(),
            status: Arc::default(),
        })
    }

    /// The file descriptor that becomes readable when there are events.
    #[getter]
    fn fd(&self) -> RawFd {
        self.inbox.fd()
    }

    /// The events since the last call.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.inbox.take_for(py)
    }

    /// Writes items of many answers.
    #[staticmethod]
    fn send(items: Vec<(PyRef<'_, Call>, Bound<'_, PyBytes>)>) -> PyResult<()> {
        items
            .iter()
            .try_for_each(|(call, item)| call.send(item.as_bytes()))
    }

    /// Joins the fleet as operation `op`, as `flags` and the environment say; with `is_static` it joins none. The operation's
    /// result is the status port that they name, or `None`.
    fn connect(&self, op: u64, flags: Vec<String>, is_static: bool) -> PyResult<()> {
        let flags = Flags::try_parse_from(flags).map_err(|error| {
            let text = error.to_string();
            PyValueError::new_err(text.trim_start_matches("error: ").trim().to_owned())
        })?;
        let connected = Arc::clone(&self.connected);
        self.operation(op, async move {
            let runtime = if is_static {
                Runtime::in_process()
            } else {
                flags.network.runtime(Reach::OtherProcesses).await?
            };
            let named = flags.status.status_port.map(u64::from);
            // A second connect would leave the first one's connections; Python calls it once.
            drop(connected.set(Connected { runtime, flags }));
            Ok(named)
        });
        Ok(())
    }

    /// Opens the status port as operation `op`, which returns the port: `None` if neither a flag nor the environment names one. An
    /// open port stays open.
    fn open_status(&self, op: u64) -> PyResult<()> {
        self.connected()?;
        let connected = Arc::clone(&self.connected);
        let (status, served) = (Arc::clone(&self.status), Arc::clone(&self.served));
        self.operation(op, async move {
            let Some(Connected { runtime, flags }) = connected.get() else {
                return Ok(None);
            };
            let mut status = status.lock().await;
            status
                .open(&flags.status, &flags.network, runtime, &served)
                .await
        });
        Ok(())
    }

    /// A new instance id.
    #[staticmethod]
    fn new_instance_id() -> u64 {
        InstanceId::random().0
    }

    /// A client of an endpoint.
    fn caller(&self, endpoint: (String, String, String)) -> PyResult<Caller> {
        let endpoint = self.connected()?.endpoint(name_of(&endpoint)?);
        // Following discovery is a task of the runtime.
        let _entered = self.handle.enter();
        Ok(Caller {
            client: Arc::new(endpoint.client::<Encoded, Encoded>()),
            selectors: Selectors::new(),
            inbox: self.inbox.clone(),
            tasks: self.tasks.clone(),
            handle: self.handle.clone(),
        })
    }

    /// Checks a name.
    #[staticmethod]
    fn check_name(endpoint: (String, String, String)) -> PyResult<()> {
        name_of(&endpoint).map(drop)
    }

    /// Serves an endpoint as operation `op` and lists it. Its requests arrive under the number `serving`. An endpoint that is
    /// stopped or closed meanwhile is unlisted again before the operation is done.
    fn serve(
        &self,
        op: u64,
        serving: u64,
        endpoint: (String, String, String),
        instance: u64,
        max_requests: usize,
    ) -> PyResult<()> {
        let endpoint = self.connected()?.endpoint(name_of(&endpoint)?);
        let handler = self.handler(serving, max_requests);
        let is_draining = Arc::clone(&handler.is_draining);
        let handler: Arc<dyn Handler<Encoded, Encoded>> = Arc::new(handler);
        let reservation = self.reserve(serving);
        let (tasks, handle) = (self.tasks.clone(), self.handle.clone());
        self.operation(op, async move {
            let made = Arc::new(endpoint.serve_as(InstanceId(instance), handler).await?);
            made.list(None).await?;
            let relist = tasks.spawn_on(keep_listed(Arc::clone(&made)), &handle);
            let relisting = relist.abort_handle();
            let stops = reservation.fill(Served::Endpoint {
                serving: Arc::clone(&made),
                relist: Some(AbortOnDropHandle::new(relist)),
                is_draining: Arc::clone(&is_draining),
            });
            if stops.as_ref().is_none_or(|stops| stops.count() > 0) {
                relisting.abort();
                let unlisted = unlist(&made, &is_draining).await;
                drop(made);
                // Only now: Python may serve the name again once it learns of the end.
                drop(stops);
                unlisted?;
            }
            Ok(None)
        });
        Ok(())
    }

    /// Serves a model as operation `op`, which is done once the model is listed. Operation `ended` is done when the model is no longer
    /// served, or could not be. A model that is stopped meanwhile begins to drain as soon as it can.
    fn serve_model(&self, op: u64, ended: u64, serving: u64, spec: &[u8]) -> PyResult<()> {
        let spec: ModelSpec =
            decode_payload(spec).map_err(|error| PyValueError::new_err(error.detail()))?;
        let runtime = self.connected()?.clone();
        // The Worker's own admission bounds them.
        let handler = self.handler(serving, usize::MAX);
        let hooks = spec.hooks.map(|number| self.handler(number, usize::MAX));
        let reservation = self.reserve(serving);
        let (served, inbox) = (Arc::clone(&self.served), self.inbox.clone());
        let work = async move {
            let model = match model::serve(&runtime, spec, handler, hooks).await {
                Ok(model) => Arc::new(model),
                Err(error) => {
                    drop(reservation);
                    inbox.put(Event::Done(op, Err(error)));
                    // If Python stopped the model, it waits for this one.
                    inbox.put(Event::Done(ended, Ok(None)));
                    return;
                }
            };
            let stops = reservation.fill(Served::Model(Arc::clone(&model)));
            // If the runtime's shutdown has closed it, nobody else will stop it.
            for _ in 0..stops.as_ref().map_or(1, EarlyStops::count) {
                model.worker.stop();
            }
            drop(stops);
            let ready = match model.worker.ready().await {
                Ok(()) => Ok(None),
                Err(report) => model::ended(report),
            };
            inbox.put(Event::Done(op, ready));
            let result = model::ended(model.worker.join().await);
            served.lock().remove(&serving);
            inbox.put(Event::Done(ended, result));
        };
        self.tasks.spawn_on(work, &self.handle);
        Ok(())
    }

    /// Stops what is served under `serving`. As operation `op`, an endpoint is unlisted; a model begins to drain, and a second stop ends
    /// it at once. What has not begun to be served is stopped as soon as it has; the operation is done then.
    fn stop(&self, op: u64, serving: u64) {
        let found = match self.served.lock().get_mut(&serving) {
            Some(Served::Beginning(stops)) => {
                stops.push(op);
                return;
            }
            Some(Served::Endpoint {
                serving,
                relist,
                is_draining,
            }) => {
                relist.take();
                Some((Arc::clone(serving), Arc::clone(is_draining)))
            }
            Some(Served::Model(model)) => {
                model.worker.stop();
                None
            }
            None => None,
        };
        self.operation(op, async move {
            if let Some((serving, is_draining)) = found {
                unlist(&serving, &is_draining).await?;
            }
            Ok(None)
        });
    }

    /// Closes an endpoint. One that has not begun to be served is closed as soon as it has.
    fn close(&self, serving: u64) {
        // Revoking its lease is a task of the runtime.
        let _entered = self.handle.enter();
        drop(self.served.lock().remove(&serving));
    }

    /// Forwards what the engine of the model under `serving` publishes; has no effect if there is no such model.
    fn publish(&self, serving: u64, published: &[u8]) -> PyResult<()> {
        let published: Published =
            decode_payload(published).map_err(|error| PyValueError::new_err(error.detail()))?;
        let model = match self.served.lock().get(&serving) {
            Some(Served::Model(model)) => Arc::clone(model),
            Some(Served::Beginning(_) | Served::Endpoint { .. }) | None => return Ok(()),
        };
        model.engine.publish(published);
        Ok(())
    }

    /// Leaves the fleet as operation `op`, after writing the responses in progress, within a limit.
    fn shutdown(&self, op: u64) {
        let connected = Arc::clone(&self.connected);
        let served = Arc::clone(&self.served);
        self.operation(op, async move {
            served.lock().clear();
            if let Some(Connected { runtime, .. }) = connected.get() {
                runtime.shutdown().await;
            }
            Ok(None)
        });
    }

    /// Ends the threads.
    fn end(&self) {
        if let Some(threads) = self.threads.lock().take() {
            threads.shutdown_background();
        }
    }
}

impl Node {
    fn connected(&self) -> PyResult<&Runtime> {
        self.connected
            .get()
            .map(|connected| &connected.runtime)
            .ok_or_else(|| PyRuntimeError::new_err("the runtime is not connected"))
    }

    fn handler(&self, serving: u64, max_requests: usize) -> CallHandler {
        CallHandler {
            serving,
            inbox: self.inbox.clone(),
            max_requests,
            in_flight: Arc::new(AtomicUsize::new(0)),
            is_draining: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Reserves a number for what an operation begins to serve.
    fn reserve(&self, serving: u64) -> Reservation {
        Reservation::new(serving, &self.served, self.inbox.clone())
    }

    /// Runs an operation, and notifies Python when it is done.
    fn operation(
        &self,
        op: u64,
        work: impl Future<Output = Result<Option<u64>, EngineError>> + Send + 'static,
    ) {
        let inbox = self.inbox.clone();
        let work = async move { inbox.put(Event::Done(op, work.await)) };
        self.tasks.spawn_on(work, &self.handle);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

fn name_of((namespace, component, endpoint): &(String, String, String)) -> PyResult<EndpointName> {
    EndpointName::try_new(namespace, component, endpoint)
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Unlists an endpoint, and then refuses new requests.
async fn unlist(serving: &Serving, is_draining: &AtomicBool) -> Result<(), EngineError> {
    let unlisted = serving.unlist().await;
    is_draining.store(true, Ordering::Release);
    unlisted
}

async fn keep_listed(serving: Arc<Serving>) {
    let logged = OncePerMinute::default();
    loop {
        serving.lost().await;
        while let Err(error) = serving.list(None).await {
            if let Some(unlogged) = logged.unlogged("not listed") {
                tracing::warn!(%error, unlogged, "discovery lost an endpoint, and it cannot be listed again yet; further failures are only counted for a minute");
            }
            tokio::time::sleep(RELIST_PAUSE).await;
        }
        tracing::info!("discovery lost an endpoint; it is listed again");
    }
}
