//! [`Assumed`]: updates the index from routed requests, for workers that publish no KV events. A prompt's blocks count as cached
//! for a while at the instance it went to.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::kv::BlockHash;
use tokio::time::Instant;

use super::seeded::Seeded;
use crate::index::{IndexWriter, Target};

/// The maximum number of assumed blocks, counted once per request; the oldest are dropped first.
const MAX_BLOCKS: usize = 1 << 20;

/// Routed requests, by target: a target that goes takes its own along, without a search.
#[derive(Debug)]
pub(super) struct Assumed {
    ttl: Duration,
    max_blocks: usize,
    /// The number of blocks of all requests; a shared block counts once per request.
    routed_blocks: usize,
    /// The number of the last request, counted from 1.
    count: u64,
    /// The requests of each target that has any.
    targets: BTreeMap<Target, RoutedTo>,
    /// The targets by the number of their oldest request.
    oldest: BTreeMap<u64, Target>,
}

/// The requests of a target.
#[derive(Debug, Default)]
struct RoutedTo {
    /// Oldest first.
    requests: VecDeque<Routed>,
    /// The number of blocks in `requests`; a shared block counts once per request.
    blocks: usize,
    /// The last request that had each block. The block is dropped with it.
    last: HashMap<BlockHash, u64, Seeded>,
}

#[derive(Debug)]
struct Routed {
    number: u64,
    until: Instant,
    blocks: Arc<[BlockHash]>,
}

