//! [`EtcdWatch`]: a task that follows a prefix and feeds a channel.
//!
//! It reads everything at a revision and watches from the next one on, so it misses nothing. When the watch ends, for any
//! reason (the connection broke, the history was compacted, the server lost its leader), it starts over.
//!
//! A hanging server does not end a watch: the task requests a sign of life at intervals, so that it recognizes silence.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::EngineError;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::client::{Client, Conversation};
use super::known::Known;
use super::protocol::{
    Event, KeyValue, RangeRequest, WatchCreateRequest, WatchOrder, WatchRequest, WatchResponse,
    prefix_range,
};
use super::session::{Failure, Pauses, Sessions, problem_of};
use crate::discovery::{Change, Entry, Watch};

/// Changes that may queue for a slow watcher. When the queue is full, the task stops reading and etcd buffers the rest.
pub(super) const BACKLOG_CHANGES: usize = 1024;

/// How often per time to live of a lease the task requests a sign of life from the server.
const SIGNS_PER_TTL: u32 = 3;

/// A stream of changes.
type Changes = Conversation<WatchRequest, WatchResponse>;

/// The handle: dropping it ends the task.
pub(super) struct EtcdWatch {
    changes: mpsc::Receiver<Change>,
    _task: AbortOnDropHandle<()>,
}

impl EtcdWatch {
    pub(super) fn new(changes: mpsc::Receiver<Change>, task: AbortOnDropHandle<()>) -> Self {
        Self {
            changes,
            _task: task,
        }
    }
}

#[async_trait]
impl Watch for EtcdWatch {
    async fn next(&mut self) -> Option<Change> {
        self.changes.recv().await
    }
}

/// The entries under a prefix, and the changes that follow.
pub(super) struct Feed {
    entries: Vec<Entry>,
    changes: Changes,
}

impl Feed {
    pub(super) async fn open(sessions: &Sessions, prefix: &str) -> Result<Self, Failure> {
        let what = format!("watching {prefix:?}");
        sessions
            .perform(&what, move |client: Client| async move {
                let (entries, revision) = get_all(&client, prefix).await?;
                let changes = watch_from(&client, prefix, revision + 1).await?;
                Ok(Self { entries, changes })
            })
            .await
    }
}

/// The entries under a prefix.
pub(super) async fn get(sessions: &Sessions, prefix: &str) -> Result<Vec<Entry>, EngineError> {
    let what = format!("reading {prefix:?}");
    let answer = sessions
        .perform(&what, move |client: Client| async move {
            get_all(&client, prefix).await
        })
        .await?;
    Ok(answer.0)
}

/// The entries under a prefix, and the store's revision at that time.
async fn get_all(client: &Client, prefix: &str) -> Result<(Vec<Entry>, i64), Status> {
    let (key, range_end) = prefix_range(prefix);
    let answer = client.call(RangeRequest { key, range_end }).await?;
    let header = answer
        .header
        .ok_or_else(|| Status::internal("an answer without a header"))?;
    let entries = answer.kvs.into_iter().filter_map(entry_of).collect();
    Ok((entries, header.revision))
}

async fn watch_from(client: &Client, prefix: &str, revision: i64) -> Result<Changes, Status> {
    let (key, range_end) = prefix_range(prefix);
    let create = WatchOrder::Create(WatchCreateRequest {
        key,
        range_end,
        start_revision: revision,
    });
    let mut changes = client.watch(order(create)).await?;
    match changes.next().await? {
        Some(answer) if answer.created && !answer.canceled => Ok(changes),
        Some(answer) => Err(Status::unavailable(reason(&answer))),
        None => Err(Status::unavailable("the server ended the watch")),
    }
}

fn order(order: WatchOrder) -> WatchRequest {
    WatchRequest { order: Some(order) }
}

/// The task behind an [`EtcdWatch`].
pub(super) struct Follower {
    pub(super) sessions: Arc<Sessions>,
    pub(super) prefix: String,
    pub(super) changes: mpsc::Sender<Change>,
}

/// The watcher is gone.
struct Gone;

impl Follower {
    /// Follows until the watcher is gone.
    pub(super) async fn run(self, mut feed: Feed) {
        let mut known = Known::new(self.sessions.config().lease_ttl);
        let mut gap = Duration::ZERO;
        loop {
            let entries = std::mem::take(&mut feed.entries);
            let snapshot = known.resynced(entries, Instant::now(), gap);
            if self.tell([snapshot]).await.is_err() {
                return;
            }
            let Ok(reason) = self.follow(&mut feed.changes, &mut known).await else {
                return;
            };
            if let Some(unlogged) = self.sessions.logged().unlogged("watch ended") {
                tracing::info!(
                    prefix = self.prefix,
                    reason,
                    unlogged,
                    "a watch of etcd ended, and starts over; further ends are only counted for a minute"
                );
            }
            let gap_began = Instant::now();
            feed = self.reopen().await;
            gap = gap_began.elapsed();
        }
    }

