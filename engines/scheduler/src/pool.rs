//! [`KvBlockPool`]: the holders of each KV block, and the full blocks that can be reused.
//!
//! A block is *held* by sequences (counted), *idle* (full, named by its hash, and waiting to be reused or evicted) or
//! *free*. The pool knows block ids, not memory; the engine keeps keys and values in the blocks.
//!
//! A sequence holds a contiguous run of blocks from its first one, and equal blocks are merged. So the holder of a reusable
//! block also holds its predecessor. A sequence releases its blocks from last to first, so a block is always evicted after
//! its successors, and a chain of reusable blocks never has a gap.

use std::collections::{BTreeMap, HashMap};

use genset_backend_common::TokenId;
#[cfg(test)]
use genset_backend_common::kv::StoredBlock;
use genset_backend_common::kv::{BlockHash, KvEventData};

use crate::error::LimitsError;

/// The number of a KV block, below the pool's total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    fn index(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// KV blocks of one size, with their reference counts and the prefix cache.
pub struct KvBlockPool {
    block_size: usize,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    reusable: HashMap<BlockHash, BlockId>,
    /// Reusable blocks without holders, least recently used first.
    idle: BTreeMap<u64, BlockId>,
    /// Counts releases, to order `idle`.
    clock: u64,
    events: Vec<KvEventData>,
    is_caching: bool,
}

#[derive(Default)]
struct Block {
    holders: u32,
    /// The block's key in `idle`.
    idle_since: u64,
    content: Option<Content>,
}

/// The content of a reusable block. 64-bit hashes may collide, by chance or by design, so the tokens are compared too.
struct Content {
    hash: BlockHash,
    after: After,
    tokens: Box<[TokenId]>,
}

/// The predecessor of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// None: the block begins a sequence, which may have a root.
    Start(Option<BlockHash>),
    /// The reusable block with this hash.
    Block(BlockHash),
}

impl After {
    /// The hash that the block's own hash includes.
    pub(crate) fn hash(self) -> Option<BlockHash> {
        match self {
            Self::Start(root) => root,
            Self::Block(hash) => Some(hash),
        }
    }

    /// The predecessor's hash, as published in events.
    fn parent(self) -> Option<BlockHash> {
        match self {
            Self::Start(_) => None,
            Self::Block(hash) => Some(hash),
        }
    }
}

impl KvBlockPool {
    /// Creates a pool of `total` free blocks of `block_size` tokens each, hashed by the default scheme.
    ///
    /// # Errors
    /// A size is zero, or there are more blocks than block ids.
    pub fn try_new(total: usize, block_size: usize) -> Result<Self, LimitsError> {
        if block_size == 0 {
            return Err(LimitsError::Zero("block_size"));
        }
        if total == 0 {
            return Err(LimitsError::Zero("the number of KV blocks"));
        }
        let last = u32::try_from(total).map_err(|_| LimitsError::TooManyBlocks(total))?;
        Ok(Self {
            block_size,
            blocks: (0..total).map(|_| Block::default()).collect(),
            // Allocation pops from the end, so the first block is used first.
            free: (0..last).rev().map(BlockId).collect(),
            reusable: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            events: Vec::new(),
            is_caching: true,
        })
    }

    /// Disables the prefix cache: no block becomes reusable, and there are no events.
    pub(crate) fn without_prefix_caching(mut self) -> Self {
        self.is_caching = false;
        self
    }

    /// Whether full blocks become reusable.
    #[must_use]
    pub fn is_caching(&self) -> bool {
        self.is_caching
    }

    /// The total number of blocks.
    #[must_use]
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// The number of blocks that sequences hold.
    #[must_use]
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    /// The number of blocks that can be allocated: the free ones, and the idle ones after eviction.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// The number of blocks without reusable content.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The number of blocks that `tokens` tokens need.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Finds the longest prefix of `tokens` that is in reusable blocks, and does not hold these blocks yet. `hashes` are the
    /// hashes of the full blocks of `tokens`, and `root` is their root.
    #[must_use]
    pub fn find_prefix(
        &self,
        root: Option<BlockHash>,
        tokens: &[TokenId],
        hashes: &[BlockHash],
    ) -> Vec<BlockId> {
        let mut after = After::Start(root);
        let mut found = Vec::new();
        for (tokens, hash) in tokens.chunks_exact(self.block_size).zip(hashes) {
            let block = self.reusable.get(hash);
            let Some(block) = block.filter(|block| self.is_same(**block, after, tokens)) else {
                break;
            };
            found.push(*block);
            after = After::Block(*hash);
        }
        found
    }

