//! [`Sequence`]: a prompt, its generated tokens, and how much of them is in KV blocks.

use genset_backend_common::TokenId;
use genset_backend_common::kv::{BlockHash, hash_block};
use tokio::sync::oneshot;

use crate::pool::{After, BlockId, KvBlockPool};

/// The caller's id of a sequence, unique among those in the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A sequence to generate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSequence {
    /// Unique among the sequences in the scheduler.
    pub id: SequenceId,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// Larger priorities run first.
    pub priority: i32,
    /// The root of the sequence's block hashes, made of its salt and its adapter ([`sequence_root`]). Only sequences with the
    /// same root share KV blocks.
    ///
    /// [`sequence_root`]: genset_backend_common::kv::sequence_root
    pub root: Option<BlockHash>,
}

/// The destination of the KV blocks that a sequence receives from another instance.
#[derive(Debug)]
pub struct ReceivingPlace {
    /// The sequence's id.
    pub id: SequenceId,
    /// Tokens from the start whose keys and values are already in the cache: a multiple of the block size.
    pub cached_tokens: usize,
    /// Closes once the sequence no longer waits for the blocks.
    pub lost: oneshot::Receiver<()>,
}

/// A sequence, waiting or running.
#[derive(Debug)]
pub struct Sequence {
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    cached_tokens: Option<usize>,
    /// Its reader is behind, so it generates no tokens.
    pub(crate) is_paused: bool,
    /// Tokens whose keys and values are in `blocks`.
    pub(crate) computed: usize,
    /// Tokens in the step under way.
    pub(crate) planned: usize,
    /// Draft tokens behind the planned ones.
    pub(crate) drafts: Vec<TokenId>,
    pub(crate) blocks: Vec<BlockId>,
    /// The predecessor of its first block, if it has a salt or an adapter.
    root: Option<BlockHash>,
    /// Hashes of the full blocks of `tokens`, computed or not.
    hashes: Vec<BlockHash>,
    /// Full blocks, from the start, that were made reusable.
    stored_blocks: usize,
    /// Whether more blocks may become reusable. False after the cache was cleared while it ran.
    is_storing: bool,
    receipt: Receipt,
}

/// Whether the keys and values of its prompt come from another instance.
#[derive(Debug)]
pub(crate) enum Receipt {
    /// No, or no longer: it computes its missing tokens.
    None,
    /// Yes. The sender delivers the place once it has blocks.
    Expected(oneshot::Sender<ReceivingPlace>),
    /// It has blocks and waits for their content until this is dropped.
    Running { _place: oneshot::Sender<()> },
}

impl Sequence {
    pub(crate) fn new(new: NewSequence, receipt: Receipt, pool: &KvBlockPool) -> Self {
        let mut sequence = Self {
            prompt_tokens: new.prompt.len(),
            tokens: new.prompt,
            cached_tokens: None,
            is_paused: false,
            computed: 0,
            planned: 0,
            drafts: Vec::new(),
            blocks: Vec::new(),
            root: new.root,
            hashes: Vec::new(),
            stored_blocks: 0,
            is_storing: true,
            receipt,
        };
        sequence.hash_full_blocks(pool);
        sequence
    }

    /// The prompt and generated tokens.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The number of prompt tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// The number of tokens generated so far.
    #[must_use]
    pub fn generated_tokens(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// The number of prompt tokens that were in the prefix cache when the sequence first ran; 0 before that.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens.unwrap_or(0)
    }

    /// The block table: block `i` has the keys and values of tokens from `i * block_size` on.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The number of tokens to compute before the next one can be sampled, at least 1.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// The reusable blocks it can begin with. Never all its tokens: the last one must be computed for its logits.
    pub(crate) fn find_prefix(&self, pool: &KvBlockPool) -> Vec<BlockId> {
        let most = (self.tokens.len() - 1) / pool.block_size();
        let hashes = self.hashes.get(..most).unwrap_or(&self.hashes);
        pool.find_prefix(self.root, &self.tokens, hashes)
    }

    /// Starts to run in `blocks`, which are held for it and of which the first `reused` already have their content. Returns
    /// whether this is the first time.
    pub(crate) fn begin(
        &mut self,
        id: SequenceId,
        blocks: Vec<BlockId>,
        reused: usize,
        block_size: usize,
    ) -> bool {
        self.blocks = blocks;
        self.computed = reused * block_size;
        self.stored_blocks = reused;
        self.is_storing = true;
        self.receipt = match std::mem::replace(&mut self.receipt, Receipt::None) {
            Receipt::Expected(told) => {
                let (place, lost) = oneshot::channel();
                // A sequence whose reader has left is cancelled soon.
                drop(told.send(ReceivingPlace {
                    id,
                    cached_tokens: self.computed,
                    lost,
                }));
                Receipt::Running { _place: place }
            }
            receipt @ (Receipt::None | Receipt::Running { .. }) => receipt,
        };
        let is_first_time = self.cached_tokens.is_none();
        self.cached_tokens.get_or_insert(self.computed);
        is_first_time
    }