    /// Passes changes on until there is a gap; returns the reason for the gap.
    async fn follow(&self, changes: &mut Changes, known: &mut Known) -> Result<String, Gone> {
        let mut pulse = Pulse::new(self.sessions.config().lease_ttl / SIGNS_PER_TTL);
        loop {
            let grace = known.next_end_of_grace();
            let news = tokio::select! {
                message = changes.next() => {
                    let now = Instant::now();
                    if pulse.has_stopped(now) {
                        tracing::info!(prefix = self.prefix, "etcd hung; entries that it removes now stay known for a while");
                        known.stalled(now);
                    }
                    pulse.silent_since = now;
                    match message {
                        Ok(Some(answer)) if answer.canceled => return Ok(reason(&answer)),
                        Ok(Some(answer)) => changes_of(answer, known, now),
                        Ok(None) => return Ok("the server ended it".into()),
                        Err(status) => return Ok(problem_of(&status)),
                    }
                }
                () = until(grace) => known.end_graces(Instant::now()),
                () = tokio::time::sleep_until(pulse.next_sign) => {
                    pulse.next_sign = Instant::now() + pulse.interval;
                    match changes.send(order(WatchOrder::Progress(()))) {
                        Ok(()) => Vec::new(),
                        Err(status) => return Ok(problem_of(&status)),
                    }
                }
            };
            let told_from = Instant::now();
            self.tell(news).await?;
            // While the watcher took no changes, we did not read from etcd.
            pulse.silent_since += told_from.elapsed();
        }
    }

    async fn tell(&self, changes: impl IntoIterator<Item = Change>) -> Result<(), Gone> {
        for change in changes {
            self.changes.send(change).await.map_err(|_| Gone)?;
        }
        Ok(())
    }

    /// Opens a new feed, however long that takes.
    async fn reopen(&self) -> Feed {
        let mut pauses = Pauses::new();
        let mut outage = None;
        loop {
            match Feed::open(&self.sessions, &self.prefix).await {
                Ok(feed) => {
                    if self.sessions.watch_opened() {
                        tracing::info!("discovery can be watched again");
                    }
                    return feed;
                }
                Err(failure) => {
                    outage.get_or_insert_with(|| self.sessions.outage());
                    if let Some(unlogged) = self.sessions.watch_failed() {
                        let error = EngineError::from(failure);
                        tracing::warn!(%error, unlogged, "discovery cannot be watched, and known instances stay in use; further failures are only counted for a minute");
                    }
                }
            }
            pauses.wait().await;
        }
    }
}

/// The requested signs of life of a server.
struct Pulse {
    interval: Duration,
    silent_since: Instant,
    next_sign: Instant,
}

impl Pulse {
    fn new(interval: Duration) -> Self {
        let now = Instant::now();
        Self {
            interval,
            silent_since: now,
            next_sign: now + interval,
        }
    }

    /// Whether a sign of life was due and missing. The last one may have arrived just before the next request, hence two
    /// intervals.
    fn has_stopped(&self, now: Instant) -> bool {
        now.duration_since(self.silent_since) > self.interval * 2
    }
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// Why the server cancelled a watch.
fn reason(answer: &WatchResponse) -> String {
    match (answer.compact_revision, answer.cancel_reason.as_str()) {
        (0, "") => "the server cancelled it".into(),
        (0, reason) => reason.into(),
        (revision, _) => format!("the history before revision {revision} was compacted"),
    }
}

fn changes_of(answer: WatchResponse, known: &mut Known, now: Instant) -> Vec<Change> {
    let events = answer.events.into_iter();
    events
        .filter_map(|event| change_of(event, known, now))
        .collect()
}

fn change_of(event: Event, known: &mut Known, now: Instant) -> Option<Change> {
    let entry = entry_of(event.kv?)?;
    if event.kind == Event::DELETE {
        known.removed(entry.key, now)
    } else {
        Some(known.put(entry))
    }
}

/// `None`, with a warning, for a key that is not text: it is not ours.
fn entry_of(pair: KeyValue) -> Option<Entry> {
    match String::from_utf8(pair.key) {
        Ok(key) => Some(Entry {
            key,
            value: pair.value,
        }),
        Err(error) => {
            tracing::warn!(key = ?error.as_bytes(), "a key in etcd is no UTF-8; it is left out");
            None
        }
    }
}
