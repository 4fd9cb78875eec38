//! [`Oracle`] chooses with exact knowledge of every cache and queue at this moment. No real router has that; it shows what
//! better knowledge could achieve.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use futures_util::FutureExt;
use genset_backend_common::GenerateRequest;
use genset_backend_common::kv::{
    BlockHash, KvEventData, KvEventPublisher, KvEventSubscription, hash_blocks, sequence_root,
};
use genset_runtime::InstanceId;
use genset_runtime::selection::Candidate;
use parking_lot::Mutex;

use crate::fleet::Fleet;

/// Chooses by the true state.
pub(crate) struct Oracle {
    fleet: Arc<Fleet>,
    block_size: NonZeroU32,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    caches: HashMap<InstanceId, Cache>,
    /// Prompt tokens per instance, from the choice until the engine's first token.
    pending: HashMap<InstanceId, u64>,
    /// Requests per instance, so that equal candidates take turns.
    served: HashMap<InstanceId, u64>,
}

/// A worker's prefix cache.
#[derive(Debug)]
struct Cache {
    publisher: KvEventPublisher,
    changes: KvEventSubscription,
    blocks: HashSet<BlockHash>,
}

/// Prompt tokens that an instance has to compute before this request's first token; subtracted on drop.
#[derive(Debug)]
pub(crate) struct Pending {
    state: Arc<Mutex<State>>,
    instance: InstanceId,
    tokens: u64,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(pending) = self.state.lock().pending.get_mut(&self.instance) {
            *pending = pending.saturating_sub(self.tokens);
        }
    }
}

impl Oracle {
    pub(crate) fn new(fleet: Arc<Fleet>, block_size: NonZeroU32) -> Self {
        Self {
            fleet,
            block_size,
            state: Arc::default(),
        }
    }

    /// The best candidate, and its additional load.
    pub(crate) fn choose(
        &self,
        request: &GenerateRequest,
        candidates: &[Candidate],
    ) -> Option<(usize, Pending)> {
        let tokens = request.tokens().ok()?;
        let root = sequence_root(request.cache_salt.as_deref(), request.adapter.as_deref());
        let hashes = hash_blocks(root, tokens, self.block_size);
        let mut state = self.state.lock();
        let costs = candidates.iter().enumerate().map(|(place, candidate)| {
            let instance = candidate.instance;
            let (cost, new) = self.cost(&mut state, instance, &hashes, tokens.len());
            let served = state.served.get(&instance).copied().unwrap_or(0);
            (cost, served, place, instance, new)
        });
        let (_, _, place, instance, tokens) = costs.min()?;
        *state.served.entry(instance).or_default() += 1;
        *state.pending.entry(instance).or_default() += tokens;
        let pending = Pending {
            state: Arc::clone(&self.state),
            instance,
            tokens,
        };
        Some((place, pending))
    }

    /// Tokens to compute and to read there, and the prompt's uncached tokens.
    fn cost(
        &self,
        state: &mut State,
        instance: InstanceId,
        hashes: &[BlockHash],
        prompt_tokens: usize,
    ) -> (u64, u64) {
        let size = u64::from(self.block_size.get());
        let prompt_tokens = u64::try_from(prompt_tokens).unwrap_or(u64::MAX);
        let Some(observed) = self.fleet.observed(instance) else {
            return (u64::MAX, prompt_tokens);
        };
        let pending = state.pending.get(&instance).copied().unwrap_or(0);
        let cached = observed.kv_events().map_or(0, |publisher| {
            let cache = state.caches.entry(instance);
            let cache = cache.or_insert_with(|| Cache::new(publisher));
            cache.follow();
            hashes
                .iter()
                .take_while(|hash| cache.blocks.contains(*hash))
                .count()
        });
        let cached = u64::try_from(cached).unwrap_or(u64::MAX);
        let new = prompt_tokens.saturating_sub(cached * size);
        let cost = new + pending + observed.kv_used_blocks() * size;
        (cost, new)
    }
}

impl Cache {
    fn new(publisher: KvEventPublisher) -> Self {
        let changes = publisher.subscribe();
        let mut cache = Self {
            publisher,
            changes,
            blocks: HashSet::new(),
        };
        cache.take_snapshot();
        cache
    }

    fn take_snapshot(&mut self) {
        let blocks = self.changes.snapshot.blocks.iter();
        self.blocks = blocks.map(|block| block.hash).collect();
    }

    /// Applies the events published since the last call.
    fn follow(&mut self) {
        loop {
            match tokio::task::unconstrained(self.changes.next()).now_or_never() {
                None => return,
                Some(Ok(event)) => self.apply(event.data),
                Some(Err(_)) => {
                    self.changes = self.publisher.subscribe();
                    self.take_snapshot();
                }
            }
        }
    }

    fn apply(&mut self, data: KvEventData) {
        match data {
            KvEventData::Stored { blocks, .. } => self.blocks.extend(blocks),
            KvEventData::Removed { blocks } => {
                for block in blocks {
                    self.blocks.remove(&block);
                }
            }
            KvEventData::Cleared => self.blocks.clear(),
        }
    }
}
