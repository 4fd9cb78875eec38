//! [`KvFollower`]: reads a server's KV events while it serves, and publishes them.
//!
//! At sockets, batches are numbered from 0. If a number is missing, the follower asks the server to replay the batches after the
//! last one read. It does so at the beginning, too, and after a silence, since the last batch may be the lost one. Batches that
//! the server no longer has are lost. Then nothing is known of its cache, and the follower publishes that it was cleared. A route
//! gives each event once, so what a failed poll would have given is lost in the same way.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use genset_backend_common::log_limit::OncePerMinute;
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};
use zeromq::ZmqMessage;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqError};

use super::batch::Batch;
use super::route::{self, RouteReader};
use super::translate::Translator;
use super::{KvFeed, KvSource};
use crate::dialect::Dialect;
use crate::http::{Client, HttpError};
use crate::server::Server;

/// The silence after which the server is asked for a replay.
const QUIET: Duration = Duration::from_secs(5);
/// The time limit of a replay, including the pause between two batches.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before reconnecting.
const RETRY: Duration = Duration::from_secs(1);
/// The pause between two polls of a route.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The time limit of a poll. TensorRT-LLM may wait for an event for 2 seconds.
const POLL_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum size of a poll's answer, in bytes. A token takes about 60.
const MAX_POLL_BYTES: usize = 256 << 20;
/// The maximum number of blocks to track for a server that does not report how many it has.
const MAX_BLOCKS: usize = 1 << 22;
/// The number that ends a replay.
const END: u64 = u64::MAX;

/// Cache clears that an operator requested, for all ranks of a server. vLLM publishes such a clear only with its next request.
#[derive(Debug)]
pub(crate) struct Clears {
    publisher: KvEventPublisher,
    /// Locked while anything is published, so that a clear comes before or after a batch.
    count: Mutex<u64>,
}

impl Clears {
    /// For the cache whose events `publisher` publishes.
    pub(crate) fn new(publisher: KvEventPublisher) -> Arc<Self> {
        let count = Mutex::new(0);
        Arc::new(Self { publisher, count })
    }

    /// Publishes that the cache is empty. Unread batches from before then have no known parent.
    pub(crate) fn clear(&self) {
        let mut count = self.count.lock();
        *count += 1;
        self.publisher.publish(KvEventData::Cleared);
    }
}

/// Follows one rank of an engine's servers, one server after another.
#[derive(Debug, Clone)]
pub(crate) struct KvFollower {
    pub(crate) feed: KvFeed,
    /// The data-parallel rank whose events they are.
    pub(crate) rank: u32,
    pub(crate) publisher: KvEventPublisher,
    pub(crate) clears: Arc<Clears>,
    /// Tokens per KV block.
    pub(crate) block_size: NonZeroU32,
    /// The total number of KV blocks.
    pub(crate) total_blocks: Option<u64>,
}

/// Why a server's events cannot be read at the moment.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Socket(#[from] ZmqError),
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("its answer is not what it should be: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("it does not answer in time")]
    Silent,
    #[error("a message of {0} parts")]
    Message(usize),
}

impl KvFollower {
    /// Follows until the server has ended, then publishes that its cache is gone.
    pub(crate) async fn run(self, server: Arc<Server>) {
        tokio::select! {
            biased;
            _ = server.ended() => {}
            () = self.follow(&server) => {}
        }
        self.publisher.publish(KvEventData::Cleared);
    }

    async fn follow(&self, server: &Server) {
        let logged = OncePerMinute::default();
        loop {
            if let Err(error) = self.session(server).await {
                if let Some(unlogged) = logged.unlogged("session") {
                    tracing::warn!(%error, rank = self.rank, unlogged, "the KV events of the server cannot be read now; further failures are only counted for a minute");
                }
                self.publisher.publish(KvEventData::Cleared);
            }
            sleep(RETRY).await;
        }
    }

    /// Reads events until an error occurs.
    async fn session(&self, server: &Server) -> Result<(), FollowError> {
        match &self.feed {
            KvFeed::Sockets(source) => self.at_sockets(source).await,
            KvFeed::Route => self.at_route(&server.client).await,
        }
    }

