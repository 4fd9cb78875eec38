//! [`Output`] assembles an answer's deltas into items.

use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use super::item::{Item, Speaker, new_id};
use super::item_json::ItemJson;
use super::response::{Repeated, ResponseHead};
use super::store::kept_output_bytes;
use crate::answer::TokenLogprobs;
use crate::markup::Delta;
use crate::openai::chat_token;

/// The items of an answer, in order. Only the last one may still grow.
///
/// # Examples
/// ```
/// use genset_frontend::markup::Delta;
/// use genset_frontend::responses::{Item, Output};
///
/// let mut output = Output::default();
/// output.add(Delta::Reasoning("Hm."), &[]);
/// output.add(Delta::Content("Good "), &[]);
/// output.add(Delta::Content("day"), &[]);
/// let items = output.into_items();
/// assert_eq!(items.len(), 2);
/// assert!(matches!(&items[1], Item::Message { parts, .. } if *parts == ["Good day"]));
/// ```
#[derive(Debug, Default)]
pub struct Output {
    items: Vec<Made>,
    /// Knows the namespaces of functions.
    repeated: Arc<Repeated>,
}

/// An item, and the log probabilities of its text as JSON text: they are written several times, and JSON values would take
/// ten times as much.
#[derive(Debug)]
struct Made {
    item: Item,
    logprobs: Vec<Box<RawValue>>,
}

impl Output {
    /// The output of a response without items yet.
    #[must_use]
    pub fn of(head: &ResponseHead) -> Self {
        Self {
            items: Vec::new(),
            repeated: Arc::clone(&head.repeated),
        }
    }

    /// Whether this delta begins a new item.
    #[must_use]
    pub fn begins_item(&self, delta: Delta<'_>) -> bool {
        match (delta, self.last()) {
            (Delta::Content(_), Some(Item::Message { .. }))
            | (Delta::Reasoning(_), Some(Item::Reasoning { .. }))
            | (Delta::Arguments { .. }, _) => false,
            (Delta::Content(_) | Delta::Reasoning(_) | Delta::ToolCall { .. }, _) => true,
        }
    }

