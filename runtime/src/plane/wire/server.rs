//! [`Server`]: accepts callers and answers them with the handlers this process serves.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::EngineError;
use genset_backend_common::wire::{GoAway, GoAwayCode};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::callee::{Callee, CalleeSink, Handlers};
use super::config::WireConfig;
use super::handshake::{self, Role};
use super::link::{Ended, Link};
use super::metrics::WireMetrics;
use super::transport::{Io, Listener, Transport};
use crate::names::{EndpointName, InstanceId};
use crate::plane::ErasedHandler;

/// How long callers may take to read the last of their streams when this process ends.
const FINISH_TIME: Duration = Duration::from_secs(2);

/// How often it is looked whether they have.
const FINISH_POLL: Duration = Duration::from_millis(5);

/// The serving half of a wire plane. Clones share.
#[derive(Clone)]
pub(super) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    transport: Arc<dyn Transport>,
    config: Arc<WireConfig>,
    metrics: WireMetrics,
    handlers: Handlers,
    location: OnceCell<String>,
    room: Arc<Semaphore>,
    callees: Mutex<Vec<(Arc<Link>, Arc<Callee>)>>,
    tasks: TaskTracker,
    /// Cancelled when no more callers are accepted.
    closing: CancellationToken,
    shutdown: CancellationToken,
}

impl Server {
    pub(super) fn new(
        transport: Arc<dyn Transport>,
        config: Arc<WireConfig>,
        metrics: WireMetrics,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) -> Self {
        let room = Arc::new(Semaphore::new(config.max_connections));
        Self {
            shared: Arc::new(Shared {
                transport,
                config,
                metrics,
                handlers: Handlers::default(),
                location: OnceCell::new(),
                room,
                callees: Mutex::default(),
                tasks,
                closing: shutdown.child_token(),
                shutdown,
            }),
        }
    }

    /// Where others reach this process; begins to listen at the first call.
    pub(super) async fn location(&self) -> Result<String, EngineError> {
        let listen = async {
            let listener = self.shared.transport.listen().await?;
            let location = listener.location();
            tracing::debug!(location, "the request plane listens");
            let accept = self.clone().accept(listener);
            let closing = self.shared.closing.clone();
            self.shared.tasks.spawn(async move {
                closing.run_until_cancelled(accept).await;
            });
            Ok(location)
        };
        self.shared
            .location
            .get_or_try_init(|| listen)
            .await
            .cloned()
    }

