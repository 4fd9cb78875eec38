//! [`Peers`]: our connections to other processes, one each.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::caller::{Caller, CallerSink};
use super::config::WireConfig;
use super::handshake::{self, Role};
use super::link::{Ended, Link};
use super::metrics::WireMetrics;
use super::transport::Transport;

/// Pauses between attempts to reach a process again, doubling from the first to the last.
const REDIAL_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// How long a process that went away is tried again before it is forgotten. Discovery forgets it sooner.
const REDIAL_TIME: Duration = Duration::from_secs(60);

/// The calling half of a wire plane. Clones share.
#[derive(Clone)]
pub(super) struct Peers {
    shared: Arc<Shared>,
}

struct Shared {
    transport: Arc<dyn Transport>,
    config: Arc<WireConfig>,
    metrics: WireMetrics,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

/// One other process.
#[derive(Default)]
struct Peer {
    caller: Mutex<Option<Arc<Caller>>>,
    /// Held while dialling, so that many requests make one connection; how the last attempt failed.
    dialling: tokio::sync::Mutex<Option<EngineError>>,
    /// Attempts that failed.
    failures: AtomicU64,
    is_down: AtomicBool,
}

impl Peer {
    fn open_caller(&self) -> Option<Arc<Caller>> {
        self.caller.lock().clone().filter(|caller| caller.is_open())
    }
}

impl Peers {
    pub(super) fn new(
        transport: Arc<dyn Transport>,
        config: Arc<WireConfig>,
        metrics: WireMetrics,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                transport,
                config,
                metrics,
                peers: Mutex::default(),
                tasks,
                shutdown,
            }),
        }
    }

    /// The connection to `process`; dials when there is none.
    ///
    /// # Errors
    /// `CannotConnect`.
    pub(super) async fn caller(&self, process: &str) -> Result<Arc<Caller>, EngineError> {
        let peer = self.peer(process);
        if let Some(caller) = peer.open_caller() {
            return Ok(caller);
        }
        let failures = peer.failures.load(Ordering::Relaxed);
        let mut failure = peer.dialling.lock().await;
        if let Some(caller) = peer.open_caller() {
            return Ok(caller);
        }
        // Who waited for an attempt shares its outcome: one more each would make the last wait for all of them.
        if peer.failures.load(Ordering::Relaxed) != failures
            && let Some(error) = &*failure
        {
            return Err(error.clone());
        }
        let connected = self.connect(process, &peer).await;
        if let Err(error) = &connected {
            peer.failures.fetch_add(1, Ordering::Relaxed);
            *failure = Some(error.clone());
            self.forget_stranger(process, &peer);
        }
        connected
    }

    /// Forgets a process that was never reached; one that went away is still tried.
    fn forget_stranger(&self, process: &str, peer: &Arc<Peer>) {
        let mut peers = self.shared.peers.lock();
        let is_listed = peers.get(process).is_some_and(|it| Arc::ptr_eq(it, peer));
        if is_listed && !peer.is_down.load(Ordering::Relaxed) {
            peers.remove(process);
        }
    }

    /// Begins to connect to `process`, unless that was done.
    pub(super) fn prepare(&self, process: &str) {
        if self.peer(process).open_caller().is_some() {
            return;
        }
        let (peers, process) = (self.clone(), process.to_owned());
        let shutdown = self.shared.shutdown.clone();
        self.shared.tasks.spawn(async move {
            if let Some(Err(error)) = shutdown.run_until_cancelled(peers.caller(&process)).await {
                tracing::debug!(process, %error, "cannot connect yet");
            }
        });
    }

    /// Whether the process is not known to be gone.
    pub(super) fn is_reachable(&self, process: &str) -> bool {
        let peers = self.shared.peers.lock();
        peers
            .get(process)
            .is_none_or(|peer| !peer.is_down.load(Ordering::Relaxed))
    }

    fn peer(&self, process: &str) -> Arc<Peer> {
        let mut peers = self.shared.peers.lock();
        if let Some(peer) = peers.get(process) {
            return Arc::clone(peer);
        }
        let peer = Arc::new(Peer::default());
        peers.insert(process.to_owned(), Arc::clone(&peer));
        peer
    }

    async fn connect(&self, process: &str, peer: &Arc<Peer>) -> Result<Arc<Caller>, EngineError> {
        let shared = &self.shared;
        let cannot = |problem: String| EngineError::new(ErrorKind::CannotConnect, problem);
        let dial = async {
            let mut io = shared.transport.dial(process).await?;
            let greeted = handshake::greet(&mut io, Role::Caller, &shared.config)
                .await
                .map_err(|error| cannot(format!("cannot talk to {process}: {error}")))?;
            Ok::<_, EngineError>((io, greeted))
        };
        let (io, greeted) = tokio::time::timeout(shared.config.connect_timeout, dial)
            .await
            .map_err(|_| cannot(format!("{process} did not answer in time")))??;
        let link = Arc::new(Link::new(
            &shared.config,
            io.peer.clone(),
            greeted.hello.max_frame_bytes,
        ));
        let caller = Caller::new(
            Arc::clone(&link),
            shared.config.window_items,
            &shared.metrics,
        );
        *peer.caller.lock() = Some(Arc::clone(&caller));
        peer.is_down.store(false, Ordering::Relaxed);
        let connection = Connection {
            peers: self.clone(),
            process: process.to_owned(),
            peer: Arc::clone(peer),
            caller: Arc::clone(&caller),
        };
        shared.tasks.spawn(async move {
            let sink = CallerSink(Arc::clone(&connection.caller));
            let shared = &connection.peers.shared;
            let _open = shared.metrics.connection(Role::Caller);
            let driven = link.drive(io, greeted.decoder, &shared.config, &sink, &shared.metrics);
            let ended = shared.shutdown.run_until_cancelled(driven).await;
            connection.ended(&ended.unwrap_or(Ended::Shutdown)).await;
        });
        Ok(caller)
    }
}

