//! [`EngineThread`]: the thread that loads a model and then serves it. It is dedicated, since loading takes minutes and serving never
//! ends. It ends on a stop command, when the engine is dropped, when its start is dropped, or when the model fails for good.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use genset_backend_common::{EngineError, StartContext};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;

use crate::LlamaCppArgs;
use crate::core::{Command, Core};
use crate::load::{self, Loaded, Settings};
use crate::slots::Slots;

/// The most queued commands while a step is computed; further senders wait.
const COMMANDS: usize = 256;

/// The thread's command channel and what it loaded, or the error of its start.
type Ready = Result<(mpsc::Sender<Command>, Loaded), EngineError>;

/// A handle to the thread, for waiting.
pub(crate) struct EngineThread(JoinHandle<()>);

impl EngineThread {
    /// Starts the thread. The receiver yields what it serves, or its error; dropping the receiver cancels the start.
    ///
    /// # Errors
    /// The system could not create a thread.
    pub(crate) fn spawn(
        args: LlamaCppArgs,
        start: StartContext,
    ) -> Result<(Self, oneshot::Receiver<Ready>), EngineError> {
        let (ready, is_ready) = oneshot::channel();
        let runtime = Handle::current();
        let body = move || {
            let health = start.health.clone();
            let served = catch_unwind(AssertUnwindSafe(|| serve(&args, &start, ready, &runtime)));
            if served.is_err() {
                tracing::error!("the engine thread panicked; please report it");
                health.report_dead("the engine thread panicked");
            }
        };
        let spawned = Builder::new().name("genset-llamacpp".into()).spawn(body);
        let thread = spawned.map_err(|error| {
            EngineError::internal("no thread for the engine").with_source(error)
        })?;
        Ok((Self(thread), is_ready))
    }

    /// Waits until the thread has ended.
    ///
    /// # Errors
    /// The runtime ended before the thread.
    pub(crate) async fn ended(self) -> Result<(), EngineError> {
        // The thread catches its own panics.
        let joined = spawn_blocking(move || drop(self.0.join())).await;
        joined.map_err(|error| EngineError::internal("the thread is left").with_source(error))
    }
}

fn serve(
    args: &LlamaCppArgs,
    start: &StartContext,
    ready: oneshot::Sender<Ready>,
    runtime: &Handle,
) {
    let ready = Arc::new(ready);
    let was_given_up = {
        let ready = Arc::downgrade(&ready);
        move || ready.upgrade().is_none_or(|ready| ready.is_closed())
    };
    let answer = |answer: Ready| {
        // The receiver may be gone.
        Arc::into_inner(ready).is_some_and(|ready| ready.send(answer).is_ok())
    };
    let (model, settings) = match load::load(args, start, was_given_up) {
        Ok(loaded) => loaded,
        Err(error) => {
            answer(Err(error));
            return;
        }
    };
    let core = load::context(&model, &settings).and_then(|context| {
        let Settings { cells, batch, .. } = settings;
        let slots = Slots::new(settings.slots, cells);
        let (load, health) = (start.load.clone(), start.health.clone());
        let mut core = Core::new(context, slots, batch, load, health);
        core.probe(0)?;
        Ok(core)
    });
    let served = core.map(|core| (core, load::loaded(args, start, &model, &settings)));
    match served {
        Ok((core, loaded)) => {
            let (sender, commands) = mpsc::channel(COMMANDS);
            if answer(Ok((sender, loaded))) {
                core.run(commands, runtime);
            }
        }
        Err(error) => {
            answer(Err(error));
        }
    }
}
