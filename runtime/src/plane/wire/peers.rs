//! [`Peers`]: our connections to other processes, one each.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Common;
use super::caller::Caller;
use super::handshake::{self, Role};
use super::link::Ended;
use super::traffic::Traffic;
use crate::log_limit::LogLimit;
use crate::names::InstanceId;

/// Pauses between attempts to reconnect to a process, doubling from the first to the last.
const REDIAL_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// How long to redial a lost process before forgetting it. Discovery forgets it sooner.
const REDIAL_TIME: Duration = Duration::from_secs(60);

/// The calling half of a wire plane.
pub(super) struct Peers {
    common: Common,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
}

/// One other process.
#[derive(Default)]
struct Peer {
    caller: Mutex<Option<Arc<Caller>>>,
    /// Held while dialling, so that concurrent requests make one connection; contains the error of the last attempt.
    dialling: tokio::sync::Mutex<Option<EngineError>>,
    /// The number of failed attempts.
    failures: AtomicU64,
    is_down: AtomicBool,
    /// It said goodbye before its last connection ended.
    has_left: AtomicBool,
    /// Limits the log: a process might accept connections and close them repeatedly.
    logged: LogLimit,
}

impl Peer {
    fn open_caller(&self) -> Option<Arc<Caller>> {
        self.caller.lock().clone().filter(|caller| caller.is_open())
    }

    /// Whether it said goodbye on its last connection, which may still be open.
    fn is_leaving(&self) -> bool {
        let caller = self.caller.lock();
        match &*caller {
            Some(caller) => !caller.is_open(),
            None => self.has_left.load(Ordering::Relaxed),
        }
    }
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
        let peer = self.peer(process);
        if let Some(caller) = peer.open_caller() {
            return Ok(caller);
        }
        let failures = peer.failures.load(Ordering::Relaxed);
        let mut failure = peer.dialling.lock().await;
        if let Some(caller) = peer.open_caller() {
            return Ok(caller);
        }
        // Tasks that waited for an attempt share its outcome: if each tried again, the last would wait for all of them.
        if peer.failures.load(Ordering::Relaxed) != failures
            && let Some(error) = &*failure
        {
            return Err(error.clone());
        }
        let (peers, to, connected) = (Arc::clone(self), process.to_owned(), Arc::clone(&peer));
        let connect = async move { peers.connect(&to, &connected).await };
        let connected = self.common.vital.run(connect).await;
        if let Err(error) = &connected {
            // Only the log has the address: clients read the error. A process that said goodbye is not worth logging.
            if peer.is_leaving() {
                tracing::debug!(process, %error, "a worker that left cannot be reached");
            } else if self.common.metrics.may_log("cannot_connect") {
                tracing::warn!(process, %error, "a worker cannot be reached; further failures are not logged for a minute");
            }
            peer.failures.fetch_add(1, Ordering::Relaxed);
            *failure = Some(error.clone());
            self.forget_stranger(process, &peer);
        }
        connected
    }

    /// Forgets a process that was never reached; a lost one is still redialled.
    fn forget_stranger(&self, process: &str, peer: &Arc<Peer>) {
        let mut peers = self.peers.lock();
        let is_listed = peers.get(process).is_some_and(|it| Arc::ptr_eq(it, peer));
        if is_listed && !peer.is_down.load(Ordering::Relaxed) {
            peers.remove(process);
        }
    }

    /// An instance was announced: starts to connect to its process, unless connected already.
    pub(super) fn prepare(self: &Arc<Self>, process: &str, instance: InstanceId) {
        if let Some(caller) = self.peer(process).open_caller() {
            caller.announced(instance);
            return;
        }
        let (peers, process) = (Arc::clone(self), process.to_owned());
        let shutdown = self.common.shutdown.clone();
        let prepare = async move {
            if let Some(Err(error)) = shutdown.run_until_cancelled(peers.caller(&process)).await {
                tracing::debug!(process, %error, "cannot connect yet");
            }
        };
        let vital = self.common.vital.handle();
        self.common.tasks.spawn_on(prepare, vital);
    }

    /// Whether neither the process is known to be gone nor its instance to be leaving.
    pub(super) fn is_reachable(&self, process: &str, instance: InstanceId) -> bool {
        let peers = self.peers.lock();
        peers.get(process).is_none_or(|peer| {
            !peer.is_down.load(Ordering::Relaxed)
                && !(peer.caller.lock().as_ref()).is_some_and(|caller| caller.is_leaving(instance))
        })
    }

    fn peer(&self, process: &str) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(process) {
            return Arc::clone(peer);
        }
        let peer = Arc::new(Peer::default());
        peers.insert(process.to_owned(), Arc::clone(&peer));
        peer
    }

    async fn connect(
        self: &Arc<Self>,
        process: &str,
        peer: &Arc<Peer>,
    ) -> Result<Arc<Caller>, EngineError> {
        let common = &self.common;
        let cannot = |problem: String| EngineError::new(ErrorKind::CannotConnect, problem);
        let dial = async {
            let mut io = common.transport.dial(process).await?;
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
        );
        *peer.caller.lock() = Some(Arc::clone(&caller));
        peer.is_down.store(false, Ordering::Relaxed);
        let connection = Connection {
            peers: Arc::clone(self),
            process: process.to_owned(),
            peer: Arc::clone(peer),
            caller: Arc::clone(&caller),
            made: Instant::now(),
        };
        let run = async move {
            let common = &connection.peers.common;
            let config = &common.config;
            let sink = Arc::clone(&connection.caller);
            let traffic = Traffic::new(&link, io, greeted.decoder, sink, config);
            let _open = common.metrics.connection(Role::Caller);
            let driven = link.drive(traffic, &common.main, config, &common.metrics);
            let ended = common.shutdown.run_until_cancelled(driven).await;
            connection.ended(&ended.unwrap_or(Ended::Shutdown)).await;
        };
        common.tasks.spawn_on(run, common.vital.handle());
        Ok(caller)
    }
}

