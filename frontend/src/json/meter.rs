//! [`Meter`] counts what is made from one body while it is made, within a limit and on a request's account.

use std::cell::{Cell, RefCell};
use std::fmt;

use genset_backend_common::TokenId;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::unreadable;
use crate::budget::MemoryShare;
use crate::error::ApiError;

/// The values of a body may take this many bytes per byte of the body,
const BYTES_PER_BYTE: usize = 3;

/// and this much in addition, for short bodies of many values: ten thousand messages of a chat, or half a megabyte of tools.
const FREE_BYTES: usize = 6 << 20;

/// The account is charged ahead in chunks of this size.
const CHARGE_BYTES: usize = 64 << 10;

/// The overhead of an allocation.
const ALLOCATION_BYTES: usize = 16;

/// A field of an object: its value, its name's slot and its hash.
const ENTRY_BYTES: usize = size_of::<Value>() + size_of::<String>() + size_of::<u64>();

/// Counts the values that are made from a body.
#[derive(Debug)]
pub(crate) struct Meter {
    limit: usize,
    made: Cell<usize>,
    share: RefCell<MemoryShare>,
    /// Why the share could not grow.
    refusal: RefCell<Option<ApiError>>,
}

impl Meter {
    /// A meter for a body of `body_bytes`.
    pub(crate) fn new(body_bytes: usize, share: MemoryShare) -> Self {
        let limit = body_bytes.saturating_mul(BYTES_PER_BYTE);
        Self {
            limit: limit.saturating_add(FREE_BYTES),
            made: Cell::new(0),
            share: RefCell::new(share),
            refusal: RefCell::new(None),
        }
    }

    /// Returns the share, reduced to what was made.
    pub(super) fn settle(&self) -> MemoryShare {
        let empty = self.share.borrow().another();
        let mut share = self.share.replace(empty);
        let ahead = share.bytes().saturating_sub(self.made.get());
        share.shrink(ahead);
        share
    }

    /// Parses a field's text into a value.
    ///
    /// # Errors
    /// A 400 that names the field if it cannot be read or would take too much; a 503 if there is no room for it.
    pub(crate) fn value(&self, name: &str, text: &str) -> Result<Value, ApiError> {
        let read = self.read(name, text, Values(self))?;
        read.map_err(|error| unreadable(name, &error))
    }

    /// Parses a field's text into a string.
    ///
    /// # Errors
    /// As [`Self::value`]; also a 400 if it is not a string.
    pub(crate) fn text(&self, name: &str, text: &str) -> Result<String, ApiError> {
        match self.value(name, text)? {
            Value::String(text) => Ok(text),
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::Array(_)
            | Value::Object(_) => Err(ApiError::invalid(name, "expected a string")),
        }
    }

    /// Parses JSON that the client wrote inside a string; the inner error says where it is invalid.
    ///
    /// # Errors
    /// As [`Self::value`], except for invalid JSON.
    pub(crate) fn value_in_text(
        &self,
        name: &str,
        text: &str,
    ) -> Result<Result<Value, serde_json::Error>, ApiError> {
        self.read(name, text, Values(self))
    }

    /// Reads a list of token ids.
    ///
    /// # Errors
    /// As [`Self::value`].
    pub(crate) fn token_ids(&self, name: &str, text: &str) -> Result<Vec<TokenId>, ApiError> {
        let read = self.read(name, text, Ids(self))?;
        read.map_err(|_| not_token_ids(name))
    }

    fn read<'t, S: DeserializeSeed<'t>>(
        &self,
        name: &str,
        text: &'t str,
        seed: S,
    ) -> Result<Result<S::Value, serde_json::Error>, ApiError> {
        let mut reader = serde_json::Deserializer::from_str(text);
        let read = seed.deserialize(&mut reader).and_then(|value| {
            reader.end()?;
            Ok(value)
        });
        if let Some(refusal) = self.refusal.take() {
            return Err(refusal);
        }
        if self.made.get() > self.limit {
            return Err(self.too_much(name));
        }
        Ok(read)
    }