impl Assumed {
    pub(super) fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            max_blocks: MAX_BLOCKS,
            routed_blocks: 0,
            count: 0,
            targets: BTreeMap::new(),
            oldest: BTreeMap::new(),
        }
    }

    /// Records that a prompt with these blocks went to `target`.
    pub(super) fn routed(
        &mut self,
        index: &mut IndexWriter,
        target: Target,
        blocks: &Arc<[BlockHash]>,
    ) {
        if blocks.is_empty() || blocks.len() > self.max_blocks {
            return;
        }
        self.count += 1;
        let number = self.count;
        let its = self.targets.entry(target).or_default();
        if its.requests.is_empty() {
            self.oldest.insert(number, target);
        }
        for block in blocks.iter() {
            its.last.insert(*block, number);
        }
        // Always consistent: this router hashed the blocks.
        let _ = index.store(target, None, blocks);
        its.blocks += blocks.len();
        its.requests.push_back(Routed {
            number,
            until: Instant::now() + self.ttl,
            blocks: Arc::clone(blocks),
        });
        self.routed_blocks += blocks.len();
        while self.routed_blocks > self.max_blocks && self.forget_oldest(index) {}
    }

    /// Returns whether an entry has expired.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let oldest = self.oldest.first_key_value();
        let its = oldest.and_then(|(_, target)| self.targets.get(target));
        let oldest = its.and_then(|its| its.requests.front());
        oldest.is_some_and(|oldest| oldest.until <= now)
    }

    /// Drops expired entries.
    pub(super) fn expire(&mut self, index: &mut IndexWriter) {
        let now = Instant::now();
        while self.is_due(now) && self.forget_oldest(index) {}
    }

    /// Drops a target that has gone; the index drops its entries separately.
    pub(super) fn forget(&mut self, target: Target) {
        let Some(its) = self.targets.remove(&target) else {
            return;
        };
        self.routed_blocks -= its.blocks;
        if let Some(oldest) = its.requests.front() {
            self.oldest.remove(&oldest.number);
        }
    }

    fn forget_oldest(&mut self, index: &mut IndexWriter) -> bool {
        let Some((_, target)) = self.oldest.pop_first() else {
            return false;
        };
        let Entry::Occupied(mut entry) = self.targets.entry(target) else {
            return false;
        };
        let its = entry.get_mut();
        let Some(oldest) = its.requests.pop_front() else {
            return false;
        };
        its.blocks -= oldest.blocks.len();
        self.routed_blocks -= oldest.blocks.len();
        let is_over = |block: &BlockHash| {
            let last = its.last.get(block);
            last.is_some_and(|last| *last == oldest.number)
        };
        // From the end, so that the remaining blocks form a prefix.
        let blocks = oldest.blocks.iter().rev().copied();
        let over: Vec<BlockHash> = blocks.filter(is_over).collect();
        for block in &over {
            its.last.remove(block);
        }
        let _ = index.remove(target, &over);
        let next = its.requests.front().map(|next| next.number);
        match next {
            Some(next) => {
                self.oldest.insert(next, target);
            }
            None => {
                entry.remove();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::index::{IndexReader, Lookup, index};

    const TTL: Duration = Duration::from_secs(120);

    /// The blocks of a prompt.
    fn prompt(range: Range<u64>) -> Arc<[BlockHash]> {
        range
            .map(|n| BlockHash(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
            .collect()
    }

    /// How many leading blocks of a prompt a target has, according to the index.
    fn leading(reader: &IndexReader, prompt: &[BlockHash]) -> u32 {
        let mut lookup = Lookup::default();
        reader.find(prompt, &mut lookup);
        let overlaps = lookup.overlaps();
        overlaps.first().map_or(0, |overlap| overlap.blocks)
    }

    /// How many blocks are assumed of the targets, and how many blocks their requests have.
    fn held(assumed: &Assumed) -> (usize, usize) {
        let its = assumed.targets.values();
        let requests = its.clone().flat_map(|its| &its.requests);
        let routed: usize = requests.map(|routed| routed.blocks.len()).sum();
        assert_eq!(assumed.routed_blocks, routed);
        (its.map(|its| its.last.len()).sum(), routed)
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_routed_is_assumed_until_its_time_is_over() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(TTL);
        let (long, short) = (prompt(1..11), prompt(1..5));
        assumed.routed(&mut writer, 3, &long);
        tokio::time::advance(Duration::from_secs(100)).await;
        assumed.routed(&mut writer, 3, &short);
        assumed.expire(&mut writer);
        assert_eq!(leading(&reader, &long), 10);
        tokio::time::advance(Duration::from_secs(20)).await;
        assumed.expire(&mut writer);
        assert_eq!(leading(&reader, &long), 4);
        tokio::time::advance(Duration::from_secs(100)).await;
        assumed.expire(&mut writer);
        assert_eq!(leading(&reader, &long), 0);
        assert_eq!((reader.held_blocks(), held(&assumed)), (0, (0, 0)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_go_when_there_are_too_many() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(TTL);
        assumed.max_blocks = 1000;
        for (number, target) in (0..40_u64).zip([1, 2, 3].into_iter().cycle()) {
            let first = number << 32;
            assumed.routed(&mut writer, target, &prompt(first + 1..first + 60));
        }
        assert_eq!(held(&assumed), (16 * 59, 16 * 59));
        assert_eq!(reader.held_blocks(), 16 * 59);
        let first = |number: u64| prompt((number << 32) + 1..(number << 32) + 2);
        assert_eq!(leading(&reader, &first(23)), 0);
        assert_eq!(leading(&reader, &first(24)), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_that_is_sent_again_takes_no_room_without_end() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(TTL);
        assumed.max_blocks = 1000;
        for _ in 0..10_000 {
            // Each request has its own hashes.
            let blocks = prompt(1..60);
            assumed.routed(&mut writer, 1, &blocks);
            let (different, routed) = held(&assumed);
            assert!(routed <= 1000, "{routed}");
            assert_eq!((different, reader.held_blocks()), (59, 59));
            assert_eq!(leading(&reader, &blocks), 59);
        }
        assumed.forget(1);
        assert_eq!(held(&assumed), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_target_that_goes_takes_its_own_requests_along_and_no_others() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(TTL);
        let step = Duration::from_secs(10);
        for first in [1, 101, 201] {
            for target in 1..4 {
                // The targets share the first of three blocks.
                let last = first + 10 * u64::from(target);
                let [shared, own] = [prompt(first..first + 1), prompt(last + 1..last + 3)];
                let blocks: Arc<[BlockHash]> = shared.iter().chain(own.iter()).copied().collect();
                assumed.routed(&mut writer, target, &blocks);
            }
            tokio::time::advance(step).await;
        }
        assert_eq!((held(&assumed), reader.held_blocks()), ((27, 27), 27));
        assumed.forget(2);
        assert_eq!(writer.remove_target(2, 0, u32::MAX), None);
        assert_eq!((held(&assumed), reader.held_blocks()), ((18, 18), 18));
        // Another instance has its number now.
        assumed.routed(&mut writer, 2, &prompt(300..303));
        tokio::time::advance(TTL - 4 * step).await;
        for left in [21, 15, 9, 3, 0] {
            assumed.expire(&mut writer);
            assert_eq!(held(&assumed), (left, left));
            assert_eq!(usize::try_from(reader.held_blocks()), Ok(left));
            tokio::time::advance(step).await;
        }
        assert!(assumed.targets.is_empty() && assumed.oldest.is_empty());
    }
}
