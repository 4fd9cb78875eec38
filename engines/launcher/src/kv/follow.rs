//! [`KvFollower`]: reads a server's KV events for as long as it serves, and publishes them.
//!
//! Batches are numbered from 0. Where a number is missing, the server is asked for those after the last one that was read; so
//! it is at the beginning, and whenever nothing came for a while, since the last batch may be the one that was lost. What it no
//! longer has is lost, and then nothing is known of its cache: that is told as a cleared one.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};
use zeromq::ZmqMessage;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqError};

use super::KvSource;
use super::batch::Batch;
use super::translate::Translator;
use crate::dialect::Dialect;
use crate::server::Server;

/// How long nothing may come until the server is asked.
const QUIET: Duration = Duration::from_secs(5);
/// How long it may take to give batches again, the pause between two of them included.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before a connection that broke is made again.
const RETRY: Duration = Duration::from_secs(1);
/// The blocks that are kept of a server that does not say how many it has.
const MAX_BLOCKS: usize = 1 << 22;
/// The number that ends what is given again.
const END: u64 = u64::MAX;

/// The clears of a cache that were asked for by others than the server, for all of its ranks. vLLM itself tells a clear only with its
/// next request.
#[derive(Debug)]
pub(crate) struct Clears {
    publisher: KvEventPublisher,
    /// Locked while anything is published, so that a clear is before a batch or behind it.
    count: Mutex<u64>,
}

impl Clears {
    /// Those of a cache whose events `publisher` publishes.
    pub(crate) fn new(publisher: KvEventPublisher) -> Arc<Self> {
        let count = Mutex::new(0);
        Arc::new(Self { publisher, count })
    }

    /// Tells that the cache is empty. Batches of before, which are still to be read, then build on nothing.
    pub(crate) fn clear(&self) {
        let mut count = self.count.lock();
        *count += 1;
        self.publisher.publish(KvEventData::Cleared);
    }
}

/// Follows a rank of the servers of one engine, one after the other.
#[derive(Debug, Clone)]
pub(crate) struct KvFollower {
    pub(crate) source: Arc<KvSource>,
    /// The data-parallel rank whose events they are.
    pub(crate) rank: u32,
    pub(crate) publisher: KvEventPublisher,
    pub(crate) clears: Arc<Clears>,
    /// Tokens per KV block.
    pub(crate) block_size: NonZeroU32,
    /// KV blocks in all.
    pub(crate) total_blocks: Option<u64>,
}

/// Why a server cannot be followed now.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Socket(#[from] ZmqError),
    #[error("a message of {0} parts")]
    Message(usize),
}

impl KvFollower {
    /// Follows until the server is over, and tells then that its cache is gone.
    pub(crate) async fn run(self, server: Arc<Server>) {
        tokio::select! {
            biased;
            _ = server.ended() => {}
            () = self.follow() => {}
        }
        self.publisher.publish(KvEventData::Cleared);
    }

    async fn follow(&self) {
        loop {
            if let Err(error) = self.session().await {
                tracing::warn!(%error, rank = self.rank, "the KV events of the server cannot be read now");
                self.publisher.publish(KvEventData::Cleared);
            }
            sleep(RETRY).await;
        }
    }

    /// Reads events until something breaks.
    async fn session(&self) -> Result<(), FollowError> {
        let mut events = SubSocket::new();
        events.connect(&self.source.events(self.rank)).await?;
        events.subscribe("").await?;
        let mut replay = self.replay_socket().await?;
        let dialect = self.source.dialect;
        let mut reader = Reader::new(dialect, self.rank, self.block_size, self.total_blocks);
        self.catch_up(&mut replay, &mut reader).await?;
        loop {
            tokio::select! {
                message = events.recv() => {
                    let (number, payload) = parts(message?, 0)?;
                    if number > reader.next {
                        self.catch_up(&mut replay, &mut reader).await?;
                    }
                    self.publish(&mut reader, number, &payload);
                }
                () = sleep(QUIET) => self.catch_up(&mut replay, &mut reader).await?,
            }
        }
    }

    /// What the server is asked through for batches that were missed.
    async fn replay_socket(&self) -> Result<DealerSocket, FollowError> {
        let mut replay = DealerSocket::new();
        replay.connect(&self.source.replay(self.rank)).await?;
        Ok(replay)
    }

    /// Reads what was missed, as far as the server still has it.
    async fn catch_up(
        &self,
        replay: &mut DealerSocket,
        reader: &mut Reader,
    ) -> Result<(), FollowError> {
        let mut ask = ZmqMessage::from(Bytes::new());
        ask.push_back(Bytes::copy_from_slice(&reader.next.to_be_bytes()));
        replay.send(ask).await?;
        loop {
            let Ok(message) = timeout(REPLAY_TIMEOUT, replay.recv()).await else {
                tracing::debug!("the server gave no KV events again in time");
                // What it gives later would be taken for the answer to the next question, and so on for ever.
                *replay = self.replay_socket().await?;
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

/// The number and the payload of a message: behind its topic, and behind `before` more parts.
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

/// Batches in order become changes. Pure.
#[derive(Debug)]
pub(super) struct Reader {
    /// The number of the batch that is read next.
    pub(super) next: u64,
    /// The clears by others that are known.
    clears: u64,
    rank: u32,
    translator: Translator,
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
        }
    }

    /// Forgets what is gone if others have told the cache to be empty since, which they have `clears` times.
    pub(super) fn forget(&mut self, clears: u64) {
        if clears != self.clears {
            self.clears = clears;
            self.translator.clear();
        }
    }

    /// What a batch changes. One that was read is passed over; one before which others are missing, or that cannot be read,
    /// leaves nothing known.
    pub(super) fn take(&mut self, number: u64, payload: &[u8]) -> Vec<KvEventData> {
        if number < self.next {
            return Vec::new();
        }
        let mut changes = Vec::new();
        if number > self.next {
            let missed = number - self.next;
            tracing::warn!(missed, "KV events of the server are lost");
            changes.push(self.translator.clear());
        }
        self.next = number.saturating_add(1);
        match Batch::read(payload) {
            Ok(batch) if batch.rank.is_some_and(|rank| rank != self.rank) => {
                tracing::warn!(
                    told = batch.rank,
                    rank = self.rank,
                    "KV events of the server are of another rank"
                );
                changes.push(self.translator.clear());
            }
            Ok(batch) => {
                for event in batch.events {
                    changes.extend(self.translator.apply(event));
                }
            }
            Err(error) => {
                tracing::warn!(%error, "KV events of the server cannot be read");
                changes.push(self.translator.clear());
            }
        }
        changes
    }
}
