//! [`Supervision`]: one task owns an engine's process from its first start to its last end. It waits for the process to end,
//! makes sure of it, says what it was, and starts another where that was asked for.
//!
//! What the process is and how it is spoken with is its engine's: a [`Program`].

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::prometheus::metrics::counter::Counter;
use genset_backend_common::{EngineError, ErrorKind, HealthReporter, StartContext};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::end::End;
use crate::process::Process;
use crate::restart::{Backoff, RestartPolicy};

/// What differs from engine to engine: how its process is started, watched and spoken with.
pub trait Program: Sized + Send + Sync + 'static {
    /// How requests speak with a process.
    type Session: Send + Sync + 'static;
    /// What a process says of itself once it serves.
    type Declared: Clone + Send + Sync + 'static;
    /// How a process fails.
    type Failure: Send + Sync + 'static;

    /// Starts a process.
    ///
    /// # Errors
    /// Why there is none.
    fn spawn(&self) -> Result<Started<Self::Session, Self::Declared>, EngineError>;

    /// Waits until the process has ended by itself, or has to. It is killed and reaped then: an engine whose requests are not
    /// to wait for that ends them here.
    ///
    /// # Cancel safety
    /// Another call waits for the same end.
    fn ended(
        &self,
        process: &mut Process,
        session: &Self::Session,
    ) -> impl Future<Output = Self::Failure> + Send;

    /// Watches a process that serves; returns once it has to end.
    fn watch(&self, session: &Self::Session) -> impl Future<Output = Self::Failure> + Send;

    /// It did not serve in time.
    fn too_late(&self) -> Self::Failure;

    /// Asks the process to exit.
    fn dismiss(&self, _process: &Process) {}

    /// The error that a failure is, now that the process is gone. `end`: how that ended, by our kill if by nothing else;
    /// `lines`: the last that it printed.
    fn error(&self, failure: Self::Failure, end: Option<End>, lines: &[String]) -> EngineError;

    /// Ends every request under way with `error`, unless another ended them before.
    fn close(&self, session: &Self::Session, error: EngineError);

    /// What processes published counts no more: one is gone, and another takes its place.
    fn forget(&self) {}

    /// Takes a process that came back and declares `again`.
    ///
    /// # Errors
    /// Why it may not serve; then no other is started.
    fn readmit(
        &self,
        _session: &Arc<Self::Session>,
        _first: &Self::Declared,
        _again: &Self::Declared,
    ) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A process that was started, how requests will speak with it, and what waits until it serves. An error of that is the
/// process's own, such as a model that it does not find.
pub type Started<S, D> = (
    Process,
    Arc<S>,
    Pin<Box<dyn Future<Output = Result<D, EngineError>> + Send>>,
);

/// A program's name in messages, its time limits, and whether it is started again.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The process in messages: "the engine's process".
    pub name: String,
    /// What requests end with when the process was let go.
    pub stopped: EngineError,
    /// How long it may take until it serves.
    pub start_timeout: Duration,
    /// How long it may take to exit once it is told to go.
    pub exit_timeout: Duration,
    /// Whether another is started in the place of one that ended.
    pub restart: Option<RestartPolicy>,
}

/// An engine's hold on its process, from before there is one. Clones share.
#[derive(Debug, Clone)]
pub struct Supervision {
    tasks: TaskTracker,
    /// The process ends now.
    kill: CancellationToken,
    /// It is told to go, and may take its time.
    leave: CancellationToken,
}

impl Default for Supervision {
    fn default() -> Self {
        let kill = CancellationToken::new();
        Self {
            tasks: TaskTracker::new(),
            leave: kill.child_token(),
            kill,
        }
    }
}

impl Supervision {
    /// The tasks that [`Self::end`] waits for.
    #[must_use]
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Waits until the process is to end.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn ending(&self) {
        self.leave.cancelled().await;
    }

    /// Runs what starts the engine, unless the process is to end meanwhile.
    ///
    /// # Errors
    /// What `start` ends with, or `stopped`.
    pub async fn unless_ending<T>(
        &self,
        start: impl Future<Output = Result<T, EngineError>>,
        stopped: EngineError,
    ) -> Result<T, EngineError> {
        let started = self.leave.run_until_cancelled(start).await;
        started.unwrap_or(Err(stopped))
    }

