//! Discovery in etcd: for fleets. Built with the cargo feature `etcd`, which needs no other program.
//!
//! - [`config`]: what a user says, and its checks.
//! - [`protocol`], [`client`]: etcd's messages, and one server that is sent them.
//! - [`session`]: one operation on one of several servers, before a deadline.
//! - [`lease`]: a lease, the task that keeps it alive, and its entries.
//! - [`watch`]: the task that follows a prefix; [`known`] decides what its watcher is told.
//!
//! # When etcd is away
//! Nothing is taken off a watcher's list because etcd cannot be reached. When it is back, a watcher gets a snapshot, in which
//! entries that etcd no longer has are kept for one more time to live: their owners may have been cut off as well, or etcd may have
//! lost its data, and owners put their entries again within that time. What is not put again by then is removed.
//!
//! A lease outlives a disconnection shorter than its time to live, and longer ones when etcd itself was down: etcd starts its
//! leases anew when it starts. A lease is lost when etcd says that it does not have it.

mod client;
mod config;
mod known;
mod lease;
mod protocol;
mod session;
mod watch;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use genset_backend_common::{EngineError, ErrorKind};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

pub use config::{EtcdConfig, EtcdCredentials, EtcdIdentity, EtcdTls};

use self::lease::EtcdLease;
use self::session::Sessions;
use self::watch::{BACKLOG_CHANGES, EtcdWatch, Feed, Follower};
use super::{Discovery, Entry, Lease, Watch};

/// A store in etcd, version 3.4 or newer. Clones share.
///
/// Operations that cannot reach etcd fail as `Unavailable` within the request timeout, and may be tried again. Leases and
/// watches try by themselves.
///
/// Dropping a lease makes a task revoke it. When the tokio runtime ends before that task does, the entries stay until the lease
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
    /// Discovery on the servers that `config` names. They need not be up yet: connections are made when they are first needed,
    /// and made again whenever they break.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field of the config that is wrong.
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

    /// Revokes every lease, ends every watch, and waits until that is done: at most the request timeout. Operations after it
    /// fail as `Unavailable`.
    ///
    /// # Cancel safety
    /// Leases and watches end also when the future is dropped.
    pub async fn shutdown(&self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Tasks that keep leases alive or follow prefixes.
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

impl fmt::Debug for EtcdDiscovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdDiscovery")
            .field("endpoints", &self.sessions.to_string())
            .field("tasks", &self.tasks())
            .finish_non_exhaustive()
    }
}

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
}