    /// Returns all of its blocks; every token must be computed again.
    pub(crate) fn give_up_blocks(&mut self) -> Vec<BlockId> {
        self.unplan();
        (self.computed, self.stored_blocks) = (0, 0);
        if self.is_receiving() {
            // Blocks that still arrive have no destination.
            self.receipt = Receipt::None;
        }
        std::mem::take(&mut self.blocks)
    }

    /// Removes it from the step under way.
    pub(crate) fn unplan(&mut self) {
        self.planned = 0;
        self.drafts.clear();
    }

    /// Whether the step under way computes its last token, so that a token is sampled.
    pub(crate) fn chooses(&self) -> bool {
        self.computed + self.planned == self.tokens.len()
    }

    /// The number of drafts that fit its blocks.
    pub(crate) fn room_for_drafts(&self, block_size: usize) -> usize {
        (self.blocks.len() * block_size).saturating_sub(self.tokens.len())
    }

    /// Makes the first `accepted` drafts its tokens, computed by the step under way.
    pub(crate) fn accept_drafts(&mut self, accepted: usize, pool: &KvBlockPool) {
        let accepted = accepted.min(self.drafts.len());
        self.tokens.extend(self.drafts.drain(..accepted));
        self.planned += accepted;
        self.hash_full_blocks(pool);
    }

    /// Drops the drafts that were not accepted, and their blocks.
    fn drop_drafts(&mut self, pool: &mut KvBlockPool) {
        self.drafts.clear();
        let needed = pool.blocks_for(self.tokens.len());
        if self.blocks.len() > needed {
            pool.release(&self.blocks.split_off(needed));
        }
    }

    /// Marks the planned tokens as computed. Without a new token, the last one is computed again.
    pub(crate) fn advance(&mut self, new: Option<TokenId>, pool: &mut KvBlockPool) {
        let computed = self.computed + std::mem::take(&mut self.planned);
        let is_at_end = computed == self.tokens.len();
        self.computed = if is_at_end && new.is_none() {
            computed - 1
        } else {
            computed
        };
        self.tokens.extend(new.filter(|_| is_at_end));
        self.hash_full_blocks(pool);
        self.store_full_blocks(pool);
        self.drop_drafts(pool);
    }

    /// Marks the planned tokens as computed; no more will follow.
    pub(crate) fn end(&mut self, pool: &mut KvBlockPool) {
        self.computed += std::mem::take(&mut self.planned);
        self.store_full_blocks(pool);
        self.drop_drafts(pool);
    }

    /// Whether it waits for the content of its blocks.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        matches!(self.receipt, Receipt::Running { .. })
    }

    /// Whether it computes nothing in the next step.
    pub(crate) fn cannot_go_on(&self) -> bool {
        self.is_paused || self.is_receiving()
    }

    /// The number of tokens whose keys and values it needs: all but the last, which is computed for its logits.
    #[must_use]
    pub fn receivable_tokens(&self) -> usize {
        self.tokens.len() - 1
    }

    /// The number of tokens from the start whose keys and values are in its blocks.
    #[must_use]
    pub fn computed_tokens(&self) -> usize {
        self.computed
    }

    /// Marks the content of its blocks as received.
    pub(crate) fn receive(&mut self, pool: &mut KvBlockPool) {
        self.receipt = Receipt::None;
        self.computed = self.computed.max(self.receivable_tokens());
        self.store_full_blocks(pool);
    }

    /// Stops making its blocks, and their successors, reusable.
    pub(crate) fn stop_storing(&mut self) {
        self.is_storing = false;
    }

    fn hash_full_blocks(&mut self, pool: &KvBlockPool) {
        if !pool.is_caching() {
            return;
        }
        let hashed = self.hashes.len() * pool.block_size();
        for tokens in self.tokens[hashed..].chunks_exact(pool.block_size()) {
            let hash = hash_block(self.after(self.hashes.len()).hash(), tokens);
            self.hashes.push(hash);
        }
    }

    /// What the block at `place` follows.
    fn after(&self, place: usize) -> After {
        let before = place.checked_sub(1).map(|before| self.hashes[before]);
        before.map_or(After::Start(self.root), After::Block)
    }

    fn store_full_blocks(&mut self, pool: &mut KvBlockPool) {
        let size = pool.block_size();
        while pool.is_caching()
            && self.is_storing
            && (self.stored_blocks + 1) * size <= self.computed
        {
            let place = self.stored_blocks;
            let after = self.after(place);
            let tokens = &self.tokens[place * size..(place + 1) * size];
            match pool.store(self.blocks[place], after, self.hashes[place], tokens) {
                Some(block) => self.blocks[place] = block,
                None => self.is_storing = false,
            }
            self.stored_blocks += 1;
        }
    }
}