    /// Starts the process and waits until it serves.
    ///
    /// # Errors
    /// How it failed, or why it does not serve; it is gone, or about to go.
    ///
    /// # Cancel safety
    /// Dropping the future ends the process.
    pub async fn start<P: Program>(
        &self,
        program: P,
        terms: Terms,
        ctx: &StartContext,
    ) -> Result<(Supervised<P::Session>, P::Declared), EngineError> {
        let kill = self.kill.clone().drop_guard();
        let restarts = Counter::default();
        if terms.restart.is_some() {
            let help = "Attempts to start the engine's process again";
            let name = "genset_engine_process_restarts";
            ctx.metrics.register(name, help, restarts.clone());
        }
        let current = Arc::new(Current::new(terms.stopped.clone()));
        let supervisor = Supervisor {
            program,
            terms,
            of: self.clone(),
            current: Arc::clone(&current),
            health: ctx.health.clone(),
            restarts,
        };
        let (told, started) = oneshot::channel();
        self.tasks.spawn(supervisor.run(told));
        let panicked = |_| {
            Err(EngineError::internal(
                "the supervisor of the process panicked",
            ))
        };
        let declared = started.await.unwrap_or_else(panicked)?;
        let supervised = Supervised {
            current,
            _kill: kill,
        };
        Ok((supervised, declared))
    }

    /// Kills the process.
    pub fn kill(&self) {
        self.kill.cancel();
    }

