//! [`KvBlockPool`]: who holds which KV block, and which full blocks can be reused.
//!
//! A block is *held* by sequences (counted), or *idle*: full, named by its hash and waiting to be reused or evicted, or
//! *free*. The pool knows block ids, not memory; the engine keeps keys and values in the blocks.
//!
//! A sequence holds its blocks from the first on, and blocks that turn out equal become one, so whoever holds a reusable
//! block holds the one before it too. Released from last to first, a block is always evicted after those that follow it,
//! and a chain of reusable blocks never has a gap.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use genset_backend_common::TokenId;
#[cfg(test)]
use genset_backend_common::kv::StoredBlock;
use genset_backend_common::kv::{BlockHash, BlockHasher, KvEventData, Xxh3BlockHasher};

use crate::error::LimitsError;

/// The number of a KV block: below the pool's total.
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
    hasher: Box<dyn BlockHasher>,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    reusable: HashMap<BlockHash, BlockId>,
    /// Blocks that nobody holds and that can be reused, the longest unused first.
    idle: BTreeMap<u64, BlockId>,
    /// Counts releases; the order of `idle`.
    clock: u64,
    events: Vec<KvEventData>,
    is_caching: bool,
}

#[derive(Default)]
struct Block {
    holders: u32,
    /// Its place in `idle`.
    idle_since: u64,
    content: Option<Content>,
}

/// What a reusable block holds. Hashes of 64 bits may collide, by chance or by design, so the tokens are compared too.
struct Content {
    hash: BlockHash,
    after: After,
    tokens: Box<[TokenId]>,
}

/// What a block follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Nothing: it begins a sequence with this root, if it has one.
    Start(Option<BlockHash>),
    /// The reusable block with this hash.
    Block(BlockHash),
}

impl After {
    /// What goes into the hash of the block.
    pub(crate) fn hash(self) -> Option<BlockHash> {
        match self {
            Self::Start(root) => root,
            Self::Block(hash) => Some(hash),
        }
    }

    /// The block before it, as others are told.
    fn parent(self) -> Option<BlockHash> {
        match self {
            Self::Start(_) => None,
            Self::Block(hash) => Some(hash),
        }
    }
}

impl KvBlockPool {
    /// A pool of `total` free blocks of `block_size` tokens each, hashed by the default scheme.
    ///
    /// # Errors
    /// A size is zero, or block ids do not suffice.
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
            hasher: Box::new(Xxh3BlockHasher::new()),
            blocks: (0..total).map(|_| Block::default()).collect(),
            // Taken from the end, so that the first block is used first.
            free: (0..last).rev().map(BlockId).collect(),
            reusable: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            events: Vec::new(),
            is_caching: true,
        })
    }

    /// Switches the prefix cache off: no block becomes reusable, and there are no events.
    pub(crate) fn without_prefix_caching(mut self) -> Self {
        self.is_caching = false;
        self
    }

    /// Whether full blocks become reusable.
    #[must_use]
    pub fn is_caching(&self) -> bool {
        self.is_caching
    }

    /// Blocks in all.
    #[must_use]
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that sequences hold.
    #[must_use]
    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    /// Blocks that can be allocated: free ones, and idle ones after eviction.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that hold nothing worth keeping.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks for `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// The hash of a full block that follows `after`.
    pub(crate) fn hash(&self, after: After, tokens: &[TokenId]) -> BlockHash {
        self.hasher.hash_block(after.hash(), tokens)
    }

    /// The reusable blocks at the start of `tokens`, whose full blocks have the hashes `hashes` and which has the root `root`;
    /// not held yet.
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
    /// A block is none of this pool's.
    pub fn hold(&mut self, blocks: &[BlockId]) {
        for id in blocks {
            let block = &mut self.blocks[id.index()];
            if block.holders == 0 {
                self.idle.remove(&block.idle_since);
            }
            block.holders += 1;
        }
    }

    /// `count` blocks with one holder each, or none at all when there are fewer. Evicts the longest unused idle blocks.
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

    /// Takes a holder from each block of a sequence, given from its first block on.
    ///
    /// # Panics
    /// A block is none of this pool's, or nobody holds it.
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

    /// Makes a held, full block reusable: it holds `tokens` and follows `after`.
    ///
    /// Returns the block to use from now on: where an equal one is reusable already, that one, held in place of the one
    /// given, which is released. `None` when another content has the hash; the block then stays as it was, and nothing
    /// that follows it can become reusable.
    ///
    /// # Panics
    /// The block is none of this pool's.
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

    /// Forgets every reusable block. Sequences keep the blocks they hold, but must not store any that follow them.
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

    /// What changed since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<KvEventData> {
        std::mem::take(&mut self.events)
    }

    /// Every reusable block, in no particular order: what the events add up to.
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

    /// How many sequences hold the block.
    pub(crate) fn holders(&self, id: BlockId) -> u32 {
        self.blocks[id.index()].holders
    }
}

impl fmt::Debug for KvBlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvBlockPool")
            .field("total", &self.total())
            .field("used", &self.used())
            .field("free", &self.free())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
