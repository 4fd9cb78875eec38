//! [`ResponseStore`]: the latest responses, in memory, up to a bound.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use super::item::Item;

/// A response that was given.
#[derive(Debug)]
pub struct Stored {
    /// The name of the API key that asked; nobody else gets it. `None` on a server without keys.
    pub owner: Option<String>,
    /// The `response` object.
    pub response: Value,
    /// What went before its output: earlier responses' items and its own input, oldest first.
    pub input: Vec<Arc<Item>>,
    /// What it answered.
    pub output: Vec<Arc<Item>>,
}

impl Stored {
    /// The conversation up to here.
    #[must_use]
    pub fn conversation(&self) -> Vec<Arc<Item>> {
        self.input.iter().chain(&self.output).cloned().collect()
    }

    /// What it weighs: its whole conversation, though parts of it may be shared with others.
    fn bytes(&self) -> usize {
        let items = self.input.iter().chain(&self.output);
        let items = items.map(|item| item.bytes() + size_of::<Arc<Item>>());
        items.sum::<usize>() + value_bytes(&self.response)
    }
}

/// About how much memory a value takes.
fn value_bytes(value: &Value) -> usize {
    let inside = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| name.len() + size_of::<String>() + value_bytes(value))
            .sum(),
    };
    inside + size_of::<Value>()
}

/// The latest responses by id. The oldest go when there are too many, or they take too much memory.
#[derive(Debug)]
pub struct ResponseStore {
    max_responses: usize,
    max_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, (Arc<Stored>, usize)>,
    /// Oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

impl ResponseStore {
    /// A store of so many responses, and so many bytes. Either being 0 keeps nothing.
    #[must_use]
    pub fn new(max_responses: usize, max_bytes: usize) -> Self {
        Self {
            max_responses,
            max_bytes,
            kept: Mutex::default(),
        }
    }

    /// Whether it keeps anything.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.max_responses > 0 && self.max_bytes > 0
    }

    /// Keeps a response; one that is larger than the whole store is not kept.
    pub fn put(&self, id: String, stored: Stored) {
        let bytes = stored.bytes();
        if !self.keeps() || bytes > self.max_bytes {
            return;
        }
        let mut kept = self.kept.lock();
        kept.bytes += bytes;
        kept.order.push_back(id.clone());
        kept.by_id.insert(id, (Arc::new(stored), bytes));
        while kept.by_id.len() > self.max_responses || kept.bytes > self.max_bytes {
            let Some(oldest) = kept.order.pop_front() else {
                break;
            };
            kept.remove(&oldest);
        }
    }

    /// A response that is kept for `owner`.
    #[must_use]
    pub fn get(&self, id: &str, owner: Option<&str>) -> Option<Arc<Stored>> {
        let kept = self.kept.lock();
        let (stored, _) = kept.by_id.get(id)?;
        (stored.owner.as_deref() == owner).then(|| Arc::clone(stored))
    }

    /// Forgets a response. Says whether it was there.
    pub fn delete(&self, id: &str, owner: Option<&str>) -> bool {
        if self.get(id, owner).is_none() {
            return false;
        }
        let mut kept = self.kept.lock();
        kept.order.retain(|other| other != id);
        kept.remove(id)
    }
}

impl Kept {
    fn remove(&mut self, id: &str) -> bool {
        let Some((_, bytes)) = self.by_id.remove(id) else {
            return false;
        };
        self.bytes -= bytes;
        true
    }
}
