//! [`ResponseStore`]: the latest responses, in memory, within limits.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::item::Item;

/// A stored response.
#[derive(Debug)]
pub struct Stored {
    /// The name of the API key that owns it; other keys cannot read it. `None` on a server without keys.
    pub owner: Option<String>,
    /// The `response` object, as JSON.
    pub response: String,
    /// The conversation before its output: earlier responses' items and its own input, oldest first.
    pub input: Vec<Arc<Item>>,
    /// Its output.
    pub output: Vec<Arc<Item>>,
}

impl Stored {
    /// The conversation up to and including its output.
    #[must_use]
    pub fn conversation(&self) -> Vec<Arc<Item>> {
        self.items().cloned().collect()
    }

    fn items(&self) -> impl Iterator<Item = &Arc<Item>> {
        self.input.iter().chain(&self.output)
    }

    /// Its size: its whole conversation, although parts may be shared with others.
    fn bytes(&self) -> usize {
        let input = kept_bytes(self.input.iter().map(Arc::as_ref));
        let output = kept_output_bytes(self.output.iter().map(Arc::as_ref));
        input + output + self.response.len()
    }
}

/// The size of items.
fn kept_bytes<'a>(items: impl Iterator<Item = &'a Item>) -> usize {
    let items = items.map(|item| item.bytes() + size_of::<Arc<Item>>());
    items.sum()
}

/// The size of an answer's items, which are also found by their ids.
pub(super) fn kept_output_bytes<'a>(items: impl Iterator<Item = &'a Item>) -> usize {
    let items = items.map(|item| {
        let found = item.id().len() + size_of::<(String, AnswerItem)>();
        kept_bytes(std::iter::once(item)) + found
    });
    items.sum()
}

/// The latest responses by id. If there are too many, or they take too much memory, the owner with the most loses the oldest:
/// owners with less than an equal share lose nothing.
#[derive(Debug)]
pub struct ResponseStore {
    max_responses: usize,
    max_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, (Arc<Stored>, usize)>,
    by_owner: HashMap<Option<String>, Owned>,
    bytes: usize,
}

/// The stored responses of one owner.
#[derive(Debug, Default)]
struct Owned {
    /// Ids, oldest first.
    order: VecDeque<String>,
    bytes: usize,
    /// The items of their answers by id, for requests that name them.
    items: HashMap<String, AnswerItem>,
}

/// An item of an answer.
#[derive(Debug)]
struct AnswerItem {
    item: Arc<Item>,
    /// How often stored conversations have it: it is found as long as one does.
    uses: usize,
}

impl ResponseStore {
    /// A store with these limits. If either is 0, it keeps nothing.
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

    /// The most bytes that a response and its output may have to be stored with `input` before them; `None` if there is no room.
    pub(crate) fn room_behind<'a>(&self, input: impl Iterator<Item = &'a Item>) -> Option<usize> {
        let room = self.max_bytes.checked_sub(kept_bytes(input));
        room.filter(|_| self.keeps())
    }

    /// Stores a response, unless it is larger than the whole store.
    pub fn put(&self, id: String, stored: Stored) {
        let bytes = stored.bytes();
        if !self.keeps() || bytes > self.max_bytes {
            return;
        }
        let mut kept = self.kept.lock();
        kept.add(id, stored, bytes);
        while kept.by_id.len() > self.max_responses {
            kept.drop_oldest_of_most(|owned| owned.order.len());
        }
        while kept.bytes > self.max_bytes {
            kept.drop_oldest_of_most(|owned| owned.bytes);
        }
    }

    /// The stored response of `owner` with this id.
    #[must_use]
    pub fn get(&self, id: &str, owner: Option<&str>) -> Option<Arc<Stored>> {
        let kept = self.kept.lock();
        let (stored, _) = kept.by_id.get(id)?;
        (stored.owner.as_deref() == owner).then(|| Arc::clone(stored))
    }

    /// The item of this id, if an answer to `owner` had it and a stored conversation still has it.
    #[must_use]
    pub fn item(&self, id: &str, owner: Option<&str>) -> Option<Arc<Item>> {
        let owner = owner.map(str::to_owned);
        let kept = self.kept.lock();
        let found = kept.by_owner.get(&owner)?.items.get(id)?;
        Some(Arc::clone(&found.item))
    }

    /// Removes a response. Returns whether it existed.
    pub fn delete(&self, id: &str, owner: Option<&str>) -> bool {
        if self.get(id, owner).is_none() {
            return false;
        }
        self.kept.lock().remove(id)
    }
}

impl Owned {
    fn add_items(&mut self, stored: &Stored) {
        for item in &stored.output {
            let item = Arc::clone(item);
            let id = item.id().to_owned();
            self.items.insert(id, AnswerItem { item, uses: 0 });
        }
        for item in stored.items() {
            if let Some(known) = self.known(item) {
                known.uses += 1;
            }
        }
    }

    fn remove_items(&mut self, stored: &Stored) {
        for item in stored.items() {
            let Some(known) = self.known(item) else {
                continue;
            };
            known.uses -= 1;
            if known.uses == 0 {
                self.items.remove(item.id());
            }
        }
    }

