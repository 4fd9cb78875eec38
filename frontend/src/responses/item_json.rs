//! [`ItemJson`] serializes an item. It copies nothing, because an item may have megabytes of text and is written several
//! times.

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::item::{Item, Shown, Speaker};

/// An item to serialize.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ItemJson<'a> {
    pub(super) item: &'a Item,
    pub(super) status: &'a str,
    /// The log probabilities of a message's text.
    pub(super) logprobs: &'a [Box<RawValue>],
    /// Whether its content has not come yet.
    pub(super) has_just_begun: bool,
}

impl Item {
    /// Serializes the item. `status` is `in_progress`, `completed` or `incomplete`.
    pub(crate) fn json<'a>(&'a self, status: &'a str) -> ItemJson<'a> {
        ItemJson {
            item: self,
            status,
            logprobs: &[],
            has_just_begun: false,
        }
    }
}

/// A part of an item's content.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(untagged)]
pub(super) enum PartJson<'a> {
    /// Text.
    Text(TextJson<'a>),
    /// An image or audio, unchanged.
    Shown(&'a Value),
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(tag = "type")]
pub(super) enum TextJson<'a> {
    #[serde(rename = "input_text")]
    Input { text: &'a str },
    #[serde(rename = "output_text")]
    Output {
        text: &'a str,
        annotations: [(); 0],
        logprobs: &'a [Box<RawValue>],
    },
    #[serde(rename = "reasoning_text")]
    Reasoning { text: &'a str },
}

impl<'a> ItemJson<'a> {
    /// The parts of its content. A call and its output have none.
    pub(super) fn parts(self) -> Vec<PartJson<'a>> {
        match self.item {
            Item::Message {
                speaker,
                parts,
                shown,
                ..
            } => self.message_parts(*speaker, parts, shown),
            Item::Reasoning { text, .. } => vec![PartJson::Text(TextJson::Reasoning { text })],
            Item::Call { .. } | Item::CallOutput { .. } => Vec::new(),
        }
    }

    /// Texts, and the media between them.
    fn message_parts(
        self,
        speaker: Speaker,
        parts: &'a [String],
        shown: &'a [Shown],
    ) -> Vec<PartJson<'a>> {
        let text = |text: &'a String| match speaker {
            Speaker::Assistant => TextJson::Output {
                text,
                annotations: [],
                logprobs: self.logprobs,
            },
            Speaker::System | Speaker::User => TextJson::Input { text },
        };
        let places = 0..=parts.len();
        let at = |place: usize| {
            let shown = shown.iter().filter(move |medium| medium.after == place);
            let shown = shown.map(|medium| PartJson::Shown(&medium.part));
            shown.chain(parts.get(place).map(text).map(PartJson::Text))
        };
        places.flat_map(at).collect()
    }

    fn content(self) -> Vec<PartJson<'a>> {
        if self.has_just_begun {
            Vec::new()
        } else {
            self.parts()
        }
    }
}

impl Serialize for ItemJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(None)?;
        object.serialize_entry("id", self.item.id())?;
        match self.item {
            Item::Message { speaker, .. } => {
                object.serialize_entry("type", "message")?;
                object.serialize_entry("role", speaker.name())?;
                object.serialize_entry("status", self.status)?;
                object.serialize_entry("content", &self.content())?;
            }
            Item::Reasoning { .. } => {
                object.serialize_entry("type", "reasoning")?;
                object.serialize_entry("summary", &[(); 0])?;
                object.serialize_entry("content", &self.content())?;
                object.serialize_entry("encrypted_content", &())?;
                object.serialize_entry("status", self.status)?;
            }
            Item::Call {
                call_id,
                namespace,
                name,
                arguments,
                is_custom,
                ..
            } => {
                let [kind, text] = match is_custom {
                    true => ["custom_tool_call", "input"],
                    false => ["function_call", "arguments"],
                };
                object.serialize_entry("type", kind)?;
                object.serialize_entry("call_id", call_id)?;
                if let Some(namespace) = namespace {
                    object.serialize_entry("namespace", namespace)?;
                }
                object.serialize_entry("name", name)?;
                object.serialize_entry(text, arguments)?;
                object.serialize_entry("status", self.status)?;
            }
            Item::CallOutput {
                call_id,
                output,
                shown,
                is_custom,
                ..
            } => {
                let kind = match is_custom {
                    true => "custom_tool_call_output",
                    false => "function_call_output",
                };
                object.serialize_entry("type", kind)?;
                object.serialize_entry("call_id", call_id)?;
                if shown.is_empty() {
                    object.serialize_entry("output", output)?;
                } else {
                    let media = shown.iter().map(|medium| PartJson::Shown(&medium.part));
                    let text = Some(output).filter(|output| !output.is_empty());
                    let text = text.map(|text| PartJson::Text(TextJson::Input { text }));
                    let parts: Vec<_> = text.into_iter().chain(media).collect();
                    object.serialize_entry("output", &parts)?;
                }
                object.serialize_entry("status", self.status)?;
            }
        }
        object.end()
    }
}
