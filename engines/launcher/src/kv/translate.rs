//! [`Translator`]: converts a server's events to our hashes. Pure.
//!
//! A server hashes blocks in its own way, which we cannot reproduce. But its events contain the tokens, from which our hashes
//! are computed. A map from its hashes to ours finds the parent of a block, and the blocks that are removed.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;

use genset_backend_common::kv::{BlockHash, KvEventData, hash_block, salt_root};

use super::batch::{Blocks, Event, ExtraKey, ServerHash};
use crate::dialect::Dialect;

/// The medium of blocks in the engine's own memory, even if that is not a GPU.
const OWN_MEDIUM: &str = "GPU";

/// Attention kinds whose blocks contain every token of the prefix.
const WHOLE_PREFIX: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];

/// The blocks of a server, by its hash.
#[derive(Debug)]
pub(super) struct Translator {
    /// Tokens per KV block.
    block_size: usize,
    /// The maximum number of blocks to track.
    max_blocks: usize,
    /// Whether the server reports each copy of a block, and its removal. vLLM may have several copies with one hash; SGLang's
    /// tree has each block once.
    has_copies: bool,
    ours: HashMap<ServerHash, Held>,
    /// How many of the server's hashes map to each of our hashes.
    holders: HashMap<BlockHash, u32>,
    /// The reasons for which events were left out; each is logged once.
    left_out: BTreeSet<&'static str>,
}

/// Our block for a hash of the server.
#[derive(Debug)]
struct Held {
    block: BlockHash,
    /// The number of reported copies that still exist; at least 1.
    copies: u32,
}

impl Translator {
    pub(super) fn new(dialect: Dialect, block_size: NonZeroU32, max_blocks: usize) -> Self {
        Self {
            block_size: usize::try_from(block_size.get()).unwrap_or(usize::MAX),
            max_blocks,
            has_copies: matches!(dialect, Dialect::Vllm),
            ours: HashMap::new(),
            holders: HashMap::new(),
            left_out: BTreeSet::new(),
        }
    }

    /// Returns the changes of a server's event.
    pub(super) fn apply(&mut self, event: Event) -> Vec<KvEventData> {
        match event {
            Event::Stored(stored) => match self.stored(&stored) {
                Ok(changes) => changes,
                Err(reason) => {
                    self.leave_out(reason);
                    Vec::new()
                }
            },
            Event::Removed(removed) => self.removed(&removed).into_iter().collect(),
            Event::Cleared => vec![self.clear()],
            Event::Other(kind) => {
                tracing::debug!(kind, "an event of the server is not known");
                self.leave_out("an event of a kind that is not known");
                Vec::new()
            }
        }
    }

    /// Forgets all blocks of the server.
    pub(super) fn clear(&mut self) -> KvEventData {
        self.ours.clear();
        self.holders.clear();
        KvEventData::Cleared
    }

    /// Logs that events are left out, once for each reason.
    fn leave_out(&mut self, reason: &'static str) {
        if self.left_out.insert(reason) {
            tracing::info!(reason, "KV events of the server are left out");
        }
    }

