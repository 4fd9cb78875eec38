//! A prefix cache: the reusable KV blocks, evicted least recently used first, and their events.

use std::collections::HashMap;
use std::sync::Arc;

use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Flaw;

/// The cache shared by all requests.
pub(super) type SharedCache = Arc<Mutex<PrefixCache>>;

struct Entry {
    parent: Option<BlockHash>,
    /// The number of cached blocks after this one and of requests that use it: each keeps it.
    children: usize,
    users: usize,
    last_used: u64,
}

/// The reusable blocks.
pub(super) struct PrefixCache {
    entries: HashMap<BlockHash, Entry>,
    capacity: usize,
    /// Counts uses, to find the least recent.
    uses: u64,
    /// Counts clears, so that a request from before a clear unpins nothing after it.
    pub(super) epoch: u64,
    events: KvEventPublisher,
    flaw: Flaw,
    /// Events held back by [`Flaw::LateEvents`].
    late: Vec<KvEventData>,
    /// The last published block and its time, for [`Flaw::StoredTogether`].
    last: Option<(BlockHash, Instant)>,
    requests: u64,
}

impl PrefixCache {
    pub(super) fn shared(capacity: usize, events: KvEventPublisher, flaw: Flaw) -> SharedCache {
        Arc::new(Mutex::new(Self {
            entries: HashMap::new(),
            capacity,
            uses: 0,
            epoch: 0,
            events,
            flaw,
            late: Vec::new(),
            last: None,
            requests: 0,
        }))
    }

    /// The number of blocks at the start of `chain` that are cached.
    pub(super) fn matching(&self, chain: &[BlockHash]) -> usize {
        let is_cached = |hash: &&BlockHash| self.entries.contains_key(hash);
        chain.iter().take_while(is_cached).count()
    }

    /// Pins the cached start of a new request's `chain`, and stores as much of the rest as there is room for.
    fn admit(&mut self, chain: &[BlockHash]) -> Vec<BlockHash> {
        self.requests += 1;
        let cached = self.matching(chain);
        let mut pinned = Vec::new();
        for hash in &chain[..cached] {
            self.uses += 1;
            if let Some(entry) = self.entries.get_mut(hash) {
                entry.users += 1;
                entry.last_used = self.uses;
                pinned.push(*hash);
            }
        }
        self.store(&mut pinned, &chain[cached..]);
        pinned
    }

    /// Stores blocks after the last of `pinned`, and pins them.
    fn store(&mut self, pinned: &mut Vec<BlockHash>, blocks: &[BlockHash]) {
        let room = self.make_room(blocks.len());
        let blocks = &blocks[..room];
        let first_parent = pinned.last().copied();
        for hash in blocks {
            let parent = pinned.last().copied();
            if let Some(parent) = parent.and_then(|parent| self.entries.get_mut(&parent)) {
                parent.children += 1;
            }
            self.uses += 1;
            let entry = Entry {
                parent,
                children: 0,
                users: 1,
                last_used: self.uses,
            };
            self.entries.insert(*hash, entry);
            pinned.push(*hash);
        }
        if !blocks.is_empty() {
            self.publish_stored(first_parent, blocks.to_vec());
        }
    }

    fn publish_stored(&mut self, parent: Option<BlockHash>, blocks: Vec<BlockHash>) {
        match self.flaw {
            Flaw::RemovedBeforeStored => self.publish(KvEventData::Removed {
                blocks: blocks.clone(),
            }),
            Flaw::EventStorm => {
                let mut all: Vec<_> = self.entries.iter().map(|(h, e)| (*h, e.parent)).collect();
                all.sort_unstable_by_key(|(hash, _)| {
                    self.entries.get(hash).map(|entry| entry.last_used)
                });
                for (hash, parent) in all.iter().cycle().take(all.len() * 8) {
                    self.publish(KvEventData::Stored {
                        parent: *parent,
                        blocks: vec![*hash],
                    });
                }
                return;
            }
            _ => {}
        }
        let parent = match self.flaw {
            Flaw::UnknownParent => parent.map(|parent| BlockHash(!parent.0)),
            Flaw::StoredTogether => {
                let now = Instant::now();
                let last = self.last.filter(|(_, at)| *at == now);
                self.last = blocks.last().map(|last| (*last, now));
                last.map_or(parent, |(last, _)| Some(last))
            }
            _ => parent,
        };
        self.publish(KvEventData::Stored { parent, blocks });
    }

