//! [`Sequence`]: a prompt and what was generated after it, and how much of it is in KV blocks.

use genset_backend_common::TokenId;
use genset_backend_common::kv::BlockHash;

use crate::pool::{BlockId, KvBlockPool};

/// The caller's name for a sequence, unique among those present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// A sequence to generate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSequence {
    /// Unique among the sequences present.
    pub id: SequenceId,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// Larger runs first.
    pub priority: i32,
}

/// A sequence, waiting or running.
#[derive(Debug)]
pub struct Sequence {
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    cached_tokens: Option<usize>,
    pub(crate) priority: i32,
    pub(crate) arrival: u64,
    /// Nobody takes its tokens at the moment, so it makes none.
    pub(crate) is_paused: bool,
    /// Tokens whose keys and values are in `blocks`.
    pub(crate) computed: usize,
    /// Tokens in the step under way.
    pub(crate) planned: usize,
    pub(crate) blocks: Vec<BlockId>,
    /// Hashes of the full blocks of `tokens`, computed or not.
    hashes: Vec<BlockHash>,
    /// Full blocks, from the first on, that were made reusable.
    stored_blocks: usize,
    /// Whether further blocks may be: not after the cache was cleared under it.
    is_storing: bool,
}

impl Sequence {
    pub(crate) fn new(new: NewSequence, arrival: u64, pool: &KvBlockPool) -> Self {
        let mut sequence = Self {
            prompt_tokens: new.prompt.len(),
            tokens: new.prompt,
            cached_tokens: None,
            priority: new.priority,
            arrival,
            is_paused: false,
            computed: 0,
            planned: 0,
            blocks: Vec::new(),
            hashes: Vec::new(),
            stored_blocks: 0,
            is_storing: true,
        };
        sequence.hash_full_blocks(pool);
        sequence
    }

    /// Prompt and generated tokens.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens generated so far.
    #[must_use]
    pub fn generated_tokens(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }

    /// Prompt tokens that were found in the prefix cache when the sequence first ran; 0 before that.
    #[must_use]
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens.unwrap_or(0)
    }

    /// The block table: block `i` has the keys and values of tokens from `i * block_size` on.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens to compute before the next one can be chosen, at least 1.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// The reusable blocks it can begin with. Never all of it: the last token must be computed for its logits.
    pub(crate) fn find_prefix(&self, pool: &KvBlockPool) -> Vec<BlockId> {
        let most = (self.tokens.len() - 1) / pool.block_size();
        let hashes = self.hashes.get(..most).unwrap_or(&self.hashes);
        pool.find_prefix(&self.tokens, hashes)
    }

    /// Begins to run in blocks that are held for it, of which the first `reused` have their content already. Whether it
    /// is the first time.
    pub(crate) fn begin(&mut self, blocks: Vec<BlockId>, reused: usize, block_size: usize) -> bool {
        self.blocks = blocks;
        self.computed = reused * block_size;
        self.stored_blocks = reused;
        self.is_storing = true;
        let is_first_time = self.cached_tokens.is_none();
        self.cached_tokens.get_or_insert(self.computed);
        is_first_time
    }

    /// Gives up its blocks; everything must be computed again.
    pub(crate) fn give_up_blocks(&mut self) -> Vec<BlockId> {
        (self.computed, self.planned, self.stored_blocks) = (0, 0, 0);
        std::mem::take(&mut self.blocks)
    }

    /// The planned tokens were computed. Without a new token after the last one, that last one is computed again.
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
    }

    /// The planned tokens were computed, and no more will come.
    pub(crate) fn end(&mut self, pool: &mut KvBlockPool) {
        self.computed += std::mem::take(&mut self.planned);
        self.store_full_blocks(pool);
    }

    /// Its blocks can no more be reused, nor can those that follow them.
    pub(crate) fn stop_storing(&mut self) {
        self.is_storing = false;
    }

    fn hash_full_blocks(&mut self, pool: &KvBlockPool) {
        let hashed = self.hashes.len() * pool.block_size();
        for tokens in self.tokens[hashed..].chunks_exact(pool.block_size()) {
            let hash = pool.hash(self.hashes.last().copied(), tokens);
            self.hashes.push(hash);
        }
    }

    fn store_full_blocks(&mut self, pool: &mut KvBlockPool) {
        let size = pool.block_size();
        while self.is_storing && (self.stored_blocks + 1) * size <= self.computed {
            let place = self.stored_blocks;
            let parent = place.checked_sub(1).map(|before| self.hashes[before]);
            let tokens = &self.tokens[place * size..(place + 1) * size];
            match pool.store(self.blocks[place], parent, self.hashes[place], tokens) {
                Some(block) => self.blocks[place] = block,
                None => self.is_storing = false,
            }
            self.stored_blocks += 1;
        }
    }
}
