//! Events of a prefix cache: a snapshot, then numbered changes. A subscriber that sees a gap subscribes again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use super::BlockHash;

/// Changes a subscriber may lag behind before it must take a new snapshot: a second's worth at thousands of blocks.
const BACKLOG_EVENTS: usize = 4096;

/// One numbered change of the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEvent {
    /// Increases by one from event to event, starting at 1, so that gaps show.
    pub id: u64,
    /// What changed.
    pub data: KvEventData,
}

/// What changed in the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEventData {
    /// Blocks became reusable. The first follows `parent`, each other the one before it. A block that is stored already may
    /// be told again, after the same parent: it stays one block, which one `Removed` ends.
    Stored {
        /// The block before the first, already stored; `None` at the start of a sequence.
        parent: Option<BlockHash>,
        /// The blocks, in sequence order.
        blocks: Vec<BlockHash>,
    },
    /// Blocks are no longer reusable.
    Removed {
        /// The blocks, each stored before.
        blocks: Vec<BlockHash>,
    },
    /// The whole cache was dropped.
    Cleared,
}

/// A reusable block and the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The block.
    pub hash: BlockHash,
    /// The block before it.
    pub parent: Option<BlockHash>,
}

/// Every reusable block at one moment, in no particular order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSnapshot {
    /// The id of the last event the snapshot contains; the next event's is one more.
    pub last_event_id: u64,
    /// The blocks.
    pub blocks: Vec<StoredBlock>,
}

/// Where an engine publishes the changes of its prefix cache. Clones publish to the same place.
///
/// Publishing never waits. An event that contradicts the state (a block removed before it was stored) is kept out of the
/// snapshot but still sent, so that the conformance kit can see it.
///
/// # Examples
/// ```
/// use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher};
///
/// let publisher = KvEventPublisher::new();
/// publisher.publish(KvEventData::Stored { parent: None, blocks: vec![BlockHash(1), BlockHash(2)] });
/// let subscription = publisher.subscribe();
/// assert_eq!(subscription.snapshot.blocks.len(), 2);
/// ```
#[derive(Debug, Clone)]
pub struct KvEventPublisher {
    shared: Arc<Mutex<Shared>>,
    /// The caches of single ranks.
    ranks: Arc<Mutex<BTreeMap<u32, Self>>>,
}

#[derive(Debug)]
struct Shared {
    last_event_id: u64,
    parents: HashMap<BlockHash, Option<BlockHash>>,
    changes: broadcast::Sender<KvEvent>,
}

/// A snapshot and the changes after it.
#[derive(Debug)]
pub struct KvEventSubscription {
    /// The state at the moment of the subscription.
    pub snapshot: KvSnapshot,
    changes: broadcast::Receiver<KvEvent>,
}

/// The subscriber fell behind, or the publisher is gone: subscribe again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("KV events were missed or the publisher is gone; subscribe again for a new snapshot")]
pub struct KvEventGap;

impl KvEventPublisher {
    /// A publisher with an empty cache.
    #[must_use]
    pub fn new() -> Self {
        let (changes, _) = broadcast::channel(BACKLOG_EVENTS);
        let shared = Shared {
            last_event_id: 0,
            parents: HashMap::new(),
            changes,
        };
        Self {
            shared: Arc::new(Mutex::new(shared)),
            ranks: Arc::default(),
        }
    }

    /// Where the engine publishes the cache of one data-parallel rank, beside that of all ranks as one. An engine of
    /// several ranks that does, for each of them from `start` on, declares [`kv_ranks`](crate::Capabilities::kv_ranks).
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Self {
        self.ranks.lock().entry(rank).or_default().clone()
    }

    /// What [`of_rank`](Self::of_rank) gave for this rank; `None` when the engine did not ask.
    #[must_use]
    pub fn known_rank(&self, rank: u32) -> Option<Self> {
        self.ranks.lock().get(&rank).cloned()
    }

    /// Publishes a change and returns its id.
    pub fn publish(&self, data: KvEventData) -> u64 {
        let mut shared = self.shared.lock();
        shared.apply(&data);
        shared.last_event_id += 1;
        let id = shared.last_event_id;
        // Nobody may be listening; the state is kept either way.
        drop(shared.changes.send(KvEvent { id, data }));
        id
    }