    /// Serves an endpoint until the guard is dropped.
    pub(super) fn add(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<ServedGuard, EngineError> {
        let key = (instance, endpoint.to_string());
        let mut handlers = self.shared.handlers.write();
        if handlers.contains_key(&key) {
            let problem = format!("{endpoint} is served as instance {instance} already");
            return Err(EngineError::invalid_argument("endpoint", problem));
        }
        handlers.insert(key.clone(), handler);
        Ok(ServedGuard {
            handlers: Arc::clone(&self.shared.handlers),
            key,
        })
    }

    /// The handler at an address that is this process's own.
    pub(super) fn local(
        &self,
        process: &str,
        instance: InstanceId,
        endpoint: &EndpointName,
    ) -> Option<Arc<ErasedHandler>> {
        if self.shared.location.get()? != process {
            return None;
        }
        let key = (instance, endpoint.to_string());
        self.shared.handlers.read().get(&key).cloned()
    }

    async fn accept(self, mut listener: Box<dyn Listener>) {
        while let Some(io) = listener.accept().await {
            let Ok(place) = Arc::clone(&self.shared.room).try_acquire_owned() else {
                self.refuse(io);
                continue;
            };
            let server = self.clone();
            self.shared.tasks.spawn(async move {
                let shutdown = server.shared.shutdown.clone();
                shutdown.run_until_cancelled(server.answer(io)).await;
                drop(place);
            });
        }
    }

    fn refuse(&self, io: Io) {
        if self.shared.metrics.refused("too_many_connections") {
            let limit = self.shared.config.max_connections;
            tracing::warn!(
                peer = io.peer,
                limit,
                "too many connections; further ones are refused and counted only"
            );
        }
        let go_away = GoAway {
            code: GoAwayCode::Limit,
            reason: "this process has as many connections as it may".into(),
        };
        let refuse = async move { handshake::refuse(io, &go_away).await };
        let limit = self.shared.config.connect_timeout;
        self.shared
            .tasks
            .spawn(async move { drop(tokio::time::timeout(limit, refuse).await) });
    }

    async fn answer(&self, mut io: Io) {
        let shared = &self.shared;
        let greeted = match handshake::greet(&mut io, Role::Callee, &shared.config).await {
            Ok(greeted) => greeted,
            Err(error) => {
                if shared.metrics.refused(error.label()) {
                    tracing::warn!(peer = io.peer, %error, "a connection was refused; further ones for this reason are counted only");
                }
                return;
            }
        };
        let _connection = shared.metrics.connection(Role::Callee);
        let link = Arc::new(Link::new(
            &shared.config,
            io.peer.clone(),
            greeted.hello.max_frame_bytes,
        ));
        let callee = Callee::new(
            Arc::clone(&link),
            Arc::clone(&shared.handlers),
            &shared.config,
            shared.tasks.clone(),
            shared.metrics.clone(),
        );
        let _listed = Listed::new(shared, &link, &callee);
        let sink = CalleeSink(Arc::clone(&callee));
        let ended = link
            .drive(io, greeted.decoder, &shared.config, &sink, &shared.metrics)
            .await;
        match ended {
            Ended::Closed | Ended::Shutdown => {
                tracing::debug!(peer = link.peer, %ended, "connection ended");
            }
            Ended::Broken(_)
            | Ended::Silent(_)
            | Ended::Stalled(_)
            | Ended::Protocol(_)
            | Ended::Refused(_) => {
                if shared.metrics.may_log(ended.label()) {
                    tracing::info!(peer = link.peer, %ended, "a caller's connection ended; further ones for this reason are counted only");
                }
            }
        }
    }

    /// Accepts no more callers, tells those there are to go away, and waits for the streams that are open to be written, within a limit.
    pub(super) async fn finish(&self) {
        self.shared.closing.cancel();
        for (link, _) in self.shared.callees.lock().iter() {
            link.go_away(GoAwayCode::Shutdown, "this process shuts down");
        }
        let finished = async {
            while !self.has_finished() {
                tokio::time::sleep(FINISH_POLL).await;
            }
        };
        if tokio::time::timeout(FINISH_TIME, finished).await.is_err() {
            tracing::warn!(
                "callers took too long to read the last of their responses; they are cut off"
            );
        }
    }

    /// Closes the connections that have nothing left to do; says whether none is left.
    fn has_finished(&self) -> bool {
        let callees = self.shared.callees.lock();
        for (link, callee) in callees.iter() {
            if callee.is_idle() {
                link.close();
            }
        }
        callees.is_empty()
    }
}

/// A connection among those that are open.
struct Listed<'a> {
    shared: &'a Shared,
    callee: Arc<Callee>,
}

impl<'a> Listed<'a> {
    fn new(shared: &'a Shared, link: &Arc<Link>, callee: &Arc<Callee>) -> Self {
        shared
            .callees
            .lock()
            .push((Arc::clone(link), Arc::clone(callee)));
        Self {
            shared,
            callee: Arc::clone(callee),
        }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.shared
            .callees
            .lock()
            .retain(|(_, callee)| !Arc::ptr_eq(callee, &self.callee));
        self.callee.end_streams();
    }
}

/// An endpoint being served.
pub(super) struct ServedGuard {
    handlers: Handlers,
    key: (InstanceId, String),
}

impl Drop for ServedGuard {
    fn drop(&mut self) {
        self.handlers.write().remove(&self.key);
    }
}
