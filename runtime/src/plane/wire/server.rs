//! [`Server`]: accepts callers and serves them with this process's handlers.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, error::At};
use genset_wire::{GoAway, GoAwayCode};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::sync::CancellationToken;

use super::Common;
use super::callee::{Callee, Handlers, ServedHandler};
use super::handshake::{self, Role};
use super::link::{Ended, Link};
use super::traffic::Traffic;
use super::transport::{Io, Listener};
use crate::names::{EndpointName, InstanceId};
use crate::plane::ErasedHandler;
use crate::strangers::{Stranger, Strangers};

/// How long callers may take to read their last streams at shutdown.
const FINISH_TIME: Duration = Duration::from_secs(2);

/// How often to check whether they have.
const FINISH_POLL: Duration = Duration::from_millis(5);

/// The serving half of a wire plane.
pub(super) struct Server {
    common: Common,
    handlers: Handlers,
    location: OnceCell<String>,
    room: Arc<Semaphore>,
    strangers: Arc<Strangers>,
    callees: Mutex<Vec<(Arc<Link>, Arc<Callee>)>>,
    /// Cancelled when the server stops accepting callers.
    closing: CancellationToken,
}

impl Server {
    pub(super) fn new(common: Common) -> Self {
        let config = &common.config;
        let room = Arc::new(Semaphore::new(config.max_connections));
        let strangers = Strangers::new(config.max_strangers, config.max_strangers_of_address);
        Self {
            handlers: Handlers::default(),
            location: OnceCell::new(),
            room,
            strangers,
            callees: Mutex::default(),
            closing: common.shutdown.child_token(),
            common,
        }
    }

    /// The location under which others reach this process; starts to listen at the first call.
    pub(super) async fn location(self: &Arc<Self>) -> Result<String, EngineError> {
        let listen = async {
            let transport = Arc::clone(&self.common.transport);
            let listen = async move { transport.listen().await };
            let listener = self.common.vital.run(listen).await?;
            let location = listener.location();
            tracing::debug!(location, "the request plane listens");
            let accept = Arc::clone(self).accept(listener);
            let closing = self.closing.clone();
            self.spawn(async move {
                closing.run_until_cancelled(accept).await;
            });
            Ok(location)
        };
        self.location.get_or_try_init(|| listen).await.cloned()
    }

