//! [`Peers`]: our connections to other processes, one each.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, Shared};
use genset_backend_common::{EngineError, ErrorKind, log_limit::OncePerMinute};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::Common;
use super::caller::Caller;
use super::handshake::{self, Role};
use super::link::Ended;
use super::metrics::GaugeGuard;
use super::traffic::Traffic;
use crate::names::InstanceId;
use crate::plane::Reachability;

/// Pauses between attempts to reach a process again, doubling from the first to the last.
const REDIAL_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// How long a process is redialled after a loss even if no client lists an instance of it any more.
const REDIAL_TIME: Duration = Duration::from_secs(60);

/// An attempt to connect. A task makes it, so it continues when those who wait for it leave.
type Dial = Shared<BoxFuture<'static, Result<Arc<Caller>, EngineError>>>;

/// The calling half of a wire plane.
pub(super) struct Peers {
    common: Common,
    /// The processes that somebody uses: a client that lists an instance of it, a connection, an attempt to connect.
    peers: Mutex<HashMap<String, Weak<Peer>>>,
}

/// One other process.
struct Peer {
    peers: Arc<Peers>,
    /// Its location.
    process: String,
    state: Mutex<State>,
    /// Whether to look closer before an instance of the process counts as reachable. It ends only while `state` is locked: a look
    /// from before a loss must not end it.
    doubt: Arc<AtomicBool>,
    /// The attempt in progress, which concurrent requests share.
    dialling: Mutex<Option<Dial>>,
    /// Limits the log: a process might accept connections and close them repeatedly.
    logged: OncePerMinute,
}

/// What is known of a process.
#[derive(Default)]
enum State {
    /// Nothing: it may be there.
    #[default]
    Unknown,
    /// There is a connection to it. It may have said goodbye there.
    Connected(Arc<Caller>),
    /// The connection to it ended, or none could be made, and it is redialled.
    Lost {
        said_goodbye: bool,
        /// For operators, unless it said goodbye.
        _counted: Option<GaugeGuard>,
        /// Ends with this loss; the next has its own.
        _redial: AbortOnDropHandle<Option<()>>,
    },
}

impl Peers {
    pub(super) fn new(common: Common) -> Self {
        Self {
            common,
            peers: Mutex::default(),
        }
    }

    /// The connection to `process`; dials when there is none.
    ///
    /// # Errors
    /// `CannotConnect`.
    pub(super) async fn caller(
        self: &Arc<Self>,
        process: &str,
    ) -> Result<Arc<Caller>, EngineError> {
        self.peer(process).caller().await
    }

    /// An instance was announced: starts to connect to its process, unless connected already.
    pub(super) fn prepare(self: &Arc<Self>, process: &str, instance: InstanceId) {
        let peer = self.peer(process);
        if let Some(caller) = peer.open_caller() {
            caller.announced(instance);
            return;
        }
        drop(peer.dial());
    }

    /// Whether neither the process is known to be gone nor its instance to be leaving.
    pub(super) fn reachability(
        self: &Arc<Self>,
        process: &str,
        instance: InstanceId,
    ) -> Reachability {
        let peer = self.peer(process);
        Reachability::new(Arc::clone(&peer.doubt), move || peer.is_reachable(instance))
    }

    fn peer(self: &Arc<Self>, process: &str) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(process).and_then(Weak::upgrade) {
            return peer;
        }
        let peer = Arc::new(Peer {
            peers: Arc::clone(self),
            process: process.to_owned(),
            state: Mutex::default(),
            doubt: Arc::default(),
            dialling: Mutex::default(),
            logged: OncePerMinute::default(),
        });
        peers.insert(process.to_owned(), Arc::downgrade(&peer));
        peer
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut peers = self.peers.peers.lock();
        // Unless the process is in use again.
        let is_unused = |peer: &Weak<Self>| peer.strong_count() == 0;
        if peers.get(&self.process).is_some_and(is_unused) {
            peers.remove(&self.process);
        }
    }
}

impl Peer {
    fn open_caller(&self) -> Option<Arc<Caller>> {
        let state = self.state.lock();
        match &*state {
            State::Connected(caller) if caller.is_open() => Some(Arc::clone(caller)),
            State::Connected(_) | State::Unknown | State::Lost { .. } => None,
        }
    }

