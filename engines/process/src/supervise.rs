//! [`Supervision`]: one task owns an engine's process from its first start to its last end. The task waits until the process
//! ends, cleans up after it, reports how it ended, and restarts it if configured.
//!
//! A [`Program`] defines what the process is and how requests use it.

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

/// The parts that differ between engines: how a process is started, watched and used.
pub trait Program: Sized + Send + Sync + 'static {
    /// The connection that requests use.
    type Session: Send + Sync + 'static;
    /// What a process declares once it serves.
    type Declared: Clone + Send + Sync + 'static;
    /// How a process fails.
    type Failure: Send + Sync + 'static;

    /// Starts a process.
    ///
    /// # Errors
    /// Why no process was started.
    fn spawn(&self) -> Result<Started<Self::Session, Self::Declared>, EngineError>;

    /// Waits until the process has ended or must be ended. The caller then kills and reaps it; to end requests before that, end
    /// them here.
    ///
    /// # Cancel safety
    /// Cancel safe: another call waits for the same end.
    fn ended(
        &self,
        process: &mut Process,
        session: &Self::Session,
    ) -> impl Future<Output = Self::Failure> + Send;

    /// Watches a serving process; returns when the process must be ended.
    fn watch(&self, session: &Self::Session) -> impl Future<Output = Self::Failure> + Send;

    /// The failure of a process that did not serve in time.
    fn too_late(&self) -> Self::Failure;

    /// Asks the process to exit.
    fn dismiss(&self, _process: &Process) {}

    /// Makes the error for a failure after the process is gone. `end`: how the process ended, possibly by our kill. `lines`: the
    /// last lines that it printed.
    fn error(&self, failure: Self::Failure, end: Option<End>, lines: &[String]) -> EngineError;

    /// Ends every active request with `error`, except those that have ended already.
    fn close(&self, session: &Self::Session, error: EngineError);

    /// Discards everything that the last process published. A new process will replace it.
    fn forget(&self) {}

    /// Accepts a restarted process that declares `again`.
    ///
    /// # Errors
    /// Why it must not serve; then no further restart is attempted.
    fn readmit(
        &self,
        _session: &Arc<Self::Session>,
        _first: &Self::Declared,
        _again: &Self::Declared,
    ) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A started process, its session, and a future that completes when it serves. An error of the future is the process's own, such
/// as a model that it does not find.
pub type Started<S, D> = (
    Process,
    Arc<S>,
    Pin<Box<dyn Future<Output = Result<D, EngineError>> + Send>>,
);

/// A program's name in messages, its time limits, and its restart policy.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The name of the process in messages: "the engine's process".
    pub name: String,
    /// The error of requests after the process was stopped.
    pub stopped: EngineError,
    /// How long the process may take to serve.
    pub start_timeout: Duration,
    /// How long the process may take to exit after it was asked to.
    pub exit_timeout: Duration,
    /// Whether and when a process that ended is restarted.
    pub restart: Option<RestartPolicy>,
}

/// An engine's handle for its process; it exists before the process does. Clones share one state.
#[derive(Debug, Clone)]
pub struct Supervision {
    tasks: TaskTracker,
    /// The process must end now.
    kill: CancellationToken,
    /// The process must exit, and has time to do so.
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

    /// Waits until the process must end.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub async fn ending(&self) {
        self.leave.cancelled().await;
    }

    /// Runs `start`, unless the process must end first.
    ///
    /// # Errors
    /// The error of `start`, or `stopped`.
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
    /// How it failed, or why it does not serve. The process is gone or about to exit.
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

    /// Asks the process to exit, if there is one, and returns when it and all its descendants are gone.
    pub async fn end(&self) {
        self.leave.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// A serving process, which may be replaced after its end. Dropping this kills the process.
#[derive(Debug)]
pub struct Supervised<S> {
    current: Arc<Current<S>>,
    _kill: DropGuard,
}

impl<S> Supervised<S> {
    /// The session of the process that serves now.
    ///
    /// # Errors
    /// `Unavailable` during a restart; the last failure if no restart follows; after [`Self::close`], the error given there.
    pub fn session(&self) -> Result<Arc<S>, EngineError> {
        self.current.0.lock().now.clone()
    }

    /// Makes requests end with `error` from now on. Returns the session of the last process, for its shutdown.
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
    /// Set by [`Supervised::close`]: no process may serve any more.
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

/// One run of the process.
struct Life<P: Program> {
    process: Process,
    session: Arc<P::Session>,
}

/// The supervising task.
struct Supervisor<P: Program> {
    program: P,
    terms: Terms,
    of: Supervision,
    current: Arc<Current<P::Session>>,
    health: HealthReporter,
    restarts: Counter,
}

impl<P: Program> Supervisor<P> {
    /// Returns when the last process and its group are gone and reaped, and every request has received its error.
    async fn run(self, told: oneshot::Sender<Result<P::Declared, EngineError>>) {
        let (mut life, declared) = match self.launch().await {
            Ok(launched) => launched,
            Err(error) => return drop(told.send(Err(error))),
        };
        self.current.set(Ok(Arc::clone(&life.session)));
        // If the receiver is gone, the process is killed: its drop guard went with it.
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
            // Before `ended`, so that a declaration counts even if the process ends right after it.
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

    /// Waits until a serving process has failed or was stopped.
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

    /// Removes all that is left of a process. Returns the error for its end.
    async fn bury(&self, process: Process, failure: Option<P::Failure>) -> EngineError {
        let tail = process.tail();
        let end = process.end().await;
        tracing::debug!(?end, "{} ended", self.terms.name);
        match failure {
            Some(failure) => self.program.error(failure, end, &tail.lines()),
            None => self.terms.stopped.clone(),
        }
    }

    /// Ends a process that must not serve.
    async fn dispose(&self, life: Life<P>, error: EngineError) -> EngineError {
        life.process.end().await;
        self.program.close(&life.session, error.clone());
        error
    }

    /// Replaces a process that is gone, with as many attempts as the policy allows.
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
        // This kind lets requests migrate, whatever caused the last failure.
        Err(EngineError::new(ErrorKind::Disconnected, message).with_source(error))
    }

    /// Announces that the process is gone and will be restarted after a pause.
    fn is_away(&self, gone: &P::Session, pause: Duration, error: &EngineError) {
        let name = &self.terms.name;
        // Before requests receive the error, so that nobody takes it for a final failure.
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

    /// Announces that the process is gone and will not be restarted.
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
