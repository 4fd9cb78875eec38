//! [`Batch`]: the events that a server publishes together, in both of its encodings: maps since 2026, arrays before. Pure.

use std::fmt;

use genset_backend_common::TokenId;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The kinds of events about blocks.
const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";

/// Events in order.
#[derive(Debug, Deserialize)]
pub(super) struct Batch {
    /// Seconds since 1970.
    _time: f64,
    pub(super) events: Vec<Event>,
    /// The data-parallel rank that published it.
    #[serde(default)]
    pub(super) rank: Option<u32>,
}

impl Batch {
    pub(super) fn read(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// Blocks became reusable.
    Stored(Blocks),
    /// Blocks are no longer reusable.
    Removed(Blocks),
    Cleared,
    /// An event of another kind, with its name.
    Other(String),
}

impl Event {
    fn of(kind: String, blocks: Blocks) -> Self {
        match kind.as_str() {
            STORED => Self::Stored(blocks),
            REMOVED => Self::Removed(blocks),
            "AllBlocksCleared" => Self::Cleared,
            _ => Self::Other(kind),
        }
    }
}

/// A server's block hash: a signed or unsigned number, or a digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum ServerHash {
    Number(u64),
    Digest(Box<[u8]>),
}

/// The blocks of an event, with the fields of all kinds of events.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Blocks {
    /// The event's kind, in the map encoding.
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) block_hashes: Vec<ServerHash>,
    pub(super) parent_block_hash: Option<ServerHash>,
    /// The tokens of all blocks, concatenated.
    pub(super) token_ids: Vec<TokenId>,
    pub(super) block_size: u32,
    pub(super) lora_id: Option<i64>,
    /// `GPU` for the engine's own memory, whatever its kind.
    pub(super) medium: Option<String>,
    pub(super) lora_name: Option<String>,
    /// What each block depends on besides its tokens.
    pub(super) extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    pub(super) group_idx: Option<u32>,
    pub(super) kv_cache_spec_kind: Option<String>,
    pub(super) locality: Option<String>,
    /// The salt of every block. Only SGLang has it, in the map encoding.
    pub(super) cache_salt: Option<String>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum ExtraKey {
    /// A salt, or the name of an adapter.
    Text(String),
    /// A part of an image, or something else.
    Other(IgnoredAny),
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EventVisitor)
    }
}

struct EventVisitor;

impl<'de> Visitor<'de> for EventVisitor {
    type Value = Event;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event, as a map or an array")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Event, A::Error> {
        let mut blocks = Blocks::deserialize(MapAccessDeserializer::new(map))?;
        let kind = std::mem::take(&mut blocks.kind);
        Ok(Event::of(kind, blocks))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Event, A::Error> {
        let kind: String = seq
            .next_element()?
            .ok_or_else(|| A::Error::custom("an event without a name"))?;
        let mut blocks = Blocks::default();
        if [STORED, REMOVED].contains(&kind.as_str()) {
            blocks.block_hashes = next(&mut seq)?;
        }
        if kind == STORED {
            blocks.parent_block_hash = next(&mut seq)?;
            blocks.token_ids = next(&mut seq)?;
            blocks.block_size = next(&mut seq)?;
            blocks.lora_id = next(&mut seq)?;
            blocks.medium = next(&mut seq)?;
            blocks.lora_name = next(&mut seq)?;
            blocks.extra_keys = next(&mut seq)?;
            blocks.group_idx = next(&mut seq)?;
            blocks.kv_cache_spec_kind = next(&mut seq)?;
            // The length of a sliding window.
            seq.next_element::<IgnoredAny>()?;
            blocks.locality = next(&mut seq)?;
        } else if kind == REMOVED {
            blocks.medium = next(&mut seq)?;
            blocks.group_idx = next(&mut seq)?;
            blocks.locality = next(&mut seq)?;
        }
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Event::of(kind, blocks))
    }
}

/// The next field of an array; later versions have more fields than older ones.
fn next<'de, A: SeqAccess<'de>, T: Deserialize<'de> + Default>(seq: &mut A) -> Result<T, A::Error> {
    Ok(seq.next_element()?.unwrap_or_default())
}

impl<'de> Deserialize<'de> for ServerHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HashVisitor)
    }
}

struct HashVisitor;

impl Visitor<'_> for HashVisitor {
    type Value = ServerHash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a block's hash, as a number, as text or as bytes")
    }

    fn visit_u64<E>(self, value: u64) -> Result<ServerHash, E> {
        Ok(ServerHash::Number(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<ServerHash, E> {
        Ok(ServerHash::Number(value.cast_unsigned()))
    }

    fn visit_str<E>(self, value: &str) -> Result<ServerHash, E> {
        Ok(ServerHash::Digest(value.as_bytes().into()))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<ServerHash, E> {
        Ok(ServerHash::Digest(value.into()))
    }
}