    fn is_same(&self, block: BlockId, after: After, tokens: &[TokenId]) -> bool {
        let content = &self.blocks[block.index()].content;
        content
            .as_ref()
            .is_some_and(|content| content.after == after && *content.tokens == *tokens)
    }

    /// Adds a holder to each block.
    ///
    /// # Panics
    /// A block is not of this pool.
    pub fn hold(&mut self, blocks: &[BlockId]) {
        for id in blocks {
            let block = &mut self.blocks[id.index()];
            if block.holders == 0 {
                self.idle.remove(&block.idle_since);
            }
            block.holders += 1;
        }
    }

    /// Allocates `count` blocks with one holder each, or none if there are too few. Evicts the least recently used idle blocks.
    #[must_use]
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if self.available() < count {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let id = self.free.pop().or_else(|| self.evict())?;
            self.blocks[id.index()].holders = 1;
            taken.push(id);
        }
        Some(taken)
    }

    fn evict(&mut self) -> Option<BlockId> {
        let (_, id) = self.idle.pop_first()?;
        let content = self.blocks[id.index()].content.take();
        if let Some(Content { hash, .. }) = content {
            self.reusable.remove(&hash);
            if let Some(KvEventData::Removed { blocks }) = self.events.last_mut() {
                blocks.push(hash);
            } else {
                self.events
                    .push(KvEventData::Removed { blocks: vec![hash] });
            }
        }
        Some(id)
    }

    /// Removes one holder from each of a sequence's blocks, which are given in order from the first.
    ///
    /// # Panics
    /// A block is not of this pool, or has no holder.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let block = &mut self.blocks[id.index()];
            assert!(
                block.holders > 0,
                "invariant: {id:?} is released as often as it is held"
            );
            block.holders -= 1;
            if block.holders > 0 {
                continue;
            }
            if block.content.is_some() {
                self.clock += 1;
                block.idle_since = self.clock;
                self.idle.insert(self.clock, *id);
            } else {
                self.free.push(*id);
            }
        }
    }

    /// Makes a held, full block reusable. The block holds `tokens` and follows `after`.
    ///
    /// Returns the block to use from now on. If an equal block is already reusable, that is the one: it gains a holder, and the
    /// given block loses one. Returns `None` if the hash belongs to different content. The given block then stays unchanged,
    /// and no block after it can become reusable.
    ///
    /// # Panics
    /// The block is not of this pool.
    pub fn store(
        &mut self,
        id: BlockId,
        after: After,
        hash: BlockHash,
        tokens: &[TokenId],
    ) -> Option<BlockId> {
        if let Some(equal) = self.reusable.get(&hash).copied() {
            if !self.is_same(equal, after, tokens) {
                return None;
            }
            if equal != id {
                self.hold(&[equal]);
                self.release(&[id]);
            }
            return Some(equal);
        }
        let tokens = tokens.into();
        self.blocks[id.index()].content = Some(Content {
            hash,
            after,
            tokens,
        });
        let parent = after.parent();
        self.reusable.insert(hash, id);
        match self.events.last_mut() {
            Some(KvEventData::Stored { blocks, .. }) if blocks.last().copied() == parent => {
                blocks.push(hash)
            }
            _ => self.events.push(KvEventData::Stored {
                parent,
                blocks: vec![hash],
            }),
        }
        Some(id)
    }

    /// Forgets every reusable block. Sequences keep the blocks they hold, but must not store their later blocks.
    pub fn clear(&mut self) {
        for block in &mut self.blocks {
            block.content = None;
        }
        self.reusable.clear();
        self.free
            .extend(std::mem::take(&mut self.idle).into_values());
        if self.is_caching {
            self.events.push(KvEventData::Cleared);
        }
    }

    /// Returns the changes since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<KvEventData> {
        std::mem::take(&mut self.events)
    }

    /// Returns every reusable block, in no particular order: the sum of all events.
    #[cfg(test)]
    pub(crate) fn reusable(&self) -> impl Iterator<Item = StoredBlock> {
        let contents = self
            .blocks
            .iter()
            .filter_map(|block| block.content.as_ref());
        contents.map(|content| StoredBlock {
            hash: content.hash,
            parent: content.after.parent(),
        })
    }

    /// The number of sequences that hold the block.
    pub(crate) fn holders(&self, id: BlockId) -> u32 {
        self.blocks[id.index()].holders
    }
}

genset_backend_common::debug_as!(|it| KvBlockPool {
    total: it.total(),
    used: it.used(),
    free: it.free(),
    ..
});

#[cfg(test)]
mod tests;