    /// The entry of this very item: a client may give an item of its own any id.
    fn known(&mut self, item: &Arc<Item>) -> Option<&mut AnswerItem> {
        let known = self.items.get_mut(item.id());
        known.filter(|known| Arc::ptr_eq(&known.item, item))
    }
}

impl Kept {
    fn add(&mut self, id: String, stored: Stored, bytes: usize) {
        let owned = self.by_owner.entry(stored.owner.clone()).or_default();
        owned.order.push_back(id.clone());
        owned.bytes += bytes;
        owned.add_items(&stored);
        self.bytes += bytes;
        self.by_id.insert(id, (Arc::new(stored), bytes));
    }

    /// Drops the oldest response of the owner with the highest count by `counted`.
    fn drop_oldest_of_most(&mut self, counted: impl Fn(&Owned) -> usize) {
        let most = self.by_owner.values().max_by_key(|owned| counted(owned));
        let oldest = most.and_then(|owned| owned.order.front().cloned());
        if let Some(oldest) = oldest {
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some((stored, bytes)) = self.by_id.remove(id) else {
            return false;
        };
        self.bytes -= bytes;
        if let Some(owned) = self.by_owner.get_mut(&stored.owner) {
            owned.bytes -= bytes;
            owned.order.retain(|other| other != id);
            owned.remove_items(&stored);
            if owned.order.is_empty() {
                self.by_owner.remove(&stored.owner);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::responses::item::Speaker;

    fn said(id: &str, text_bytes: usize) -> Arc<Item> {
        Arc::new(Item::Message {
            id: id.into(),
            speaker: Speaker::User,
            parts: vec!["a".repeat(text_bytes)],
            shown: Vec::new(),
        })
    }

    fn put(store: &ResponseStore, id: &str, owner: &str, text_bytes: usize) {
        let stored = Stored {
            owner: Some(owner.into()),
            response: String::new(),
            input: vec![said(id, text_bytes)],
            output: Vec::new(),
        };
        store.put(id.into(), stored);
    }

    #[test]
    fn an_owner_of_many_drives_out_its_own() {
        let store = ResponseStore::new(10, usize::MAX);
        put(&store, "b0", "b", 1);
        for index in 0..30 {
            put(&store, &format!("a{index}"), "a", 1);
        }
        assert!(store.get("b0", Some("b")).is_some());
        assert!(store.get("a20", Some("a")).is_none());
        assert!(store.get("a21", Some("a")).is_some());
        for index in 1..30 {
            put(&store, &format!("b{index}"), "b", 1);
        }
        let kept = |owner: &str| {
            let ids = (0..30).map(|index| format!("{owner}{index}"));
            ids.filter(|id| store.get(id, Some(owner)).is_some())
                .count()
        };
        assert_eq!((kept("a"), kept("b")), (5, 5));
    }

    #[test]
    fn an_owner_of_large_ones_drives_out_its_own() {
        let store = ResponseStore::new(1000, 100_000);
        for index in 0..20 {
            put(&store, &format!("b{index}"), "b", 1);
        }
        for index in 0..20 {
            put(&store, &format!("a{index}"), "a", 40_000);
        }
        assert!((0..20).all(|index| store.get(&format!("b{index}"), Some("b")).is_some()));
        assert!(store.get("a16", Some("a")).is_none());
        assert!(store.get("a19", Some("a")).is_some());
        put(&store, "too large", "a", 100_000);
        assert!(store.get("too large", Some("a")).is_none());
        assert!(store.get("a19", Some("a")).is_some());
    }

    #[test]
    fn an_item_of_an_answer_is_found_while_a_conversation_has_it() {
        let store = ResponseStore::new(1, usize::MAX);
        let put = |id: &str, input: Vec<Arc<Item>>, output: &Arc<Item>| {
            let stored = Stored {
                owner: Some("a".into()),
                response: String::new(),
                input,
                output: vec![Arc::clone(output)],
            };
            store.put(id.into(), stored);
        };
        let found = |owner: &str| {
            let ids = ["m1", "m2", "m3"].into_iter();
            ids.filter(|id| store.item(id, Some(owner)).is_some())
                .collect::<Vec<_>>()
        };
        let [first, second, third] = ["m1", "m2", "m3"].map(|id| said(id, 1));
        put("r1", Vec::new(), &first);
        put("r2", vec![Arc::clone(&first)], &second);
        assert!(store.get("r1", Some("a")).is_none());
        assert_eq!(found("a"), ["m1", "m2"]);
        assert!(found("b").is_empty() && store.item("m1", None).is_none());
        // A client's own item does not count, whatever its id.
        put("r3", vec![said("m1", 9), Arc::clone(&second)], &third);
        assert_eq!(found("a"), ["m2", "m3"]);
        assert!(store.delete("r3", Some("a")));
        assert!(found("a").is_empty());
    }

    #[test]
    fn nothing_is_left_of_what_was_deleted() {
        let store = ResponseStore::new(10, usize::MAX);
        put(&store, "a", "a", 10);
        assert!(!store.delete("a", Some("b")));
        assert!(store.delete("a", Some("a")));
        assert!(!store.delete("a", Some("a")));
        let kept = store.kept.lock();
        assert!(kept.by_id.is_empty() && kept.by_owner.is_empty());
        assert_eq!(kept.bytes, 0);
    }
}
