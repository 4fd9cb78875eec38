//! [`EtcdLease`]: entries under an etcd lease, which a task keeps alive.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use genset_backend_common::{EngineError, error::At};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::client::{Client, Conversation};
use super::protocol::{
    Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseRevokeRequest, LeaseTimeToLiveRequest, Operation, PutRequest, RangeRequest, RequestOp,
    TxnRequest,
};
use super::session::{Failure, Pauses, Sessions};
use crate::discovery::{Entry, Lease, lease_lost};

/// Keep-alives per time to live.
const BEATS_PER_TTL: u32 = 3;

/// A stream of keep-alives.
type Beating = Conversation<LeaseKeepAliveRequest, LeaseKeepAliveResponse>;

/// The handle: dropping it makes the task revoke the lease.
pub(super) struct EtcdLease {
    held: Arc<Held>,
}

/// State shared by the handle and the task.
pub(super) struct Held {
    id: i64,
    beat: Duration,
    sessions: Arc<Sessions>,
    /// The entries that we keep in etcd. Locked during each request that changes them there, so that re-putting entries after an
    /// outage never overtakes a newer put. Every request has a deadline, so nobody waits for long.
    entries: Mutex<BTreeMap<String, Bytes>>,
    dropped: CancellationToken,
    lost: CancellationToken,
}

impl EtcdLease {
    /// Acquires a lease. The caller must run [`Held::keep`].
    pub(super) async fn grant(sessions: &Arc<Sessions>) -> Result<(Self, Arc<Held>), EngineError> {
        let ttl = i64::try_from(sessions.config().lease_ttl.as_secs()).unwrap_or(i64::MAX);
        let granted = sessions
            .perform("taking a lease", move |client: Client| async move {
                client.call(LeaseGrantRequest { ttl }).await
            })
            .await?;
        // A server may grant more than requested.
        let ttl = Duration::from_secs(granted.ttl.unsigned_abs());
        let held = Arc::new(Held {
            id: granted.id,
            beat: ttl / BEATS_PER_TTL,
            sessions: Arc::clone(sessions),
            entries: Mutex::new(BTreeMap::new()),
            dropped: CancellationToken::new(),
            lost: CancellationToken::new(),
        });
        let lease = Self {
            held: Arc::clone(&held),
        };
        Ok((lease, held))
    }
}

impl Drop for EtcdLease {
    fn drop(&mut self) {
        self.held.dropped.cancel();
    }
}

#[async_trait]
impl Lease for EtcdLease {
    async fn put(&self, entry: Entry) -> Result<(), EngineError> {
        self.held.check_size(&entry)?;
        let mut entries = self.held.entries.lock().await;
        if self.held.lost.is_cancelled() {
            return Err(lease_lost());
        }
        match self.held.put(&entry).await {
            Ok(()) => {
                entries.insert(entry.key, entry.value);
                Ok(())
            }
            Err(failure) => {
                if matches!(failure, Failure::NotFound) {
                    self.held.lost.cancel();
                }
                Err(failure.into())
            }
        }
    }

    async fn remove(&self, key: &str) -> Result<(), EngineError> {
        let mut entries = self.held.entries.lock().await;
        // First of all, make sure it is not put again.
        entries.remove(key);
        if self.held.lost.is_cancelled() {
            return Ok(());
        }
        Ok(self.held.remove(key).await?)
    }

    async fn lost(&self) {
        self.held.lost.cancelled().await;
    }
}

