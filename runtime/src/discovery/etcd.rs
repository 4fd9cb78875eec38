//! Discovery in etcd, for fleets. The cargo feature `etcd` enables it and needs no other program.
//!
//! - [`config`]: the user's settings and their checks.
//! - [`protocol`], [`client`]: etcd's messages, and the client of one server.
//! - [`session`]: one operation on one of several servers, before a deadline.
//! - [`lease`]: a lease, the task that keeps it alive, and its entries.
//! - [`watch`]: the task that follows a prefix; [`known`] decides which changes its watcher receives.
//!
//! # When etcd is unreachable
//! A watcher keeps its entries while etcd is unreachable. After reconnecting, it gets a snapshot. The snapshot keeps entries that
//! etcd no longer has for one more time to live: their owners may have been cut off as well, or etcd may have lost its data, and
//! owners put their entries again within that time. Entries not put again by then are removed.
//!
//! A lease survives a disconnection shorter than its time to live, and a longer one if etcd itself was down: etcd restarts its
//! leases when it starts. A lease is lost when etcd reports that it does not have it.
//!
//! With each keep-alive, a lease asks etcd whether its entries are there, and puts those again that somebody has deleted.

mod client;
mod config;
mod known;
mod lease;
mod protocol;
mod session;
mod watch;

use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{EngineError, ErrorKind};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

pub use config::{EtcdConfig, EtcdCredentials, EtcdTls};

use self::lease::EtcdLease;
use self::session::Sessions;
use self::watch::{BACKLOG_CHANGES, EtcdWatch, Feed, Follower};
use super::{Discovery, Entry, Lease, Watch};

/// A store in etcd, version 3.4 or newer. Clones share state.
///
/// Operations that cannot reach etcd fail with `Unavailable` within the request timeout and may be retried. Leases and watches
/// retry by themselves.
///
/// Dropping a lease starts a task that revokes it. If the tokio runtime ends before that task, the entries stay until the lease
/// expires: call [`shutdown`](Self::shutdown) to wait for it.
///
/// # Examples
/// ```no_run
/// use genset_runtime::discovery::{Discovery, Entry, EtcdConfig, EtcdDiscovery};
///
/// # async fn example() -> Result<(), genset_backend_common::EngineError> {
/// let config = EtcdConfig {
///     endpoints: vec!["http://127.0.0.1:2379".into()],
///     ..EtcdConfig::default()
/// };
/// let discovery = EtcdDiscovery::connect(config).await?;
/// let lease = discovery.lease().await?;
/// lease.put(Entry { key: "a/1".into(), value: "x".into() }).await?;
/// assert_eq!(discovery.get("a/").await?.len(), 1);
/// drop(lease);
/// discovery.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct EtcdDiscovery {
    sessions: Arc<Sessions>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl EtcdDiscovery {
    /// Creates discovery on the servers in `config`. They need not be up yet: connections are made on first use and remade
    /// whenever they break.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the invalid field of the config.
    #[expect(
        clippy::unused_async,
        reason = "its clients are made within a runtime, which an async function is called in"
    )]
    pub async fn connect(config: EtcdConfig) -> Result<Self, EngineError> {
        Ok(Self {
            sessions: Arc::new(Sessions::try_new(config)?),
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
        })
    }

    /// Revokes every lease, ends every watch, and waits until that is done, at most for the request timeout. Later operations
    /// fail with `Unavailable`.
    ///
    /// # Cancel safety
    /// Leases and watches end even if the future is dropped.
    pub async fn shutdown(&self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// The number of tasks that keep leases alive or follow prefixes.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    fn check_open(&self) -> Result<(), EngineError> {
        if self.shutdown.is_cancelled() {
            return Err(EngineError::new(
                ErrorKind::Unavailable,
                "discovery is shut down in this process",
            ));
        }
        Ok(())
    }
}

genset_backend_common::debug_as!(|it| EtcdDiscovery {
    endpoints: it.sessions.to_string(),
    tasks: it.tasks(),
    ..
});

#[async_trait]
impl Discovery for EtcdDiscovery {
    async fn lease(&self) -> Result<Box<dyn Lease>, EngineError> {
        self.check_open()?;
        let (lease, held) = EtcdLease::grant(&self.sessions).await?;
        self.tasks.spawn(held.keep(self.shutdown.clone()));
        Ok(Box::new(lease))
    }

    async fn get(&self, prefix: &str) -> Result<Vec<Entry>, EngineError> {
        self.check_open()?;
        watch::get(&self.sessions, prefix).await
    }

    async fn watch(&self, prefix: &str) -> Result<Box<dyn Watch>, EngineError> {
        self.check_open()?;
        let feed = Feed::open(&self.sessions, prefix).await?;
        let (sender, receiver) = mpsc::channel(BACKLOG_CHANGES);
        let follower = Follower {
            sessions: Arc::clone(&self.sessions),
            prefix: prefix.to_owned(),
            changes: sender,
        };
        let follow = self
            .shutdown
            .clone()
            .run_until_cancelled_owned(follower.run(feed));
        let task = self.tasks.spawn(async move {
            follow.await;
        });
        Ok(Box::new(EtcdWatch::new(
            receiver,
            AbortOnDropHandle::new(task),
        )))
    }

    fn outages(&self) -> Gauge {
        self.sessions.outages()
    }
}