    /// Whether it said goodbye on its last connection, which may still be open.
    fn has_said_goodbye(&self) -> bool {
        let state = self.state.lock();
        match &*state {
            State::Unknown => false,
            State::Connected(caller) => !caller.is_open(),
            State::Lost { said_goodbye, .. } => *said_goodbye,
        }
    }

    /// Whether an instance of the process is reachable. Ends the doubt if all are.
    fn is_reachable(&self, instance: InstanceId) -> bool {
        let state = self.state.lock();
        match &*state {
            State::Unknown => {
                // An earlier connection may have raised it.
                self.doubt.store(false, Ordering::Relaxed);
                true
            }
            State::Connected(caller) => !caller.is_leaving(instance),
            State::Lost { .. } => false,
        }
    }

    /// Changes `state`, the locked state of this process.
    fn enter(&self, state: &mut State, next: State) {
        let is_lost = matches!(next, State::Lost { .. });
        self.doubt.store(is_lost, Ordering::Relaxed);
        *state = next;
    }

    /// The state of a process that cannot be reached, with its [redial](Self::redial). Call it while `state` is locked: the redial
    /// ends when it finds a connection.
    fn lost(self: &Arc<Self>, said_goodbye: bool, pause: Duration, time: Duration) -> State {
        let metrics = &self.peers.common.metrics;
        State::Lost {
            said_goodbye,
            _counted: (!said_goodbye).then(|| metrics.unreachable()),
            _redial: self.redial(pause, time),
        }
    }

    /// Changes the state at the end of a connection, unless another has replaced it.
    fn leave(&self, ended: &Arc<Caller>, next: impl FnOnce() -> State) {
        let mut state = self.state.lock();
        if matches!(&*state, State::Connected(caller) if Arc::ptr_eq(caller, ended)) {
            self.enter(&mut state, next());
        }
    }

    /// Starts to dial the lost process until it is reached: for `time` in any case, and then as long as somebody uses it.
    fn redial(
        self: &Arc<Self>,
        mut pause: Duration,
        time: Duration,
    ) -> AbortOnDropHandle<Option<()>> {
        let until = Instant::now() + time;
        let peer = Arc::downgrade(self);
        let mut kept = Some(Arc::clone(self));
        let redial = async move {
            loop {
                drop(kept.take_if(|_| Instant::now() >= until));
                tokio::time::sleep(pause).await;
                let Some(peer) = peer.upgrade() else { return };
                if peer.caller().await.is_ok() {
                    return;
                }
                pause = (pause * 2).min(REDIAL_PAUSES.1);
            }
        };
        let common = &self.peers.common;
        let redial = common.shutdown.clone().run_until_cancelled_owned(redial);
        AbortOnDropHandle::new(common.tasks.spawn_on(redial, common.vital.handle()))
    }

    /// The connection to the process; dials when there is none.
    async fn caller(self: &Arc<Self>) -> Result<Arc<Caller>, EngineError> {
        match self.open_caller() {
            Some(caller) => Ok(caller),
            None => self.dial().await,
        }
    }

    /// The attempt in progress; begins one if there is none.
    fn dial(self: &Arc<Self>) -> Dial {
        let mut dialling = self.dialling.lock();
        // An attempt may have succeeded a moment ago.
        if let Some(caller) = self.open_caller() {
            return std::future::ready(Ok(caller)).boxed().shared();
        }
        dialling.get_or_insert_with(|| self.begin_to_dial()).clone()
    }

    fn begin_to_dial(self: &Arc<Self>) -> Dial {
        let common = &self.peers.common;
        let peer = Arc::clone(self);
        let attempt = async move {
            let _until = Dialling(&peer);
            let shutdown = &peer.peers.common.shutdown;
            match shutdown.run_until_cancelled(peer.connect()).await {
                Some(connected) => connected.inspect_err(|error| peer.unreached(error)),
                None => Err(EngineError::new(
                    ErrorKind::CannotConnect,
                    "this process shuts down",
                )),
            }
        };
        let attempt = common.tasks.spawn_on(attempt, common.vital.handle());
        let outcome = async move {
            attempt.await.unwrap_or_else(|error| {
                Err(
                    EngineError::internal("a task of the runtime of links ended early")
                        .with_source(error),
                )
            })
        };
        outcome.boxed().shared()
    }