impl Held {
    /// Keeps the lease alive until etcd has lost it. Revokes it when it is dropped or `shutdown` is cancelled.
    pub(super) async fn keep(self: Arc<Self>, shutdown: CancellationToken) {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => self.revoke().await,
            () = self.dropped.cancelled() => self.revoke().await,
            () = self.until_lost() => {
                tracing::warn!(lease = self.id, "etcd lost a lease, with everything under it");
            }
        }
        self.lost.cancel();
    }

    /// Failing to reach etcd does not end this: only etcd knows whether it still has the lease.
    async fn until_lost(&self) {
        let mut pauses = Pauses::new();
        let logged = self.sessions.logged();
        let mut outage = None;
        loop {
            match self.start_beating().await {
                Ok(beating) => {
                    if outage.take().is_some() {
                        tracing::info!(lease = self.id, "etcd is back; the lease continues");
                    }
                    pauses = Pauses::new();
                    self.beat_until_broken(beating).await;
                    tracing::debug!(lease = self.id, "keeping a lease alive was interrupted");
                }
                Err(Failure::NotFound) => return,
                Err(Failure::Other(error)) => {
                    outage.get_or_insert_with(|| self.sessions.outage());
                    if let Some(unlogged) = logged.unlogged("not kept alive") {
                        tracing::warn!(lease = self.id, %error, unlogged, "a lease cannot be kept alive now; further failures are only counted for a minute");
                    }
                }
            }
            pauses.wait().await;
        }
    }

    async fn start_beating(&self) -> Result<Beating, Failure> {
        let beating =
            self.sessions
                .perform("keeping a lease alive", move |client: Client| async move {
                    let beat = LeaseKeepAliveRequest { id: self.id };
                    let mut beating = client.lease_keep_alive(beat).await?;
                    if is_alive(&mut beating).await? {
                        Ok(beating)
                    } else {
                        Err(Status::not_found("the lease is gone"))
                    }
                });
        // Keep-alive first: putting entries again may take a while.
        let beating = match beating.await {
            Ok(beating) => beating,
            Err(failure) => {
                self.check_entries().await?;
                return Err(failure);
            }
        };
        self.check_entries().await?;
        Ok(beating)
    }

    /// Puts the entries again that etcd lost although it has the lease, and those whose value it lost, as after it restarts with
    /// older data.
    async fn check_entries(&self) -> Result<(), Failure> {
        let mut entries = self.entries.lock().await;
        let attached = self.attached_keys().await?;
        let mut of_others = Vec::new();
        for (key, value) in entries.iter() {
            let entry = Entry {
                key: key.clone(),
                value: value.clone(),
            };
            let was_put = if holds(&attached, key) {
                self.value(key).await?.as_ref() != Some(value)
                    && self
                        .put_if(Compare::has_lease(key, self.id), &entry)
                        .await?
            } else {
                self.put_if(Compare::is_absent(key), &entry).await?
            };
            if was_put {
                tracing::info!(key, "an entry that etcd had lost is put again");
            } else if !holds(&attached, key) && !holds(&self.attached_keys().await?, key) {
                // Another lease owns the key, as when the same instance is listed again. If this lease does, then only the answer
                // to the first attempt to put it was lost.
                of_others.push(key.clone());
            }
        }
        entries.retain(|key, _| !of_others.contains(key));
        Ok(())
    }

    /// The value of a key in etcd.
    async fn value(&self, key: &str) -> Result<Option<Bytes>, Failure> {
        let what = format!("reading {key}");
        self.sessions
            .perform(&what, move |client: Client| async move {
                let request = RangeRequest {
                    key: key.into(),
                    range_end: Vec::new(),
                };
                let found = client.call(request).await?.kvs.pop();
                Ok(found.map(|pair| pair.value))
            })
            .await
    }

    /// The keys that etcd holds under the lease; `NotFound` if it does not have the lease.
    async fn attached_keys(&self) -> Result<Vec<Vec<u8>>, Failure> {
        let answer = self
            .sessions
            .perform("looking up a lease", move |client: Client| async move {
                let request = LeaseTimeToLiveRequest {
                    id: self.id,
                    keys: true,
                };
                client.call(request).await
            })
            .await?;
        // Whole seconds: 0 for a lease with less than one left, -1 for one that is gone.
        if answer.ttl < 0 {
            return Err(Failure::NotFound);
        }
        Ok(answer.keys)
    }

    /// Sends keep-alives until one gets no answer in time, the connection breaks, or etcd reports that the lease or one of its
    /// entries is gone.
    async fn beat_until_broken(&self, mut beating: Beating) {
        let patience = self.beat.min(self.sessions.config().request_timeout);
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.beat) => {}
                // No request is open, so this is the end of the connection.
                _ = beating.next() => return,
            }
            match timeout(patience, self.beat_once(&mut beating)).await {
                Ok(true) => {}
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// Whether etcd says that it still has the lease and its entries.
    async fn beat_once(&self, beating: &mut Beating) -> bool {
        let is_sent = beating.send(LeaseKeepAliveRequest { id: self.id }).is_ok();
        is_sent && matches!(is_alive(beating).await, Ok(true)) && self.has_entries().await
    }

    /// Whether etcd has every entry under the lease: somebody may have deleted them by hand.
    async fn has_entries(&self) -> bool {
        // Entries that are being changed are looked at next time.
        let Ok(entries) = self.entries.try_lock() else {
            return true;
        };
        match self.attached_keys().await {
            Ok(attached) => entries.keys().all(|key| holds(&attached, key)),
            Err(_) => false,
        }
    }

    fn check_size(&self, entry: &Entry) -> Result<(), EngineError> {
        let (bytes, limit) = (
            entry.key.len() + entry.value.len(),
            self.sessions.config().max_entry_bytes,
        );
        if bytes > limit {
            let problem = format!(
                "the entry {} has {bytes} bytes, and etcd.max_entry_bytes allows {limit}; make the model card smaller, or raise it \
                 and the servers' --max-request-bytes",
                entry.key
            );
            return Err(EngineError::invalid_argument(At::other("entry"), problem));
        }
        Ok(())
    }

    fn put_of(&self, entry: &Entry) -> PutRequest {
        PutRequest {
            key: entry.key.as_str().into(),
            value: entry.value.clone(),
            lease: self.id,
        }
    }

    async fn put(&self, entry: &Entry) -> Result<(), Failure> {
        let what = format!("putting {}", entry.key);
        self.sessions
            .perform(&what, move |client: Client| async move {
                client.call(self.put_of(entry)).await
            })
            .await
    }

    /// Puts the entry if the condition holds; returns whether the last attempt did.
    async fn put_if(&self, condition: Compare, entry: &Entry) -> Result<bool, Failure> {
        let what = format!("putting {} again", entry.key);
        let condition = &condition;
        self.sessions
            .perform(&what, move |client: Client| async move {
                let put = Operation::Put(self.put_of(entry));
                let txn = when(condition.clone(), put);
                Ok(client.call(txn).await?.succeeded)
            })
            .await
    }

    async fn remove(&self, key: &str) -> Result<(), Failure> {
        let what = format!("removing {key}");
        self.sessions
            .perform(&what, move |client: Client| async move {
                let delete = Operation::Delete(DeleteRangeRequest { key: key.into() });
                let txn = when(Compare::has_lease(key, self.id), delete);
                client.call(txn).await.map(drop)
            })
            .await
    }

    /// One attempt: if it fails, the lease expires by itself.
    async fn revoke(&self) {
        let revoked = self
            .sessions
            .perform("revoking a lease", move |client: Client| async move {
                client.call(LeaseRevokeRequest { id: self.id }).await
            });
        if let Err(Failure::Other(error)) = revoked.await {
            tracing::debug!(lease = self.id, %error, "a lease is left to expire");
        }
    }
}

/// Whether `key` is among `keys`.
fn holds(keys: &[Vec<u8>], key: &str) -> bool {
    keys.iter().any(|held| held == key.as_bytes())
}

/// Whether the answer to a keep-alive says that the lease is alive.
async fn is_alive(beating: &mut Beating) -> Result<bool, Status> {
    let answer = beating.next().await?;
    Ok(answer.is_some_and(|answer| answer.ttl > 0))
}

/// A transaction of one step under one condition.
fn when(condition: Compare, operation: Operation) -> TxnRequest {
    TxnRequest {
        compare: vec![condition],
        success: vec![RequestOp {
            request: Some(operation),
        }],
    }
}