    fn publish(&mut self, data: KvEventData) {
        match self.flaw {
            Flaw::StopsPublishing if self.requests > 2 => {}
            Flaw::LateEvents => self.late.push(data),
            _ => drop(self.events.publish(data)),
        }
    }

    /// Evicts until `wanted` blocks fit, or as many as possible; returns how many fit.
    fn make_room(&mut self, wanted: usize) -> usize {
        let mut removed = Vec::new();
        while self.entries.len() + wanted > self.capacity {
            let idle = self
                .entries
                .iter()
                .filter(|(_, entry)| entry.children == 0 && entry.users == 0);
            let Some(oldest) = idle
                .min_by_key(|(_, entry)| entry.last_used)
                .map(|(hash, _)| *hash)
            else {
                break;
            };
            let parent = self.entries.remove(&oldest).and_then(|entry| entry.parent);
            if let Some(parent) = parent.and_then(|parent| self.entries.get_mut(&parent)) {
                parent.children -= 1;
            }
            removed.push(oldest);
        }
        if !removed.is_empty() && self.flaw != Flaw::SilentEviction {
            self.publish(KvEventData::Removed { blocks: removed });
        }
        wanted.min(self.capacity.saturating_sub(self.entries.len()))
    }

    /// Drops the last unused blocks, for [`Flaw::AbandonedFreedSilently`].
    fn forget(&mut self, blocks: &[BlockHash]) {
        for hash in blocks.iter().rev() {
            let is_free = |entry: &Entry| entry.children == 0 && entry.users == 0;
            if !self.entries.get(hash).is_some_and(is_free) {
                return;
            }
            let parent = self.entries.remove(hash).and_then(|entry| entry.parent);
            if let Some(parent) = parent.and_then(|parent| self.entries.get_mut(&parent)) {
                parent.children -= 1;
            }
        }
    }

    /// Drops every block.
    pub(super) fn clear(&mut self) {
        self.epoch += 1;
        self.entries.clear();
        if self.flaw != Flaw::SilentClear {
            self.publish(KvEventData::Cleared);
            self.flush();
        }
    }

    /// Publishes the events held back by [`Flaw::LateEvents`].
    pub(super) fn flush(&mut self) {
        for data in std::mem::take(&mut self.late) {
            self.events.publish(data);
        }
    }
}

/// The blocks that one request uses. After a drop they may be evicted.
pub(super) struct Lease {
    cache: SharedCache,
    epoch: u64,
    pinned: Vec<BlockHash>,
    /// Whether every block so far was stored, so that the next one has its parent.
    is_whole: bool,
    /// Whether the request reached its end.
    is_finished: bool,
}

impl Lease {
    pub(super) fn new(cache: &SharedCache, chain: &[BlockHash]) -> Self {
        let mut locked = cache.lock();
        let pinned = locked.admit(chain);
        Self {
            cache: Arc::clone(cache),
            epoch: locked.epoch,
            is_whole: pinned.len() == chain.len(),
            is_finished: false,
            pinned,
        }
    }

    /// Notes that the request reached its end.
    pub(super) fn finished(&mut self) {
        self.is_finished = true;
    }

    /// Adds a block that the sequence has filled.
    pub(super) fn extend(&mut self, hash: BlockHash) {
        let mut cache = self.cache.lock();
        let is_current = cache.epoch == self.epoch || cache.flaw == Flaw::StoresAfterClear;
        self.is_whole &= is_current && !cache.entries.contains_key(&hash);
        if self.is_whole {
            let before = self.pinned.len();
            cache.store(&mut self.pinned, &[hash]);
            self.is_whole = self.pinned.len() > before;
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut cache = self.cache.lock();
        if cache.epoch == self.epoch {
            for hash in &self.pinned {
                if let Some(entry) = cache.entries.get_mut(hash) {
                    entry.users -= 1;
                }
            }
            if cache.flaw == Flaw::AbandonedFreedSilently && !self.is_finished {
                cache.forget(&self.pinned);
            }
        }
    }
}
