//! Events of a prefix cache: a snapshot, then numbered changes. A subscriber that finds a gap subscribes again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use super::BlockHash;

/// The number of changes a subscriber may lag behind before it must resubscribe: about a second's, at thousands a second.
const BACKLOG_EVENTS: usize = 4096;

/// One numbered change of the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEvent {
    /// Consecutive, starting at 1, so that gaps are visible.
    pub id: u64,
    /// What changed.
    pub data: KvEventData,
}

/// What changed in the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEventData {
    /// Blocks became reusable. The first one follows `parent`, each other one its predecessor. A stored block may be announced
    /// again with the same parent: it stays one block, which one `Removed` ends.
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

/// All reusable blocks at one moment, in no particular order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSnapshot {
    /// The id of the last event in the snapshot; the next event's id is one more.
    pub last_event_id: u64,
    /// The blocks.
    pub blocks: Vec<StoredBlock>,
}

/// Where an engine publishes the changes of its prefix cache. Clones share state.
///
/// Publishing never waits. An event that contradicts the state (such as the removal of an unknown block) is not applied to the
/// snapshot but still sent, so that the conformance kit can detect it.
///
/// An engine with several data-parallel ranks publishes through [`of_rank`](Self::of_rank); the combined cache is derived from
/// the ranks'. `Cleared` published here clears every rank.
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
    /// The caches of the ranks.
    ranks: Arc<Mutex<BTreeMap<u32, Self>>>,
    /// For a rank's cache: the combined one. Lock order: the rank's own first.
    whole: Option<Arc<Mutex<Shared>>>,
}

#[derive(Debug)]
struct Shared {
    last_event_id: u64,
    parents: HashMap<BlockHash, Option<BlockHash>>,
    /// The number of ranks that hold each block.
    holders: HashMap<BlockHash, u32>,
    changes: broadcast::Sender<KvEvent>,
}

/// A snapshot and the changes after it.
#[derive(Debug)]
pub struct KvEventSubscription {
    /// The state at the time of the subscription.
    pub snapshot: KvSnapshot,
    changes: broadcast::Receiver<KvEvent>,
}

/// The subscriber fell behind or the publisher is gone: subscribe again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("KV events were missed or the publisher is gone; subscribe again for a new snapshot")]
pub struct KvEventGap;

impl KvEventPublisher {
    /// Returns a publisher with an empty cache.
    #[must_use]
    pub fn new() -> Self {
        let (changes, _) = broadcast::channel(BACKLOG_EVENTS);
        let shared = Shared {
            last_event_id: 0,
            parents: HashMap::new(),
            holders: HashMap::new(),
            changes,
        };
        Self {
            shared: Arc::new(Mutex::new(shared)),
            ranks: Arc::default(),
            whole: None,
        }
    }

