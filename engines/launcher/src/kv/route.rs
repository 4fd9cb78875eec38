//! [`RouteReader`]: the KV events of TensorRT-LLM, which its server gives at a route, each once. Pure.
//!
//! # Source
//! TensorRT-LLM's main branch of 2026: `tensorrt_llm/_utils.py` (`KVCacheEventSerializer`), `serve/openai_server.py`
//! (`get_kv_cache_events`) and `serve/kv_event_fanout.py`. Its route leaves some kinds of events out in some versions, so a gap
//! in the numbers may be one of those or a loss; it counts as a loss.

use std::num::NonZeroU32;

use genset_backend_common::TokenId;
use genset_backend_common::kv::KvEventData;
use genset_backend_common::log_limit::OncePerMinute;
use serde::Deserialize;

use super::batch::{Blocks, Event, ServerHash};
use super::translate::Translator;
use crate::dialect::Dialect;

/// The route, which takes a POST. Of several readers, each event reaches one.
pub(super) const PATH: &str = "/kv_cache_events";

#[derive(Debug, Deserialize)]
struct Told {
    /// Counts all events of a rank, from 0.
    event_id: u64,
    data: Data,
    /// The attention window of the blocks, in tokens. With several, only the widest holds the whole prefix.
    #[serde(default)]
    window_size: Option<i64>,
    /// The group of layers of the blocks; newer versions only.
    #[serde(default)]
    layer_group_id: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Data {
    Stored {
        parent_hash: Option<ServerHash>,
        blocks: Vec<StoredBlock>,
    },
    Removed {
        block_hashes: Vec<ServerHash>,
    },
    /// New pools, blocks in another memory, other priorities.
    #[serde(other)]
    Other,
}

#[derive(Debug, Deserialize)]
struct StoredBlock {
    block_hash: ServerHash,
    tokens: Vec<Token>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    lora_id: Option<i64>,
}

#[derive(Debug, Deserialize)]
struct Token {
    token_id: TokenId,
}

/// Converts answers of the route, in order, to changes.
#[derive(Debug)]
pub(super) struct RouteReader {
    /// The number of the next event, once one was read.
    next: Option<u64>,
    /// The widest attention window so far.
    widest: Option<i64>,
    /// Tokens per KV block.
    block_size: usize,
    translator: Translator,
    logged: OncePerMinute,
}

impl RouteReader {
    pub(super) fn new(block_size: NonZeroU32, max_blocks: usize) -> Self {
        Self {
            next: None,
            widest: None,
            block_size: usize::try_from(block_size.get()).unwrap_or(usize::MAX),
            translator: Translator::new(Dialect::Trtllm, block_size, max_blocks),
            logged: OncePerMinute::default(),
        }
    }

    /// Returns the changes of an answer. After a gap they include a clear.
    ///
    /// # Errors
    /// If the answer cannot be decoded. Its events are lost then.
    pub(super) fn take(&mut self, answer: &[u8]) -> Result<Vec<KvEventData>, serde_json::Error> {
        let told: Vec<Told> = serde_json::from_slice(answer)?;
        let mut changes = Vec::new();
        for event in told {
            if self.next.is_some_and(|next| next != event.event_id) {
                if let Some(unlogged) = self.logged.unlogged("lost") {
                    tracing::warn!(
                        unlogged,
                        "KV events of the server are lost; further gaps are only counted for a minute (a larger event_buffer_max_size keeps more)"
                    );
                }
                changes.push(self.translator.clear());
            }
            self.next = Some(event.event_id.saturating_add(1));
            if event.window_size < self.widest {
                continue;
            }
            if event.window_size > self.widest {
                // The blocks so far were of a narrower window.
                if self.widest.is_some() {
                    changes.push(self.translator.clear());
                }
                self.widest = event.window_size;
            }
            if let Some(event) = self.event(event) {
                changes.extend(self.translator.apply(event));
            }
        }
        Ok(changes)
    }

    /// The event in the form of the other servers; `None` if it is of no whole block.
    fn event(&self, told: Told) -> Option<Event> {
        let group_idx = told.layer_group_id;
        match told.data {
            Data::Stored {
                parent_hash,
                blocks,
            } => {
                // The last block of an answer may be partly filled, and is stored again once it is full.
                let whole: Vec<StoredBlock> = blocks
                    .into_iter()
                    .take_while(|block| block.tokens.len() >= self.block_size)
                    .collect();
                let first = whole.first()?;
                let tokens = whole.iter().flat_map(|block| &block.tokens);
                Some(Event::Stored(Blocks {
                    parent_block_hash: parent_hash,
                    token_ids: tokens.map(|token| token.token_id).collect(),
                    block_size: u32::try_from(first.tokens.len()).unwrap_or(u32::MAX),
                    lora_id: first.lora_id,
                    cache_salt: first.cache_salt.clone(),
                    group_idx,
                    block_hashes: whole.into_iter().map(|block| block.block_hash).collect(),
                    ..Blocks::default()
                }))
            }
            Data::Removed { block_hashes } => Some(Event::Removed(Blocks {
                block_hashes,
                group_idx,
                ..Blocks::default()
            })),
            Data::Other => None,
        }
    }
}