/// A connection of ours, run by its task.
struct Connection {
    peers: Peers,
    process: String,
    peer: Arc<Peer>,
    caller: Arc<Caller>,
}

impl Connection {
    async fn ended(self, ended: &Ended) {
        let was_leaving = !self.caller.is_open();
        let is_current = self.forget();
        if is_current && *ended != Ended::Shutdown {
            self.peer.is_down.store(true, Ordering::Relaxed);
        }
        self.caller.end(ended);
        if was_leaving || *ended == Ended::Shutdown {
            tracing::debug!(process = self.process, %ended, "connection ended");
        } else {
            tracing::warn!(process = self.process, %ended, "connection ended; its requests go elsewhere");
        }
        if is_current && *ended != Ended::Shutdown {
            let shutdown = self.peers.shared.shutdown.clone();
            shutdown.run_until_cancelled(self.redial()).await;
        }
    }

    /// Whether this was the process's connection, and no newer one has taken its place.
    fn forget(&self) -> bool {
        let mut current = self.peer.caller.lock();
        let is_current = current
            .as_ref()
            .is_some_and(|caller| Arc::ptr_eq(caller, &self.caller));
        if is_current {
            *current = None;
        }
        is_current
    }

    /// Tries to reach the process again, and forgets it when it stays away.
    ///
    /// Boxed, since a connection that is made again runs this again.
    fn redial(self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let attempts = async {
                let mut pause = REDIAL_PAUSES.0;
                loop {
                    tokio::time::sleep(pause).await;
                    if self.peers.caller(&self.process).await.is_ok() {
                        return;
                    }
                    pause = (pause * 2).min(REDIAL_PAUSES.1);
                }
            };
            if tokio::time::timeout(REDIAL_TIME, attempts).await.is_err() {
                self.peers.shared.peers.lock().remove(&self.process);
            }
        })
    }
}
