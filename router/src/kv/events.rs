//! Updates the index from workers' KV events: a snapshot, then numbered changes. After a gap or the end of a stream it takes a
//! new snapshot. Invalid events affect only their worker's entries; they are counted, and logged at most once a minute.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::kv::{BlockHash, KvEvent, KvEventData, StoredBlock, chains};
use genset_backend_common::{EngineError, RequestContext, log_limit::OncePerMinute};
use genset_runtime::plane::ResponseStream;
use genset_runtime::{Client, InstanceId, KvItem};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::fleet::{Fleet, Place};
use super::lag::Lag;
use super::metrics::ModelMetrics;
use crate::config::KvConfig;
use crate::index::{IndexReader, IndexWriter, Odd, Target};

/// Pause before resubscribing to a stream that ended.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(500);

/// Blocks stored, or links between runs followed or created, before yielding: some tens of microseconds.
const BLOCKS_A_TURN: usize = 512;

/// Runs swept before yielding.
const RUNS_A_TURN: u32 = 1024;

/// Snapshots of at least this many blocks are sorted on a blocking thread.
const LONG_SNAPSHOT: usize = 4096;

/// How long events may be missing before a warning: clients discover a new worker at different times.
const LOST_TIME: Duration = Duration::from_secs(5);

/// A model's index, with the state to maintain it.
#[derive(Debug)]
pub(super) struct Indexed {
    pub(super) writer: Mutex<IndexWriter>,
    pub(super) reader: IndexReader,
    pub(super) fleet: Arc<Fleet>,
    pub(super) metrics: ModelMetrics,
    pub(super) lag: Lag,
    /// Targets without an owner that still have entries.
    stale: Mutex<Vec<Stale>>,
    is_stale: Notify,
    /// A permit to sort a long snapshot, which takes several times its memory.
    ordering: Semaphore,
}

/// A target whose entries are to be removed, and the permit that its worker waits for.
#[derive(Debug)]
struct Stale {
    target: Target,
    _until_gone: Option<OwnedSemaphorePermit>,
}

impl Indexed {
    pub(super) fn new(metrics: ModelMetrics, config: &KvConfig) -> Self {
        let (mut writer, reader) = crate::index::index();
        writer.bound_targets(config.max_worker_blocks.get());
        Self {
            writer: Mutex::new(writer),
            reader,
            fleet: Arc::default(),
            lag: Lag::new(config.max_lag, metrics.clone()),
            metrics,
            stale: Mutex::default(),
            is_stale: Notify::new(),
            ordering: Semaphore::new(1),
        }
    }

    /// Schedules the removal of a target's entries; then the target is free.
    pub(super) fn discard(&self, target: Target) {
        self.discard_until_gone(target, None);
    }

    /// Like [`Self::discard`]; drops `until_gone` after the removal.
    fn discard_until_gone(&self, target: Target, until_gone: Option<OwnedSemaphorePermit>) {
        let stale = Stale {
            target,
            _until_gone: until_gone,
        };
        self.stale.lock().push(stale);
        self.is_stale.notify_one();
    }

    /// Removes the entries of targets without an owner; never ends. Readers ignore these targets meanwhile.
    pub(super) async fn sweep(self: Arc<Self>) {
        loop {
            self.is_stale.notified().await;
            loop {
                let Some(stale) = self.stale.lock().pop() else {
                    break;
                };
                let target = stale.target;
                let mut from = Some(0);
                while let Some(run) = from {
                    from = self.writer.lock().remove_target(target, run, RUNS_A_TURN);
                    tokio::task::yield_now().await;
                }
                self.fleet.forgotten(target);
                self.metrics.index_holds(self.reader.held_blocks());
            }
        }
    }

    /// Stores blocks, and yields regularly.
    async fn store(
        &self,
        target: Target,
        mut parent: Option<BlockHash>,
        blocks: &[BlockHash],
    ) -> Result<(), Odd> {
        let mut rest = blocks;
        while !rest.is_empty() {
            let part = &rest[..rest.len().min(BLOCKS_A_TURN)];
            let stored = (self.writer.lock()).store_part(target, parent, part, BLOCKS_A_TURN)?;
            parent = part[..stored].last().copied();
            rest = &rest[stored..];
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn remove(&self, target: Target, blocks: &[BlockHash]) -> Result<(), Odd> {
        let mut result = Ok(());
        for part in blocks.chunks(BLOCKS_A_TURN) {
            result = result.and(self.writer.lock().remove(target, part));
            tokio::task::yield_now().await;
        }
        result
    }
}

/// A place's entries in the index; dropping it discards them.
struct Publisher {
    indexed: Arc<Indexed>,
    place: Place,
    last_event: u64,
    target: Option<Target>,
    /// A target whose snapshot is incomplete.
    next: Option<Target>,
    /// Held while the entries it replaced are still in the index: each place has at most one such target beside its current one,
    /// however often it restarts with a snapshot.
    one_stale: Arc<Semaphore>,
    /// Whether blocks were left out since the last snapshot: their removal is then valid.
    has_left_out: bool,
    /// When events stopped; `None` while they arrive.
    lost_since: Option<Instant>,
    logged: OncePerMinute,
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let current = self.indexed.fleet.remove(self.place);
        for target in [current, self.next].into_iter().flatten() {
            self.indexed.discard(target);
        }
    }
}

/// The source of a model's KV events.
#[derive(Debug)]
pub(crate) enum Feed {
    /// One event stream for each worker.
    Whole(Client<(), KvItem>),
    /// One event stream for each rank, for workers with several.
    Ranks(Client<(), KvItem>, Client<u32, KvItem>),
}

impl Feed {
    /// Returns the number of places for which an instance with `ranks` ranks has events.
    pub(super) fn places(&self, ranks: u32) -> u32 {
        match self {
            Self::Whole(_) => 1,
            Self::Ranks(..) => ranks,
        }
    }