/// A connection of ours, run by its task.
struct Connection {
    peers: Arc<Peers>,
    process: String,
    peer: Arc<Peer>,
    caller: Arc<Caller>,
    made: Instant,
}

impl Connection {
    async fn ended(self, ended: &Ended) {
        let was_leaving = !self.caller.is_open();
        let is_current = self.forget(was_leaving);
        if is_current && *ended != Ended::Shutdown {
            self.peer.is_down.store(true, Ordering::Relaxed);
        }
        self.caller.end(ended);
        if was_leaving || *ended == Ended::Shutdown {
            tracing::debug!(process = self.process, %ended, "connection ended");
        } else {
            self.warn(ended);
        }
        if is_current && *ended != Ended::Shutdown {
            let shutdown = self.peers.common.shutdown.clone();
            shutdown.run_until_cancelled(self.redial()).await;
        }
    }

    fn warn(&self, ended: &Ended) {
        if let Some(unlogged) = self.peer.logged.unlogged("ended") {
            tracing::warn!(
                process = self.process,
                %ended,
                unlogged,
                "a connection ended and its requests move to other instances; further ends are only counted for a minute"
            );
        }
    }

    /// Clears the process's connection if it is still this one; returns whether it was.
    fn forget(&self, was_leaving: bool) -> bool {
        let mut current = self.peer.caller.lock();
        let is_current = current
            .as_ref()
            .is_some_and(|caller| Arc::ptr_eq(caller, &self.caller));
        if is_current {
            self.peer.has_left.store(was_leaving, Ordering::Relaxed);
            *current = None;
        }
        is_current
    }

    /// Redials the process, and forgets it if it stays unreachable.
    ///
    /// Boxed, since a new connection calls this again.
    fn redial(self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let attempts = async {
                let (shortest, longest) = REDIAL_PAUSES;
                // A connection that ended quickly would probably do so again and again.
                let was_brief = self.made.elapsed() < longest;
                let mut pause = if was_brief { longest } else { shortest };
                loop {
                    tokio::time::sleep(pause).await;
                    if self.peers.caller(&self.process).await.is_ok() {
                        return;
                    }
                    pause = (pause * 2).min(longest);
                }
            };
            if tokio::time::timeout(REDIAL_TIME, attempts).await.is_err() {
                self.peers.peers.lock().remove(&self.process);
            }
        })
    }
}