    /// How many events were published: those of [ranks](Self::of_rank), where there are any, else its own.
    #[must_use]
    pub fn published(&self) -> u64 {
        let ranks = self.ranks.lock();
        if ranks.is_empty() {
            return self.shared.lock().last_event_id;
        }
        ranks
            .values()
            .map(|rank| rank.shared.lock().last_event_id)
            .sum()
    }

    /// The state now and every change after it.
    #[must_use]
    pub fn subscribe(&self) -> KvEventSubscription {
        let shared = self.shared.lock();
        let blocks = shared.parents.iter().map(|(hash, parent)| StoredBlock {
            hash: *hash,
            parent: *parent,
        });
        let snapshot = KvSnapshot {
            last_event_id: shared.last_event_id,
            blocks: blocks.collect(),
        };
        KvEventSubscription {
            snapshot,
            changes: shared.changes.subscribe(),
        }
    }
}

impl Default for KvEventPublisher {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    fn apply(&mut self, data: &KvEventData) {
        match data {
            KvEventData::Stored { parent, blocks } => {
                let mut parent = *parent;
                for block in blocks {
                    self.parents.insert(*block, parent);
                    parent = Some(*block);
                }
            }
            KvEventData::Removed { blocks } => {
                for block in blocks {
                    self.parents.remove(block);
                }
            }
            KvEventData::Cleared => self.parents.clear(),
        }
    }
}

impl KvEventSubscription {
    /// The next change.
    ///
    /// # Errors
    /// [`KvEventGap`] when changes were missed; take a new subscription.
    ///
    /// # Cancel safety
    /// If another branch wins, no change was taken.
    pub async fn next(&mut self) -> Result<KvEvent, KvEventGap> {
        self.changes.recv().await.map_err(|_| KvEventGap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(parent: Option<u64>, blocks: &[u64]) -> KvEventData {
        KvEventData::Stored {
            parent: parent.map(BlockHash),
            blocks: blocks.iter().copied().map(BlockHash).collect(),
        }
    }

    #[tokio::test]
    async fn a_snapshot_and_the_changes_after_it_meet_without_a_gap() {
        let publisher = KvEventPublisher::new();
        publisher.publish(stored(None, &[1, 2]));
        let mut subscription = publisher.subscribe();
        assert_eq!(subscription.snapshot.last_event_id, 1);
        publisher.publish(KvEventData::Removed {
            blocks: vec![BlockHash(2)],
        });
        publisher.publish(KvEventData::Cleared);
        assert_eq!(subscription.next().await.unwrap().id, 2);
        assert_eq!(
            subscription.next().await.unwrap().data,
            KvEventData::Cleared
        );
        assert!(publisher.subscribe().snapshot.blocks.is_empty());
    }

    #[tokio::test]
    async fn a_subscriber_that_lags_is_told() {
        let publisher = KvEventPublisher::new();
        let mut subscription = publisher.subscribe();
        for _ in 0..=BACKLOG_EVENTS {
            publisher.publish(KvEventData::Cleared);
        }
        assert_eq!(subscription.next().await, Err(KvEventGap));
    }

    #[test]
    fn a_rank_has_a_cache_of_its_own() {
        let publisher = KvEventPublisher::new();
        assert!(publisher.known_rank(1).is_none());
        publisher.of_rank(1).publish(stored(None, &[1]));
        let rank = publisher.clone().known_rank(1).unwrap();
        assert_eq!(rank.subscribe().snapshot.blocks.len(), 1);
        assert_eq!(publisher.subscribe().snapshot.last_event_id, 0);
        assert_eq!(publisher.published(), 1);
        assert!(publisher.known_rank(0).is_none());
    }

    #[test]
    fn the_snapshot_keeps_parents() {
        let publisher = KvEventPublisher::new();
        publisher.publish(stored(None, &[1]));
        publisher.publish(stored(Some(1), &[2]));
        let mut blocks = publisher.subscribe().snapshot.blocks;
        blocks.sort();
        let second = StoredBlock {
            hash: BlockHash(2),
            parent: Some(BlockHash(1)),
        };
        assert_eq!(blocks[1], second);
    }
}