    /// Returns the publisher for the cache of one data-parallel rank. The combined cache follows: a block is in it as long as one
    /// rank has it. An engine that publishes this way, for each of several ranks from `start` on, declares
    /// [`kv_ranks`](crate::Capabilities::kv_ranks).
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher};
    ///
    /// let publisher = KvEventPublisher::new();
    /// for rank in [0, 1] {
    ///     publisher.of_rank(rank).publish(KvEventData::Stored { parent: None, blocks: vec![BlockHash(1)] });
    /// }
    /// publisher.of_rank(0).publish(KvEventData::Removed { blocks: vec![BlockHash(1)] });
    /// assert_eq!(publisher.subscribe().snapshot.blocks.len(), 1);
    /// ```
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Self {
        let new = || Self {
            whole: Some(Arc::clone(&self.shared)),
            ..Self::new()
        };
        self.ranks.lock().entry(rank).or_insert_with(new).clone()
    }

    /// Returns the publisher from [`of_rank`](Self::of_rank); `None` if the engine did not request one for this rank.
    #[must_use]
    pub fn known_rank(&self, rank: u32) -> Option<Self> {
        self.ranks.lock().get(&rank).cloned()
    }

    /// Publishes a change and returns its id.
    pub fn publish(&self, data: KvEventData) -> u64 {
        if data == KvEventData::Cleared {
            let ranks: Vec<Self> = self.ranks.lock().values().cloned().collect();
            for rank in ranks {
                rank.publish(KvEventData::Cleared);
            }
        }
        let mut shared = self.shared.lock();
        match &self.whole {
            Some(whole) => whole.lock().apply_of_rank(&mut shared, &data),
            None => shared.apply(&data),
        }
        shared.tell(data)
    }

    /// Returns how many events were published: the sum over the [ranks](Self::of_rank) if there are several, else its own.
    #[must_use]
    pub fn published(&self) -> u64 {
        let ranks = self.ranks.lock();
        // A subscriber of a single-rank instance follows the combined cache, which omits blocks that the rank announces again.
        if ranks.len() < 2 {
            return self.shared.lock().last_event_id;
        }
        ranks
            .values()
            .map(|rank| rank.shared.lock().last_event_id)
            .sum()
    }

    /// Subscribes: returns the current state and every later change.
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

    /// Numbers a change and sends it.
    fn tell(&mut self, data: KvEventData) -> u64 {
        self.last_event_id += 1;
        let id = self.last_event_id;
        // There may be no subscriber; the state is kept either way.
        drop(self.changes.send(KvEvent { id, data }));
        id
    }

    /// Applies a change to a rank's cache, and publishes its effect on the combined cache here. Since each rank's blocks have
    /// their parents, so do the combined ones.
    fn apply_of_rank(&mut self, rank: &mut Self, data: &KvEventData) {
        match data {
            KvEventData::Stored { parent, blocks } => self.store(rank, *parent, blocks),
            KvEventData::Removed { blocks } => {
                let gone = blocks.iter().copied();
                let gone = gone.filter(|block| match rank.parents.remove(block) {
                    Some(_) => self.release(block),
                    // It contradicts the state: forwarded unless another rank has the block.
                    None => !self.holders.contains_key(block),
                });
                let gone = gone.collect();
                self.remove(gone);
            }
            KvEventData::Cleared => {
                let held = std::mem::take(&mut rank.parents).into_keys();
                let gone = held.filter(|block| self.release(block)).collect();
                self.remove(gone);
            }
        }
    }

    /// Stores a rank's blocks; publishes one event for each run of blocks that are new to the combined cache.
    fn store(&mut self, rank: &mut Self, mut parent: Option<BlockHash>, blocks: &[BlockHash]) {
        let mut new = Vec::new();
        let mut before_new = parent;
        for block in blocks {
            if rank.parents.insert(*block, parent).is_none() && self.hold(*block) {
                if new.is_empty() {
                    before_new = parent;
                }
                new.push(*block);
            } else {
                self.stored(before_new, std::mem::take(&mut new));
            }
            parent = Some(*block);
        }
        self.stored(before_new, new);
    }

    fn stored(&mut self, parent: Option<BlockHash>, blocks: Vec<BlockHash>) {
        if !blocks.is_empty() {
            self.apply_and_tell(KvEventData::Stored { parent, blocks });
        }
    }

    fn remove(&mut self, blocks: Vec<BlockHash>) {
        if !blocks.is_empty() {
            self.apply_and_tell(KvEventData::Removed { blocks });
        }
    }

    fn apply_and_tell(&mut self, data: KvEventData) {
        self.apply(&data);
        self.tell(data);
    }

    /// Counts one more rank that holds a block; returns whether it is the first.
    fn hold(&mut self, block: BlockHash) -> bool {
        let ranks = self.holders.entry(block).or_default();
        *ranks += 1;
        *ranks == 1
    }

    /// Counts one rank less that holds a block; returns whether it was the last.
    fn release(&mut self, block: &BlockHash) -> bool {
        let Some(ranks) = self.holders.get_mut(block) else {
            return false;
        };
        *ranks -= 1;
        let is_gone = *ranks == 0;
        if is_gone {
            self.holders.remove(block);
        }
        is_gone
    }
}