    async fn subscribe(
        &self,
        place: Place,
        is_only: bool,
    ) -> Result<ResponseStream<KvItem>, EngineError> {
        let Place { instance, rank } = place;
        let ctx = RequestContext::new("kv_events");
        match self {
            Self::Ranks(_, ranks) if !is_only => ranks.direct(instance, rank, ctx).await,
            Self::Whole(whole) | Self::Ranks(whole, _) => whole.direct(instance, (), ctx).await,
        }
    }
}

/// Follows the events of an instance with `ranks` ranks, until dropped.
pub(super) async fn follow(
    feed: Arc<Feed>,
    indexed: Arc<Indexed>,
    instance: InstanceId,
    ranks: u32,
) {
    let places = feed.places(ranks);
    let each = (0..places).map(|rank| {
        let place = Place { instance, rank };
        follow_place(&feed, Arc::clone(&indexed), place, places == 1)
    });
    join_all(each).await;
}

async fn follow_place(feed: &Feed, indexed: Arc<Indexed>, place: Place, is_only: bool) {
    let mut publisher = Publisher::new(indexed, place);
    loop {
        let followed = async {
            let mut items = feed.subscribe(place, is_only).await?;
            while let Some(item) = items.next().await {
                if !publisher.take(item?).await {
                    break;
                }
            }
            Ok(())
        };
        if let Err(error) = followed.await {
            publisher.lost(&error);
        }
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

impl Publisher {
    fn new(indexed: Arc<Indexed>, place: Place) -> Self {
        Self {
            indexed,
            place,
            last_event: 0,
            target: None,
            next: None,
            one_stale: Arc::new(Semaphore::new(1)),
            has_left_out: false,
            lost_since: None,
            logged: OncePerMinute::default(),
        }
    }

    /// Applies one item; returns false when a new snapshot is required.
    async fn take(&mut self, item: KvItem) -> bool {
        let indexed = Arc::clone(&self.indexed);
        self.lost_since = None;
        let goes_on = match item {
            KvItem::Snapshot(snapshot) => {
                self.replace_with(snapshot.blocks).await;
                self.last_event = snapshot.last_event_id;
                true
            }
            KvItem::Change(event) => self.change(event).await,
        };
        indexed.fleet.took(self.place, self.last_event);
        let instance = self.place.instance;
        indexed.lag.took(instance, || indexed.fleet.taken(instance));
        indexed.metrics.index_holds(indexed.reader.held_blocks());
        goes_on
    }

    /// Replaces the worker's entries with these blocks. The old entries stay visible until all blocks are stored.
    async fn replace_with(&mut self, blocks: Vec<StoredBlock>) {
        let target = match self.next.take() {
            Some(target) => target,
            None => self.indexed.fleet.new_target(),
        };
        self.next = Some(target);
        let chains = if blocks.len() < LONG_SNAPSHOT {
            chains(blocks)
        } else {
            let _turn = self.indexed.ordering.acquire().await;
            let ordered = tokio::task::spawn_blocking(move || chains(blocks)).await;
            ordered.unwrap_or_default()
        };
        let mut left_out = false;
        for chain in chains {
            let stored = self
                .indexed
                .store(target, chain.parent, &chain.blocks)
                .await;
            if let Err(odd) = stored {
                self.odd(odd);
                left_out = odd == Odd::TooMany;
            }
            if left_out {
                break;
            }
        }
        self.switch_to(target).await;
        self.next = None;
        self.has_left_out = left_out;
        self.indexed.metrics.snapshot();
    }

    /// Makes `target` the worker's target. Waits while entries that it replaced earlier are still being removed.
    async fn switch_to(&mut self, target: Target) {
        let until_gone = Arc::clone(&self.one_stale).acquire_owned().await.ok();
        self.target = Some(target);
        if let Some(old) = self.indexed.fleet.set_target(self.place, target) {
            self.indexed.discard_until_gone(old, until_gone);
        }
    }

    async fn change(&mut self, event: KvEvent) -> bool {
        let Some(target) = self.target else {
            self.report("a change came before the snapshot", "gap");
            return false;
        };
        if Some(event.id) != self.last_event.checked_add(1) {
            self.report("changes are missing", "gap");
            return false;
        }
        self.last_event = event.id;
        let result = match event.data {
            KvEventData::Stored { parent, blocks } => {
                self.indexed.store(target, parent, &blocks).await
            }
            KvEventData::Removed { blocks } => self.indexed.remove(target, &blocks).await,
            KvEventData::Cleared => {
                let empty = self.indexed.fleet.new_target();
                self.next = Some(empty);
                self.switch_to(empty).await;
                self.next = None;
                self.has_left_out = false;
                Ok(())
            }
        };
        if let Err(odd) = result {
            self.odd(odd);
        }
        true
    }

    fn odd(&mut self, odd: Odd) {
        let reason = match odd {
            Odd::OtherParent => "other_parent",
            Odd::NotHeld if self.has_left_out => return,
            Odd::NotHeld => "not_held",
            Odd::TooMany => {
                self.has_left_out = true;
                "too_many"
            }
            Odd::Full => "full",
        };
        self.report(&odd.to_string(), reason);
    }

    /// Logs that the events ended with an error. Other parts report a worker that is gone.
    fn lost(&mut self, error: &EngineError) {
        let (instance, rank) = (self.place.instance, self.place.rank);
        let stays_lost = self.stays_lost();
        if stays_lost && !error.policy().is_migratable && self.logged.may_log("lost") {
            tracing::warn!(%instance, rank, %error, "the KV events of a worker cannot be followed");
        } else {
            tracing::debug!(%instance, rank, %error, "the KV events of a worker ended");
        }
    }

    /// Returns whether no event has arrived for a while, as of this loss.
    fn stays_lost(&mut self) -> bool {
        let since = *self.lost_since.get_or_insert_with(Instant::now);
        since.elapsed() >= LOST_TIME
    }

    fn report(&self, problem: &str, reason: &str) {
        self.indexed.metrics.odd(reason);
        if let Some(unlogged) = self.logged.unlogged("odd") {
            tracing::warn!(
                instance = %self.place.instance,
                rank = self.place.rank,
                problem,
                unlogged,
                "odd KV events; the worker's entries in the index may be wrong; further ones are only counted for a minute"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::MetricsRegistry;
    use genset_backend_common::kv::KvSnapshot;

    use super::*;
    use crate::config::RouterMode;
    use crate::kv::RouterMetrics;

    fn block(hash: u64, parent: Option<u64>) -> StoredBlock {
        StoredBlock {
            hash: BlockHash(hash),
            parent: parent.map(BlockHash),
        }
    }

    fn publisher() -> (Publisher, Arc<Indexed>) {
        let metrics = RouterMetrics::register(&MetricsRegistry::default(), RouterMode::Kv);
        let indexed = Arc::new(Indexed::new(metrics.of("m"), &KvConfig::default()));
        let place = Place {
            instance: InstanceId(1),
            rank: 0,
        };
        (Publisher::new(Arc::clone(&indexed), place), indexed)
    }

    /// The client for events may discover a worker later than the client for requests does.
    #[tokio::test(start_paused = true)]
    async fn events_are_lost_when_none_have_come_for_a_while() {
        let (mut publisher, _) = publisher();
        let snapshot = || KvItem::Snapshot(KvSnapshot::default());
        for _ in 0..2 {
            assert!(!publisher.stays_lost());
            tokio::time::advance(LOST_TIME).await;
            assert!(publisher.stays_lost());
            assert!(publisher.take(snapshot()).await);
        }
    }

    /// A worker that restarts with a snapshot again and again, while nothing removes its old entries.
    #[tokio::test(start_paused = true)]
    async fn a_worker_has_one_part_that_is_to_be_removed_and_waits_for_it() {
        let (mut publisher, indexed) = publisher();
        let snapshot = || {
            KvItem::Snapshot(KvSnapshot {
                last_event_id: 0,
                blocks: (1..=100).map(|hash| block(hash, None)).collect(),
            })
        };
        let cleared = || {
            let data = KvEventData::Cleared;
            KvItem::Change(KvEvent { id: 1, data })
        };
        assert!(publisher.take(snapshot()).await);
        assert!(publisher.take(cleared()).await);
        assert_eq!(indexed.reader.held_blocks(), 100);
        let third = publisher.take(snapshot());
        let waits = tokio::time::timeout(Duration::from_secs(60), third).await;
        assert!(waits.is_err(), "it took a third part");
        tokio::select! {
            () = Arc::clone(&indexed).sweep() => {}
            goes_on = publisher.take(snapshot()) => assert!(goes_on),
        }
    }
}
