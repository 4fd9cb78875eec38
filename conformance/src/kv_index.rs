//! [`Index`]: a router's view of a prefix cache, built from its events.

use std::collections::BTreeMap;

use futures_util::FutureExt;
use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher, KvEventSubscription};

use crate::check::{Stop, ensure, fail};

/// The live blocks and their parents, from a snapshot and the changes after it.
pub(crate) struct Index {
    changes: KvEventSubscription,
    last_event_id: u64,
    /// Each live block's parent.
    pub(crate) live: BTreeMap<BlockHash, Option<BlockHash>>,
    /// The total number of blocks stored.
    pub(crate) stored: usize,
    /// The maximum number of live blocks.
    pub(crate) peak: usize,
    /// Removed blocks that were not live.
    pub(crate) unknown_removals: Vec<BlockHash>,
    /// Blocks stored after a parent that was not live.
    pub(crate) orphans: Vec<BlockHash>,
}

impl Index {
    /// An index with the current live blocks, which receives all later changes.
    pub(crate) fn following(events: &KvEventPublisher) -> Self {
        let changes = events.subscribe();
        let blocks = changes.snapshot.blocks.iter();
        let mut live = BTreeMap::new();
        live.extend(blocks.map(|block| (block.hash, block.parent)));
        Self {
            last_event_id: changes.snapshot.last_event_id,
            live,
            changes,
            stored: 0,
            peak: 0,
            unknown_removals: Vec::new(),
            orphans: Vec::new(),
        }
    }

    /// Reads everything published so far, however much. Bypasses tokio's task budget, which would stop it early.
    ///
    /// # Errors
    /// Fails if events were missed.
    pub(crate) fn read(&mut self) -> Result<(), Stop> {
        while let Some(event) = tokio::task::unconstrained(self.changes.next()).now_or_never() {
            let Ok(event) = event else {
                fail!("the subscriber fell behind: too many events at once");
            };
            ensure!(
                event.id == self.last_event_id + 1,
                "event {} followed event {}",
                event.id,
                self.last_event_id
            );
            self.last_event_id = event.id;
            self.apply(event.data);
        }
        Ok(())
    }

    fn apply(&mut self, data: KvEventData) {
        match data {
            KvEventData::Stored { mut parent, blocks } => {
                for block in blocks {
                    if parent.is_some_and(|parent| !self.live.contains_key(&parent)) {
                        self.orphans.push(block);
                    }
                    self.live.insert(block, parent);
                    self.stored += 1;
                    parent = Some(block);
                }
            }
            KvEventData::Removed { blocks } => {
                for block in blocks {
                    if self.live.remove(&block).is_none() {
                        self.unknown_removals.push(block);
                    }
                }
            }
            KvEventData::Cleared => self.live.clear(),
        }
        self.peak = self.peak.max(self.live.len());
    }
}