    fn stored(&mut self, stored: &Blocks) -> Result<Vec<KvEventData>, &'static str> {
        let salt = self.check(stored)?;
        let mut parent = match &stored.parent_block_hash {
            None => None,
            Some(parent) => Some(
                self.ours
                    .get(parent)
                    .ok_or("a block after one that is not known")?
                    .block,
            ),
        };
        let mut before = parent.or_else(|| salt.map(salt_root));
        let mut changes = Vec::new();
        let mut run: Option<(Option<BlockHash>, Vec<BlockHash>)> = None;
        let blocks = stored.token_ids.chunks_exact(self.block_size);
        for (theirs, tokens) in stored.block_hashes.iter().zip(blocks) {
            let ours = hash_block(before, tokens);
            let Some(is_new) = self.hold(theirs, ours) else {
                self.leave_out("more blocks than the server has");
                break;
            };
            if is_new {
                run.get_or_insert_with(|| (parent, Vec::new())).1.push(ours);
            } else {
                changes.extend(run.take().map(stored_event));
            }
            (parent, before) = (Some(ours), Some(ours));
        }
        changes.extend(run.map(stored_event));
        Ok(changes)
    }

    /// Checks that the event's blocks can be hashed in our way. Returns the salt of the first block.
    fn check<'e>(&self, stored: &'e Blocks) -> Result<Option<&'e str>, &'static str> {
        if is_elsewhere(stored.medium.as_deref(), stored.locality.as_deref()) {
            return Err("blocks that are not in the engine's own memory");
        }
        let kind = stored.kv_cache_spec_kind.as_deref();
        if stored.group_idx.is_some_and(|group| group > 0)
            || kind.is_some_and(|kind| !WHOLE_PREFIX.contains(&kind))
        {
            return Err("blocks of a kind of attention that does not hold the whole prefix");
        }
        if usize::try_from(stored.block_size) != Ok(self.block_size) {
            return Err("blocks of another size than the server's");
        }
        if stored.block_hashes.len().checked_mul(self.block_size) != Some(stored.token_ids.len()) {
            return Err("blocks whose tokens are not all there");
        }
        if stored.lora_name.is_some() || stored.lora_id.is_some() {
            return Err("blocks of an adapter");
        }
        if let Some(salt) = &stored.cache_salt {
            return Ok(Some(salt));
        }
        let mut keys = stored.extra_keys.iter().flatten().map(|keys| {
            let keys = keys.as_deref().unwrap_or_default();
            match keys {
                [] => Ok(None),
                [ExtraKey::Text(salt)] => Ok(Some(salt.as_str())),
                [ExtraKey::Other(_)] | [_, _, ..] => Err("blocks of more than tokens and a salt"),
            }
        });
        let salt = keys.next().transpose()?.flatten();
        if salt.is_some() && stored.parent_block_hash.is_some() {
            return Err("blocks of more than tokens and a salt");
        }
        match keys.find(|key| *key != Ok(None)) {
            None => Ok(salt),
            Some(_) => Err("blocks of more than tokens and a salt"),
        }
    }

    /// Adds a copy. Returns whether our block is new; `None` if there is no room for it.
    fn hold(&mut self, theirs: &ServerHash, ours: BlockHash) -> Option<bool> {
        if let Some(held) = self.ours.get_mut(theirs) {
            if self.has_copies {
                held.copies = held.copies.saturating_add(1);
            }
            return Some(false);
        }
        if self.ours.len() >= self.max_blocks {
            return None;
        }
        let (block, copies) = (ours, 1);
        self.ours.insert(theirs.clone(), Held { block, copies });
        let holders = self.holders.entry(ours).or_default();
        *holders += 1;
        Some(*holders == 1)
    }

    fn removed(&mut self, removed: &Blocks) -> Option<KvEventData> {
        if is_elsewhere(removed.medium.as_deref(), removed.locality.as_deref())
            || removed.group_idx.is_some_and(|group| group > 0)
        {
            return None;
        }
        let gone = removed.block_hashes.iter();
        let blocks: Vec<BlockHash> = gone.filter_map(|theirs| self.release(theirs)).collect();
        (!blocks.is_empty()).then_some(KvEventData::Removed { blocks })
    }

    /// Removes a copy. Returns our block if no copy is left.
    fn release(&mut self, theirs: &ServerHash) -> Option<BlockHash> {
        let held = self.ours.get_mut(theirs)?;
        held.copies -= 1;
        if held.copies > 0 {
            return None;
        }
        let ours = self.ours.remove(theirs)?.block;
        let holders = self.holders.get_mut(&ours)?;
        *holders -= 1;
        if *holders > 0 {
            return None;
        }
        self.holders.remove(&ours);
        Some(ours)
    }
}

fn is_elsewhere(medium: Option<&str>, locality: Option<&str>) -> bool {
    medium.is_some_and(|medium| medium != OWN_MEDIUM) || locality == Some("REMOTE")
}

fn stored_event((parent, blocks): (Option<BlockHash>, Vec<BlockHash>)) -> KvEventData {
    KvEventData::Stored { parent, blocks }
}
