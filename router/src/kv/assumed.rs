//! [`Assumed`]: an index of what was routed, for workers that publish no KV events: where a prompt went, its blocks are taken for
//! cached for a while.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use genset_backend_common::kv::BlockHash;
use tokio::time::Instant;

use crate::index::{IndexWriter, Target};

/// The most blocks that are assumed, each counted for each target; the oldest go first.
const MAX_BLOCKS: usize = 1 << 20;

/// What was routed where, oldest first.
#[derive(Debug)]
pub(super) struct Assumed {
    ttl: Duration,
    max_blocks: usize,
    routed: VecDeque<Routed>,
    /// Until when each block is assumed.
    until: HashMap<(Target, BlockHash), Instant>,
}

#[derive(Debug)]
struct Routed {
    until: Instant,
    target: Target,
    blocks: std::sync::Arc<[BlockHash]>,
}

impl Assumed {
    pub(super) fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            max_blocks: MAX_BLOCKS,
            routed: VecDeque::new(),
            until: HashMap::new(),
        }
    }

    /// A prompt with these blocks went to `target`.
    pub(super) fn routed(
        &mut self,
        index: &mut IndexWriter,
        target: Target,
        blocks: &std::sync::Arc<[BlockHash]>,
    ) {
        if blocks.is_empty() || blocks.len() > self.max_blocks {
            return;
        }
        let until = Instant::now() + self.ttl;
        for block in blocks.iter() {
            self.until.insert((target, *block), until);
        }
        // Honest by construction: this router hashed them.
        let _ = index.store(target, None, blocks);
        self.routed.push_back(Routed {
            until,
            target,
            blocks: std::sync::Arc::clone(blocks),
        });
        while self.until.len() > self.max_blocks && self.forget_oldest(index) {}
    }

    /// Forgets what is older than the time it is assumed for.
    pub(super) fn expire(&mut self, index: &mut IndexWriter) {
        let now = Instant::now();
        while self
            .routed
            .front()
            .is_some_and(|oldest| oldest.until <= now)
            && self.forget_oldest(index)
        {}
    }

    /// A target has gone, and the index with it.
    pub(super) fn forget(&mut self, target: Target) {
        self.routed.retain(|routed| routed.target != target);
        self.until.retain(|(holder, _), _| *holder != target);
    }

    fn forget_oldest(&mut self, index: &mut IndexWriter) -> bool {
        let Some(oldest) = self.routed.pop_front() else {
            return false;
        };
        let is_over = |block: &&BlockHash| {
            let until = self.until.get(&(oldest.target, **block));
            until.is_some_and(|until| *until <= oldest.until)
        };
        // From the end, so that what is left begins at the start.
        let over: Vec<BlockHash> = oldest
            .blocks
            .iter()
            .rev()
            .filter(is_over)
            .copied()
            .collect();
        for block in &over {
            self.until.remove(&(oldest.target, *block));
        }
        let _ = index.remove(oldest.target, &over);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::index::{Lookup, index};

    #[tokio::test(start_paused = true)]
    async fn what_was_routed_is_assumed_until_its_time_is_over() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(Duration::from_secs(120));
        let blocks = |range: std::ops::Range<u64>| -> Arc<[BlockHash]> {
            range
                .map(|n| BlockHash(n.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
                .collect()
        };
        let leading = |prompt: &[BlockHash]| {
            let mut lookup = Lookup::default();
            reader.find(prompt, &mut lookup);
            lookup
                .overlaps()
                .first()
                .map_or(0, |overlap| overlap.blocks)
        };
        let (long, short) = (blocks(1..11), blocks(1..5));
        assumed.routed(&mut writer, 3, &long);
        tokio::time::advance(Duration::from_secs(100)).await;
        assumed.routed(&mut writer, 3, &short);
        assumed.expire(&mut writer);
        assert_eq!(leading(&long), 10);
        tokio::time::advance(Duration::from_secs(20)).await;
        assumed.expire(&mut writer);
        assert_eq!(leading(&long), 4);
        tokio::time::advance(Duration::from_secs(100)).await;
        assumed.expire(&mut writer);
        assert_eq!(
            (leading(&long), reader.held_blocks(), assumed.until.len()),
            (0, 0, 0)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_go_when_there_are_too_many() {
        let (mut writer, reader) = index();
        let mut assumed = Assumed::new(Duration::from_secs(120));
        assumed.max_blocks = 1000;
        for prompt in 0..40_u64 {
            let block = |n: u64| BlockHash((prompt << 32 | n).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let blocks: Arc<[BlockHash]> = (1..60).map(block).collect();
            assumed.routed(&mut writer, 1, &blocks);
        }
        assert!(assumed.until.len() <= 1000 && assumed.until.len() > 900);
        assert_eq!(reader.held_blocks(), assumed.until.len() as u64);
    }
}