    /// An attempt to connect failed. If nothing was known of the process, it now counts as lost.
    fn unreached(self: &Arc<Self>, error: &EngineError) {
        let process = &self.process;
        // Only the log has the address: clients read the error. A process that said goodbye is not worth logging.
        if self.has_said_goodbye() {
            tracing::debug!(process, %error, "a worker that left cannot be reached");
        } else if self.peers.common.metrics.may_log("cannot_connect") {
            tracing::warn!(process, %error, "a worker cannot be reached; further failures are not logged for a minute");
        }
        let mut state = self.state.lock();
        if matches!(*state, State::Unknown) {
            let lost = self.lost(false, REDIAL_PAUSES.0, Duration::ZERO);
            self.enter(&mut state, lost);
        }
    }

    async fn connect(self: &Arc<Self>) -> Result<Arc<Caller>, EngineError> {
        let common = &self.peers.common;
        let cannot = |problem: String| EngineError::new(ErrorKind::CannotConnect, problem);
        // Not a part of the dial: several servers may be tried.
        common.transport.ready().await?;
        let dial = async {
            let mut io = common.transport.dial(&self.process).await?;
            let greeted = handshake::greet(&mut io, Role::Caller, &common.config)
                .await
                .map_err(|error| cannot(format!("cannot talk to the worker: {error}")))?;
            Ok::<_, EngineError>((io, greeted))
        };
        let (io, greeted) = tokio::time::timeout(common.config.connect_timeout, dial)
            .await
            .map_err(|_| cannot("the worker did not answer in time".into()))??;
        let (link, control) = common.link(&io, &greeted);
        let caller = Caller::new(
            Arc::clone(&link),
            common.config.window_items,
            &common.metrics,
            control,
            Arc::clone(&self.doubt),
        );
        let connected = State::Connected(Arc::clone(&caller));
        self.enter(&mut self.state.lock(), connected);
        let connection = Connection {
            peer: Arc::clone(self),
            caller: Arc::clone(&caller),
            made: Instant::now(),
        };
        let run = async move {
            let common = &connection.peer.peers.common;
            let config = &common.config;
            let sink = Arc::clone(&connection.caller);
            let traffic = Traffic::new(&link, io, greeted.decoder, sink, config);
            let _open = common.metrics.connection(Role::Caller);
            let driven = link.drive(traffic, &common.main, config, &common.metrics);
            let ended = common.shutdown.run_until_cancelled(driven).await;
            connection.ended(&ended.unwrap_or(Ended::Shutdown));
        };
        common.tasks.spawn_on(run, common.vital.handle());
        Ok(caller)
    }
}

/// An attempt to connect, until its task ends.
struct Dialling<'a>(&'a Peer);

impl Drop for Dialling<'_> {
    fn drop(&mut self) {
        let ended = self.0.dialling.lock().take();
        drop(ended);
    }
}

/// A connection of ours, run by its task.
struct Connection {
    peer: Arc<Peer>,
    caller: Arc<Caller>,
    made: Instant,
}

impl Connection {
    fn ended(&self, ended: &Ended) {
        let was_leaving = !self.caller.is_open();
        let is_shutdown = *ended == Ended::Shutdown;
        self.peer.leave(&self.caller, || {
            if is_shutdown {
                return State::Unknown;
            }
            // A connection that ended quickly would probably do so again and again.
            let (shortest, longest) = REDIAL_PAUSES;
            let was_brief = self.made.elapsed() < longest;
            let pause = if was_brief { longest } else { shortest };
            self.peer.lost(was_leaving, pause, REDIAL_TIME)
        });
        self.caller.end(ended);
        if was_leaving || is_shutdown {
            tracing::debug!(process = self.peer.process, %ended, "connection ended");
        } else {
            self.warn(ended);
        }
    }

    fn warn(&self, ended: &Ended) {
        if let Some(unlogged) = self.peer.logged.unlogged("ended") {
            tracing::warn!(
                process = self.peer.process,
                %ended,
                unlogged,
                "a connection ended and its requests move to other instances; further ends are only counted for a minute"
            );
        }
    }
}

#[cfg(test)]
mod tests;