    /// Adds a delta with its log probabilities.
    pub fn add(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs]) {
        if self.begins_item(delta) {
            self.begin(delta);
        }
        self.append(delta, rated);
    }

    /// Appends a delta to its item, which has begun.
    pub(super) fn append(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs]) {
        let Some(made) = self.items.last_mut() else {
            return;
        };
        match (delta, &mut made.item) {
            (Delta::Content(more), Item::Message { parts, .. }) => {
                if let Some(text) = parts.last_mut() {
                    text.push_str(more);
                }
                made.logprobs.extend(logprobs(rated));
            }
            (Delta::Reasoning(more), Item::Reasoning { text, .. })
            | (
                Delta::Arguments { text: more, .. },
                Item::Call {
                    arguments: text, ..
                },
            ) => text.push_str(more),
            // A call's beginning has no further content, and arguments follow their call.
            (
                Delta::Content(_)
                | Delta::Reasoning(_)
                | Delta::ToolCall { .. }
                | Delta::Arguments { .. },
                _,
            ) => {}
        }
    }

    /// Adds log probabilities that no delta carried.
    pub fn add_rated(&mut self, rated: &[TokenLogprobs]) {
        let message = self.items.iter_mut().rev();
        let mut message = message.filter(|made| matches!(made.item, Item::Message { .. }));
        if let Some(made) = message.next() {
            made.logprobs.extend(logprobs(rated));
        }
    }

    /// Begins the item of a delta, still empty.
    pub(super) fn begin(&mut self, delta: Delta<'_>) {
        let item = match delta {
            Delta::Content(_) => Item::Message {
                id: new_id("msg"),
                speaker: Speaker::Assistant,
                parts: vec![String::new()],
                shown: Vec::new(),
            },
            Delta::Reasoning(_) => Item::Reasoning {
                id: new_id("rs"),
                text: String::new(),
            },
            Delta::ToolCall {
                name,
                id,
                is_custom,
                ..
            } => {
                let (namespace, name) = self.repeated.namespaces.split(name);
                Item::Call {
                    id: new_id(if is_custom { "ctc" } else { "fc" }),
                    call_id: id.to_owned(),
                    namespace: namespace.map(str::to_owned),
                    name: name.to_owned(),
                    arguments: String::new(),
                    is_custom,
                }
            }
            Delta::Arguments { .. } => return,
        };
        self.items.push(Made {
            item,
            logprobs: Vec::new(),
        });
    }

    /// Adds an empty message to an answer without items.
    pub fn ensure_item(&mut self) {
        if self.is_empty() {
            self.begin(Delta::Content(""));
        }
    }

    /// The latest item.
    #[must_use]
    pub fn last(&self) -> Option<&Item> {
        self.items.last().map(|made| &made.item)
    }

    /// The number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there are no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Serializes the last item.
    pub(super) fn last_json<'a>(&'a self, status: &'a str) -> Option<ItemJson<'a>> {
        self.items.last().map(|made| made.json(status))
    }

    /// The log probabilities of the last item.
    pub(super) fn last_logprobs(&self) -> &[Box<RawValue>] {
        self.items.last().map_or(&[], |made| &made.logprobs)
    }

    /// Serializes all items; `status` is the last one's.
    pub(super) fn json<'a>(&'a self, status: &'a str) -> OutputJson<'a> {
        let items = &self.items;
        OutputJson { items, status }
    }

    /// Its approximate memory in bytes, including the serialized form.
    pub(crate) fn bytes(&self) -> usize {
        let made = |made: &Made| {
            let logprobs = made.logprobs.iter().map(|token| token.get().len());
            made.item.bytes() + logprobs.sum::<usize>()
        };
        self.items.iter().map(made).sum()
    }

    /// The size of its items in a store.
    pub(super) fn kept_bytes(&self) -> usize {
        kept_output_bytes(self.items.iter().map(|made| &made.item))
    }

    /// Returns the items.
    #[must_use]
    pub fn into_items(self) -> Vec<Item> {
        self.items.into_iter().map(|made| made.item).collect()
    }
}

impl Made {
    fn json<'a>(&'a self, status: &'a str) -> ItemJson<'a> {
        ItemJson {
            logprobs: &self.logprobs,
            ..self.item.json(status)
        }
    }
}

/// The items of an answer, to serialize.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutputJson<'a> {
    items: &'a [Made],
    /// The status of the last one.
    status: &'a str,
}

impl OutputJson<'_> {
    /// For an answer that has just begun.
    pub(super) const NONE: Self = Self {
        items: &[],
        status: "",
    };
}

impl Serialize for OutputJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let last = self.items.len().saturating_sub(1);
        let items = self.items.iter().enumerate().map(|(index, made)| {
            made.json(if index == last {
                self.status
            } else {
                "completed"
            })
        });
        serializer.collect_seq(items)
    }
}

/// Tokens in the format of a chat's `logprobs.content`.
fn logprobs(rated: &[TokenLogprobs]) -> impl Iterator<Item = Box<RawValue>> {
    rated.iter().filter_map(|token| {
        let json = to_raw_value(&chat_token(token));
        debug_assert!(json.is_ok(), "a value is JSON");
        json.ok()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::markup::testing::read_call;

    #[test]
    fn a_call_has_all_its_arguments() {
        for is_whole in [true, false] {
            let mut output = Output::default();
            read_call(is_whole, |delta| output.add(delta, &[]));
            let items = serde_json::to_value(output.json("completed")).unwrap();
            let items = items.as_array().unwrap();
            let kinds: Vec<_> = items.iter().map(|item| item["type"].clone()).collect();
            assert_eq!(kinds, ["function_call", "message"]);
            let arguments = items[0]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert_eq!(arguments, json!({"text": "see ", "path": "a"}));
        }
    }
}