impl KvEventSubscription {
    /// Returns the next change.
    ///
    /// # Errors
    /// [`KvEventGap`] when changes were missed: subscribe again.
    ///
    /// # Cancel safety
    /// If another branch wins, no change is taken.
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
        assert_eq!(publisher.published(), 1);
        assert!(publisher.known_rank(0).is_none());
    }

    #[test]
    fn what_is_counted_is_what_is_followed() {
        let publisher = KvEventPublisher::new();
        for _ in 0..2 {
            publisher.of_rank(0).publish(stored(None, &[1]));
        }
        let followed = publisher.subscribe().snapshot.last_event_id;
        assert_eq!((publisher.published(), followed), (1, 1));
        publisher.of_rank(1).publish(stored(None, &[1]));
        assert_eq!(publisher.published(), 3);
    }

    fn removed(blocks: &[u64]) -> KvEventData {
        KvEventData::Removed {
            blocks: blocks.iter().copied().map(BlockHash).collect(),
        }
    }

    /// Returns the combined events for events of several ranks.
    fn of_all(events: &[(u32, KvEventData)]) -> Vec<KvEventData> {
        let publisher = KvEventPublisher::new();
        let mut subscription = publisher.subscribe();
        for (rank, event) in events {
            publisher.of_rank(*rank).publish(event.clone());
        }
        let mut seen = Vec::new();
        while let Ok(event) = subscription.changes.try_recv() {
            seen.push(event.data);
        }
        seen
    }

    #[test]
    fn a_block_is_there_as_long_as_one_rank_has_it() {
        let seen = of_all(&[
            (0, stored(None, &[1, 2])),
            (1, stored(None, &[1, 2, 3])),
            (1, stored(Some(1), &[2])),
            (0, removed(&[2])),
            (1, removed(&[3])),
            (1, removed(&[2])),
        ]);
        let expected = [
            stored(None, &[1, 2]),
            stored(Some(2), &[3]),
            removed(&[3]),
            removed(&[2]),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_rank_that_is_cleared_leaves_what_others_have() {
        let seen = of_all(&[
            (0, stored(None, &[1, 2])),
            (70, stored(None, &[1])),
            (0, KvEventData::Cleared),
            (70, KvEventData::Cleared),
        ]);
        let expected = [stored(None, &[1, 2]), removed(&[2]), removed(&[1])];
        assert_eq!(seen, expected);
    }

    #[test]
    fn new_blocks_between_known_ones_name_their_parents() {
        let seen = of_all(&[
            (0, stored(None, &[1])),
            (0, stored(None, &[3])),
            (1, stored(None, &[1, 2, 3, 4, 5])),
        ]);
        assert_eq!(seen[2..], [stored(Some(1), &[2]), stored(Some(3), &[4, 5])]);
    }

    #[test]
    fn a_ranks_event_that_contradicts_the_state_is_told() {
        let seen = of_all(&[(0, stored(None, &[1])), (1, removed(&[1, 2]))]);
        assert_eq!(seen, [stored(None, &[1]), removed(&[2])]);
    }

    #[test]
    fn what_clears_the_whole_clears_every_rank() {
        let publisher = KvEventPublisher::new();
        publisher.of_rank(0).publish(stored(None, &[1]));
        publisher.of_rank(1).publish(stored(None, &[1, 2]));
        publisher.publish(KvEventData::Cleared);
        for cache in [
            publisher.clone(),
            publisher.of_rank(0),
            publisher.of_rank(1),
        ] {
            assert!(cache.subscribe().snapshot.blocks.is_empty());
        }
        publisher.of_rank(1).publish(stored(None, &[1]));
        assert_eq!(publisher.subscribe().snapshot.blocks.len(), 1);
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
