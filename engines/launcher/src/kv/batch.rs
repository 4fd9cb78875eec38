//! [`Batch`]: the events that a server publishes together, in both of its encodings: maps since 2026, arrays before. Pure.

use std::fmt;

use genset_backend_common::TokenId;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

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
    Stored(Stored),
    Removed(Removed),
    Cleared,
    /// An event of another kind, with its name.
    Other(String),
}

/// A server's block hash: a signed or unsigned number, or a digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum ServerHash {
    Number(u64),
    Digest(Box<[u8]>),
}

/// Blocks became reusable. The fields are in the order of the array encoding.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Stored {
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
    pub(super) kv_cache_spec_sliding_window: Option<u32>,
    pub(super) locality: Option<String>,
    /// The salt of every block. Only SGLang has it, in the map encoding.
    #[serde(skip)]
    pub(super) cache_salt: Option<String>,
}

/// Blocks are no longer reusable.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Removed {
    pub(super) block_hashes: Vec<ServerHash>,
    pub(super) medium: Option<String>,
    pub(super) group_idx: Option<u32>,
    pub(super) locality: Option<String>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum ExtraKey {
    /// A salt, or the name of an adapter.
    Text(String),
    /// A part of an image, or something else.
    Other(IgnoredAny),
}

/// The fields of all event kinds, in the map encoding.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Fields {
    #[serde(rename = "type")]
    kind: String,
    block_hashes: Vec<ServerHash>,
    parent_block_hash: Option<ServerHash>,
    token_ids: Vec<TokenId>,
    block_size: u32,
    lora_id: Option<i64>,
    medium: Option<String>,
    lora_name: Option<String>,
    extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    group_idx: Option<u32>,
    kv_cache_spec_kind: Option<String>,
    kv_cache_spec_sliding_window: Option<u32>,
    locality: Option<String>,
    cache_salt: Option<String>,
}

impl From<Fields> for Event {
    fn from(fields: Fields) -> Self {
        match fields.kind.as_str() {
            "BlockStored" => Self::Stored(Stored {
                block_hashes: fields.block_hashes,
                parent_block_hash: fields.parent_block_hash,
                token_ids: fields.token_ids,
                block_size: fields.block_size,
                lora_id: fields.lora_id,
                medium: fields.medium,
                lora_name: fields.lora_name,
                extra_keys: fields.extra_keys,
                group_idx: fields.group_idx,
                kv_cache_spec_kind: fields.kv_cache_spec_kind,
                kv_cache_spec_sliding_window: fields.kv_cache_spec_sliding_window,
                locality: fields.locality,
                cache_salt: fields.cache_salt,
            }),
            "BlockRemoved" => Self::Removed(Removed {
                block_hashes: fields.block_hashes,
                medium: fields.medium,
                group_idx: fields.group_idx,
                locality: fields.locality,
            }),
            "AllBlocksCleared" => Self::Cleared,
            _ => Self::Other(fields.kind),
        }
    }
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
        Fields::deserialize(MapAccessDeserializer::new(map)).map(Event::from)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Event, A::Error> {
        let kind: String = seq
            .next_element()?
            .ok_or_else(|| A::Error::custom("an event without a name"))?;
        let event = match kind.as_str() {
            "BlockStored" => {
                Event::Stored(Stored::deserialize(SeqAccessDeserializer::new(&mut seq))?)
            }
            "BlockRemoved" => {
                Event::Removed(Removed::deserialize(SeqAccessDeserializer::new(&mut seq))?)
            }
            "AllBlocksCleared" => Event::Cleared,
            _ => Event::Other(kind),
        };
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(event)
    }
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
        f.write_str("a block's hash, as a number or as bytes")
    }

    fn visit_u64<E>(self, value: u64) -> Result<ServerHash, E> {
        Ok(ServerHash::Number(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<ServerHash, E> {
        Ok(ServerHash::Number(value.cast_unsigned()))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<ServerHash, E> {
        Ok(ServerHash::Digest(value.into()))
    }
}
