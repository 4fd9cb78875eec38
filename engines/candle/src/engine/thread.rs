//! [`EngineThread`]: the thread that loads a model and serves it.
//!
//! Loading takes minutes and computing never ends, so all of it runs on its own thread, not on an async one. The thread ends
//! when it is stopped, when the engine is dropped, when its start is given up, or when the model fails for good.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use genset_backend_common::{EngineConfig, EngineError, StartContext, error::At};
use genset_sampling::guided::GuideFactory;
use genset_scheduler::{FreedSequences, Limits, Scheduler};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::adapters::Adapters;
use super::core::{Command, Core, Outlets, look};
use super::forward::Forward;
use super::metrics::Metrics;
use super::readers::Readers;
use super::speculation::Speculation;
use super::transfer::Transfers;

/// Commands that may queue during a step; further senders wait.
const COMMANDS: usize = 256;

/// A model that is ready to compute.
pub(crate) struct Loaded {
    pub(crate) forward: Box<dyn Forward>,
    pub(crate) speculation: Option<Speculation>,
    pub(crate) config: EngineConfig,
    pub(crate) limits: Limits,
    /// KV blocks for sequences; `forward` has one more.
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) guides: Option<Arc<GuideFactory>>,
    /// How long blocks are held without a fetch.
    pub(crate) kv_lease: Duration,
    /// The digest of the weights; `None` if no KV blocks are exchanged.
    pub(crate) weights: Option<u64>,
    /// `None` if adapters are disabled.
    pub(crate) adapters: Option<Arc<Adapters>>,
}

/// Loads the model. Called once, on the engine thread.
pub(crate) trait Loader<T>: Send + Sync {
    /// `was_given_up` returns whether nobody waits for the model any more.
    fn load(&self, start: &StartContext, was_given_up: &dyn Fn() -> bool)
    -> Result<T, EngineError>;
}

/// The engine's handle of a serving thread.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) config: EngineConfig,
    pub(crate) guides: Option<Arc<GuideFactory>>,
    pub(crate) capacity_tokens: usize,
    /// `--max-waiting`.
    pub(crate) max_waiting: usize,
    pub(crate) transfers: Transfers,
    pub(crate) adapters: Option<Arc<Adapters>>,
}

/// Gets the handle of a serving thread, or the error of the load. Closed if nobody waits for it any more.
pub(crate) type Ready<T> = oneshot::Sender<Result<T, EngineError>>;

/// The thread of an engine. A start that was dropped also leaves one to join.
#[derive(Debug, Default)]
pub(crate) struct EngineThread(Mutex<Option<Started>>);

#[derive(Debug)]
struct Started {
    handle: JoinHandle<()>,
    /// Closes as the thread ends.
    is_over: mpsc::Receiver<()>,
}

impl EngineThread {
    /// Starts the thread, and waits for what its body loads. Reports a panic of the body. Dropping the future cancels the start.
    ///
    /// # Errors
    /// The system cannot create a thread, or the load failed.
    pub(crate) async fn start<T: Send + 'static>(
        &self,
        start: StartContext,
        body: impl FnOnce(&StartContext, Ready<T>) + Send + 'static,
    ) -> Result<T, EngineError> {
        let (ready, is_ready) = oneshot::channel();
        let (over, is_over) = mpsc::channel(1);
        let health = start.health.clone();
        let body = move || {
            let ended = catch_unwind(AssertUnwindSafe(move || body(&start, ready)));
            if ended.is_err() {
                tracing::error!("the engine thread panicked; please report it");
                health.report_dead("the engine thread panicked");
            }
            drop(over);
        };
        let spawned = Builder::new().name("genset-candle".into()).spawn(body);
        let handle = spawned.map_err(|error| {
            EngineError::internal("no thread for the engine").with_source(error)
        })?;
        *self.0.lock() = Some(Started { handle, is_over });
        is_ready.await.unwrap_or_else(|_| {
            let problem = "the engine thread ended while it loaded the model; see the log";
            Err(EngineError::internal(problem))
        })
    }

    /// Waits until the thread has ended.
    pub(crate) async fn ended(&self) {
        let started = self.0.lock().take();
        let Some(mut started) = started else { return };
        // Nothing is ever sent. The channel closes as the thread's last action, so joining does not block.
        let _ = started.is_over.recv().await;
        // Its panics are caught inside.
        let _ = started.handle.join();
    }
}

/// The thread's body.
pub(super) fn serve(
    loader: &dyn Loader<Loaded>,
    start: &StartContext,
    readers: Arc<Readers>,
    ready: Ready<Serving>,
) {
    let loaded = loader.load(start, &|| ready.is_closed());
    let built = loaded.and_then(|loaded| build(loaded, start, readers));
    match built {
        Ok((core, serving, commands)) => {
            // If the receiver is gone, nobody can send a command, and there is nothing to do.
            if ready.send(Ok(serving)).is_ok() {
                core.run(commands);
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    }
}

type Built = (Core, Serving, mpsc::Receiver<Command>);

fn build(
    loaded: Loaded,
    start: &StartContext,
    readers: Arc<Readers>,
) -> Result<Built, EngineError> {
    let Loaded {
        forward,
        speculation,
        config,
        limits,
        num_blocks,
        block_size,
        guides,
        kv_lease,
        weights,
        adapters,
    } = loaded;
    let layout = forward.kv_layout().cloned();
    let door = start.kv_transfers.clone();
    let transfers = Transfers::try_new(start.role, door, kv_lease, layout, weights)?;
    let max_waiting = limits.max_waiting;
    let scheduler = Scheduler::try_new(limits, num_blocks, block_size)
        .map_err(|error| EngineError::invalid_argument(At::other("the engine's limits"), error))?;
    let outlets = Outlets {
        readers,
        kv_events: start.kv_events.clone(),
        load: start.load.clone(),
        health: start.health.clone(),
        metrics: Metrics::register(&start.metrics),
    };
    let (sender, commands) = mpsc::channel(COMMANDS);
    let weak = sender.downgrade();
    transfers.serve(weak.clone());
    let freed = FreedSequences::new(move || look(&weak));
    let serving = Serving {
        commands: sender,
        config,
        guides,
        capacity_tokens: num_blocks * block_size,
        max_waiting,
        transfers,
        adapters,
    };
    let core = Core::new(scheduler, forward, speculation, outlets, freed);
    Ok((core, serving, commands))
}