    fn too_much(&self, name: &str) -> ApiError {
        let problem = format!(
            "too many values for the size of the request: its parsed JSON may take {BYTES_PER_BYTE} times its \
             bytes and {} MiB, here {} bytes",
            FREE_BYTES >> 20,
            self.limit
        );
        ApiError::invalid(name, problem)
    }

    /// Charges bytes that are about to be allocated.
    fn count<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        let made = self.made.get().saturating_add(bytes);
        self.made.set(made);
        if made > self.limit {
            return Err(E::custom("too many values"));
        }
        let mut share = self.share.borrow_mut();
        let missing = made.saturating_sub(share.bytes());
        if missing == 0 {
            return Ok(());
        }
        // The last chunk may be partial.
        let charged = share
            .grow(missing.max(CHARGE_BYTES))
            .or_else(|_| share.grow(missing));
        charged.map_err(|refusal| {
            self.refusal.replace(Some(refusal));
            E::custom("no room")
        })
    }
}

/// The 400 for a list that does not contain token ids.
pub(crate) fn not_token_ids(name: &str) -> ApiError {
    let problem = "a token id must be an integer between 0 and 4294967295";
    ApiError::invalid(name, problem)
}

/// The bytes that an object's fields take, without the content of names and values.
fn object_bytes(fields: usize) -> usize {
    let room = match fields {
        0 => return 0,
        1..=3 => 3,
        4..=7 => 7,
        // As hash tables grow: at most seven of eight slots are used, and their number doubles.
        more => (more * 8 / 7).next_power_of_two() / 8 * 7,
    };
    room * (ENTRY_BYTES + 2 * size_of::<usize>()) + 2 * ALLOCATION_BYTES
}

fn text_bytes(text: &str) -> usize {
    if text.is_empty() {
        0
    } else {
        text.len() + ALLOCATION_BYTES
    }
}

/// The approximate memory of a value.
pub(crate) fn value_bytes(value: &Value) -> usize {
    let inside = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text_bytes(text),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => {
            let inside = |(name, value): (&String, &Value)| {
                text_bytes(name) + value_bytes(value) - size_of::<Value>()
            };
            object_bytes(fields.len()) + fields.iter().map(inside).sum::<usize>()
        }
    };
    inside + size_of::<Value>()
}

/// Reserves room in a list for one more item.
fn reserve_one<T, E: serde::de::Error>(list: &mut Vec<T>, meter: &Meter) -> Result<(), E> {
    if list.len() == list.capacity() {
        let more = (list.len() / 2).max(4);
        meter.count::<E>(more * size_of::<T>())?;
        list.reserve_exact(more);
    }
    Ok(())
}

/// Any value.
#[derive(Clone, Copy)]
struct Values<'m>(&'m Meter);

impl<'de> DeserializeSeed<'de> for Values<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Values<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        self.0.count::<E>(text_bytes(value))?;
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            reserve_one::<_, A::Error>(&mut list, self.0)?;
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let (before, after) = (object_bytes(object.len()), object_bytes(object.len() + 1));
            self.0
                .count::<A::Error>(text_bytes(&name) + after - before)?;
            object.insert(name, fields.next_value_seed(self)?);
        }
        Ok(Value::Object(object))
    }
}

/// Token ids.
#[derive(Clone, Copy)]
struct Ids<'m>(&'m Meter);

impl<'de> DeserializeSeed<'de> for Ids<'_> {
    type Value = Vec<TokenId>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Vec<TokenId>, D::Error> {
        reader.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Ids<'_> {
    type Value = Vec<TokenId>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<TokenId>, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = items.next_element::<TokenId>()? {
            reserve_one::<_, A::Error>(&mut ids, self.0)?;
            ids.push(id);
        }
        Ok(ids)
    }
}