    /// Tells the process to go, if there is one, and returns when it is gone with all that it started.
    pub async fn end(&self) {
        self.leave.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// A process that serves; once it has ended, another may take its place. Dropping this kills it.
#[derive(Debug)]
pub struct Supervised<S> {
    current: Arc<Current<S>>,
    _kill: DropGuard,
}

impl<S> Supervised<S> {
    /// How to speak with the process that serves now.
    ///
    /// # Errors
    /// `Unavailable` while it is started again; how it failed when that was given up; what [`Self::close`] said.
    pub fn session(&self) -> Result<Arc<S>, EngineError> {
        self.current.0.lock().now.clone()
    }

    /// From now on requests end with `error`. Gives the process that served, to take leave of.
    pub fn close(&self, error: EngineError) -> Option<Arc<S>> {
        let mut place = self.current.0.lock();
        place.is_closed = true;
        std::mem::replace(&mut place.now, Err(error)).ok()
    }
}

/// The process that serves now, or why none does.
#[derive(Debug)]
struct Current<S>(Mutex<Place<S>>);

#[derive(Debug)]
struct Place<S> {
    now: Result<Arc<S>, EngineError>,
    /// Nothing is to serve here any more.
    is_closed: bool,
}

impl<S> Current<S> {
    fn new(why_not: EngineError) -> Self {
        Self(Mutex::new(Place {
            now: Err(why_not),
            is_closed: false,
        }))
    }

    fn set(&self, now: Result<Arc<S>, EngineError>) {
        let mut place = self.0.lock();
        if !place.is_closed {
            place.now = now;
        }
    }
}

/// One life of the process.
struct Life<P: Program> {
    process: Process,
    session: Arc<P::Session>,
}

/// The task.
struct Supervisor<P: Program> {
    program: P,
    terms: Terms,
    of: Supervision,
    current: Arc<Current<P::Session>>,
    health: HealthReporter,
    restarts: Counter,
}

impl<P: Program> Supervisor<P> {
    /// Returns when the last process and its group are gone, it was reaped, and every request has its error.
    async fn run(self, told: oneshot::Sender<Result<P::Declared, EngineError>>) {
        let (mut life, declared) = match self.launch().await {
            Ok(launched) => launched,
            Err(error) => return drop(told.send(Err(error))),
        };
        self.current.set(Ok(Arc::clone(&life.session)));
        // Where nobody waits for it any more, the process is killed.
        drop(told.send(Ok(declared.clone())));
        let mut backoff = self.terms.restart.map(Backoff::new);
        loop {
            let since = Instant::now();
            let failure = self.serve(&mut life).await;
            let gone = Arc::clone(&life.session);
            let error = self.bury(life.process, failure).await;
            if self.of.leave.is_cancelled() {
                return self.program.close(&gone, error);
            }
            if let Some(backoff) = &mut backoff {
                backoff.served(since.elapsed());
            }
            match self.revive(&gone, &declared, error, backoff.as_mut()).await {
                Ok(next) => life = next,
                Err(error) => return self.give_up(&gone, error),
            }
            self.current.set(Ok(Arc::clone(&life.session)));
            tracing::info!("{} serves again", self.terms.name);
            self.health.report_up();
        }
    }

    /// Starts a process and waits until it serves.
    async fn launch(&self) -> Result<(Life<P>, P::Declared), EngineError> {
        let (mut process, session, begin) = self.program.spawn()?;
        let failure = tokio::select! {
            biased;
            () = self.of.ending() => None,
            // What it says of itself counts, also where it ends right after.
            begun = begin => {
                let life = Life { process, session };
                return match begun {
                    Ok(declared) => Ok((life, declared)),
                    Err(error) => Err(self.dispose(life, error).await),
                };
            }
            failure = self.program.ended(&mut process, &session) => Some(failure),
            () = sleep(self.terms.start_timeout) => Some(self.program.too_late()),
        };
        let error = self.bury(process, failure).await;
        self.program.close(&session, error.clone());
        Err(error)
    }

    /// Waits until a process that serves has failed, or was let go.
    async fn serve(&self, life: &mut Life<P>) -> Option<P::Failure> {
        let (process, session) = (&mut life.process, &*life.session);
        tokio::select! {
            biased;
            () = self.of.kill.cancelled() => None,
            () = self.of.leave.cancelled() => {
                self.program.dismiss(process);
                let left = process.leave(self.terms.exit_timeout, &self.terms.name);
                self.of.kill.run_until_cancelled(left).await;
                None
            }
            failure = self.program.ended(process, session) => Some(failure),
            failure = self.program.watch(session) => Some(failure),
        }
    }

    /// Makes sure that nothing is left of a process; the error that its end is.
    async fn bury(&self, process: Process, failure: Option<P::Failure>) -> EngineError {
        let tail = process.tail();
        let end = process.end().await;
        tracing::debug!(?end, "{} ended", self.terms.name);
        match failure {
            Some(failure) => self.program.error(failure, end, &tail.lines()),
            None => self.terms.stopped.clone(),
        }
    }

    /// Ends a process that is not to serve.
    async fn dispose(&self, life: Life<P>, error: EngineError) -> EngineError {
        life.process.end().await;
        self.program.close(&life.session, error.clone());
        error
    }

    /// A process that serves in the place of one that is gone, after as many attempts as it took.
    async fn revive(
        &self,
        gone: &P::Session,
        first: &P::Declared,
        mut error: EngineError,
        mut backoff: Option<&mut Backoff>,
    ) -> Result<Life<P>, EngineError> {
        while let Some(pause) = (backoff.as_mut()).and_then(|it| it.next_pause(rand::random())) {
            self.is_away(gone, pause, &error);
            let paused = self.of.leave.run_until_cancelled(sleep(pause)).await;
            paused.ok_or_else(|| self.terms.stopped.clone())?;
            self.restarts.inc();
            match self.launch().await {
                Ok((life, again)) => {
                    return match self.program.readmit(&life.session, first, &again) {
                        Ok(()) => Ok(life),
                        Err(another) => Err(self.dispose(life, another).await),
                    };
                }
                Err(failed) if self.of.leave.is_cancelled() => return Err(failed),
                Err(failed) => error = failed,
            }
        }
        let Some(policy) = self.terms.restart else {
            return Err(error);
        };
        let attempts = policy.max_restarts;
        let message = format!("{attempts} restarts did not help; the last end: {error}");
        // Requests may go elsewhere, whatever the last attempt failed of.
        Err(EngineError::new(ErrorKind::Disconnected, message).with_source(error))
    }

    /// The process is gone, and another is started after a pause.
    fn is_away(&self, gone: &P::Session, pause: Duration, error: &EngineError) {
        let name = &self.terms.name;
        // Before anybody can see it in an answer, so that nobody takes it for the end.
        self.health.report_down(error.to_string());
        self.program.close(gone, error.clone());
        self.program.forget();
        let message = format!("{name} ended and is being started again; send the request again");
        let away = EngineError::new(ErrorKind::Unavailable, message)
            .with_retry_after(pause)
            .with_source(error.clone());
        self.current.set(Err(away));
        let pause_s = pause.as_secs_f64();
        tracing::warn!(pause_s, %error, "{name} is started again");
    }

    /// The process is gone for good.
    fn give_up(&self, gone: &P::Session, error: EngineError) {
        self.program.close(gone, error.clone());
        if self.of.leave.is_cancelled() {
            return;
        }
        tracing::error!(%error, "{} is not started again", self.terms.name);
        self.current.set(Err(error.clone()));
        self.health.report_dead(error.to_string());
    }
}