    async fn at_route(&self, client: &Client) -> Result<(), FollowError> {
        let mut reader = RouteReader::new(self.block_size, MAX_BLOCKS);
        loop {
            let answer = timeout(POLL_TIMEOUT, polled(client)).await;
            let answer = answer.map_err(|_| FollowError::Silent)??;
            for change in reader.take(&answer)? {
                self.publisher.publish(change);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn at_sockets(&self, source: &KvSource) -> Result<(), FollowError> {
        let mut events = SubSocket::new();
        events.connect(&source.events(self.rank)).await?;
        events.subscribe("").await?;
        let mut replay = self.replay_socket(source).await?;
        let dialect = source.dialect;
        let mut reader = Reader::new(dialect, self.rank, self.block_size, self.total_blocks);
        self.catch_up(source, &mut replay, &mut reader).await?;
        loop {
            tokio::select! {
                message = events.recv() => {
                    let (number, payload) = parts(message?, 0)?;
                    if number > reader.next {
                        self.catch_up(source, &mut replay, &mut reader).await?;
                    }
                    self.publish(&mut reader, number, &payload);
                }
                () = sleep(QUIET) => self.catch_up(source, &mut replay, &mut reader).await?,
            }
        }
    }

    /// The socket for replay requests.
    async fn replay_socket(&self, source: &KvSource) -> Result<DealerSocket, FollowError> {
        let mut replay = DealerSocket::new();
        replay.connect(&source.replay(self.rank)).await?;
        Ok(replay)
    }

    /// Reads missed batches, as far as the server still has them.
    async fn catch_up(
        &self,
        source: &KvSource,
        replay: &mut DealerSocket,
        reader: &mut Reader,
    ) -> Result<(), FollowError> {
        let mut ask = ZmqMessage::from(Bytes::new());
        ask.push_back(Bytes::copy_from_slice(&reader.next.to_be_bytes()));
        replay.send(ask).await?;
        loop {
            let Ok(message) = timeout(REPLAY_TIMEOUT, replay.recv()).await else {
                tracing::debug!("the server gave no KV events again in time");
                // Otherwise a late answer would be taken for the answer to the next question, and so on.
                *replay = self.replay_socket(source).await?;
                return Ok(());
            };
            let (number, payload) = parts(message?, 1)?;
            if number == END {
                return Ok(());
            }
            self.publish(reader, number, &payload);
        }
    }

    fn publish(&self, reader: &mut Reader, number: u64, payload: &[u8]) {
        let clears = self.clears.count.lock();
        reader.forget(*clears);
        for change in reader.take(number, payload) {
            self.publisher.publish(change);
        }
    }
}

/// The events since the last poll, as the route gives them.
async fn polled(client: &Client) -> Result<Vec<u8>, HttpError> {
    let answer = client.post(route::PATH, Bytes::new(), &[]).await?;
    if !answer.status.is_success() {
        return Err(HttpError::Status(answer.status));
    }
    answer.body.read_up_to(MAX_POLL_BYTES).await
}

/// The number and the payload of a message: after its topic and `before` more parts.
fn parts(message: ZmqMessage, before: usize) -> Result<(u64, Bytes), FollowError> {
    let count = message.len();
    let mut parts = message.into_vec().into_iter().skip(before + 1);
    let number = parts
        .next()
        .and_then(|number| Some(u64::from_be_bytes(number.as_ref().try_into().ok()?)));
    match (number, parts.next()) {
        (Some(number), Some(payload)) => Ok((number, payload)),
        _ => Err(FollowError::Message(count)),
    }
}

/// Converts batches in order to changes. Pure.
#[derive(Debug)]
pub(super) struct Reader {
    /// The number of the batch that is read next.
    pub(super) next: u64,
    /// The number of operator clears seen.
    clears: u64,
    rank: u32,
    translator: Translator,
    /// Limits the log: what is wrong with one batch is mostly wrong with all, and there is one for each step.
    logged: OncePerMinute,
}

impl Reader {
    pub(super) fn new(
        dialect: Dialect,
        rank: u32,
        block_size: NonZeroU32,
        total_blocks: Option<u64>,
    ) -> Self {
        let max_blocks = total_blocks.and_then(|blocks| usize::try_from(blocks).ok());
        Self {
            next: 0,
            clears: 0,
            rank,
            translator: Translator::new(dialect, block_size, max_blocks.unwrap_or(MAX_BLOCKS)),
            logged: OncePerMinute::default(),
        }
    }

    /// Clears the map if an operator has cleared the cache since; `clears` is the number of those clears so far.
    pub(super) fn forget(&mut self, clears: u64) {
        if clears != self.clears {
            self.clears = clears;
            self.translator.clear();
        }
    }

    /// Returns the changes of a batch. Skips a batch that was read before. After a gap, or if the batch cannot be decoded, the
    /// changes include a clear.
    pub(super) fn take(&mut self, number: u64, payload: &[u8]) -> Vec<KvEventData> {
        if number < self.next {
            return Vec::new();
        }
        let mut changes = Vec::new();
        if number > self.next {
            let missed = number - self.next;
            if let Some(unlogged) = self.logged.unlogged("lost") {
                tracing::warn!(
                    missed,
                    unlogged,
                    "KV events of the server are lost; further gaps are only counted for a minute"
                );
            }
            changes.push(self.translator.clear());
        }
        self.next = number.saturating_add(1);
        match Batch::read(payload) {
            Ok(batch) if batch.rank.is_some_and(|rank| rank != self.rank) => {
                if let Some(unlogged) = self.logged.unlogged("another rank") {
                    tracing::warn!(
                        told = batch.rank,
                        rank = self.rank,
                        unlogged,
                        "KV events of the server are of another rank; further batches are only counted for a minute"
                    );
                }
                changes.push(self.translator.clear());
            }
            Ok(batch) => {
                for event in batch.events {
                    changes.extend(self.translator.apply(event));
                }
            }
            Err(error) => {
                if let Some(unlogged) = self.logged.unlogged("unreadable") {
                    tracing::warn!(%error, unlogged, "KV events of the server cannot be read; further batches are only counted for a minute");
                }
                changes.push(self.translator.clear());
            }
        }
        changes
    }
}