    /// Starts a task on the runtime of links.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let vital = self.common.vital.handle();
        self.common.tasks.spawn_on(task, vital);
    }

    /// Serves an endpoint until the guard is dropped. Its handler runs on the caller's runtime.
    pub(super) fn add(
        &self,
        endpoint: &EndpointName,
        instance: InstanceId,
        handler: Arc<ErasedHandler>,
    ) -> Result<ServedGuard, EngineError> {
        let key = (instance, endpoint.to_string());
        let mut handlers = self.handlers.write();
        if handlers.contains_key(&key) {
            let problem = format!("{endpoint} is served as instance {instance} already");
            return Err(EngineError::invalid_argument(
                At::other("endpoint"),
                problem,
            ));
        }
        let served = ServedHandler {
            handler,
            runtime: Handle::current(),
        };
        handlers.insert(key.clone(), served);
        Ok(ServedGuard {
            handlers: Arc::clone(&self.handlers),
            key,
        })
    }

    /// The handler at an address of this process.
    pub(super) fn local(
        &self,
        process: &str,
        instance: InstanceId,
        endpoint: &EndpointName,
    ) -> Option<Arc<ErasedHandler>> {
        if self.location.get()? != process {
            return None;
        }
        let key = (instance, endpoint.to_string());
        let handlers = self.handlers.read();
        handlers.get(&key).map(|served| Arc::clone(&served.handler))
    }

    async fn accept(self: Arc<Self>, mut listener: Box<dyn Listener>) {
        while let Some(io) = listener.accept().await {
            let server = Arc::clone(&self);
            let stranger = self.strangers.enter(&io.peer);
            self.spawn(async move {
                let shutdown = server.common.shutdown.clone();
                shutdown
                    .run_until_cancelled(server.answer(io, stranger))
                    .await;
            });
        }
    }

    /// Refuses a connection for lack of room. It keeps its place among the strangers until it has been told: a TLS handshake may
    /// come first.
    async fn refuse(&self, io: Io, stranger: &Stranger) {
        if self.common.metrics.refused("too_many_connections") {
            let limit = self.common.config.max_connections;
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
        let limit = self.common.config.connect_timeout;
        let told = stranger.until_evicted(handshake::refuse(io, &go_away));
        drop(tokio::time::timeout(limit, told).await);
    }

    async fn answer(&self, mut io: Io, stranger: Stranger) {
        let config = &self.common.config;
        if self.room.available_permits() == 0 {
            return self.refuse(io, &stranger).await;
        }
        let greeted = stranger
            .until_evicted(handshake::greet(&mut io, Role::Callee, config))
            .await;
        let greeted = match greeted {
            Some(Ok(greeted)) => greeted,
            None => {
                if self.common.metrics.refused("too_many_strangers") {
                    tracing::warn!(
                        peer = io.peer,
                        "too many connections in the handshake; the longest are closed and counted only"
                    );
                }
                return;
            }
            Some(Err(error)) => {
                if self.common.metrics.refused(error.label()) {
                    tracing::warn!(peer = io.peer, %error, "a connection was refused; further ones for this reason are counted only");
                }
                return;
            }
        };
        let Ok(_place) = Arc::clone(&self.room).try_acquire_owned() else {
            return self.refuse(io, &stranger).await;
        };
        drop(stranger);
        let _connection = self.common.metrics.connection(Role::Callee);
        let (link, control) = self.common.link(&io, &greeted);
        let callee = Callee::new(
            Arc::clone(&link),
            Arc::clone(&self.handlers),
            config,
            self.common.tasks.clone(),
            self.common.metrics.clone(),
            control,
        );
        let _listed = Listed::new(self, &link, &callee);
        let traffic = Traffic::new(&link, io, greeted.decoder, callee, config);
        let ended = link
            .drive(traffic, &self.common.main, config, &self.common.metrics)
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
                if self.common.metrics.may_log(ended.label()) {
                    tracing::info!(peer = link.peer, %ended, "a caller's connection ended; further ones for this reason are counted only");
                }
            }
        }
    }

    /// Tells callers that an instance takes no new requests.
    pub(super) fn leaving(&self, instance: InstanceId) {
        for (link, _) in self.callees.lock().iter() {
            link.leaving(instance);
        }
    }

    /// Stops accepting callers, tells existing ones to go away, and waits until open streams are written, within a time limit.
    pub(super) async fn finish(&self) {
        self.closing.cancel();
        for (link, _) in self.callees.lock().iter() {
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

    /// Closes the connections that have nothing left to do; returns whether none is left.
    fn has_finished(&self) -> bool {
        let callees = self.callees.lock();
        for (link, callee) in callees.iter() {
            if callee.is_idle() {
                link.close();
            }
        }
        callees.is_empty()
    }
}

/// A connection in the list of open ones.
struct Listed<'a> {
    server: &'a Server,
    callee: Arc<Callee>,
}

impl<'a> Listed<'a> {
    fn new(server: &'a Server, link: &Arc<Link>, callee: &Arc<Callee>) -> Self {
        let listed = (Arc::clone(link), Arc::clone(callee));
        server.callees.lock().push(listed);
        Self {
            server,
            callee: Arc::clone(callee),
        }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        let mut callees = self.server.callees.lock();
        callees.retain(|(_, callee)| !Arc::ptr_eq(callee, &self.callee));
        drop(callees);
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
        let handler = self.handlers.write().remove(&self.key);
        // Without the lock: it may own what takes it, such as another endpoint.
        drop(handler);
    }
}
