//! [`Item`]: what a conversation is made of in this API, from either side.

use serde_json::{Value, json};

use crate::json::value_bytes;
use crate::turns::{Turns, join};

/// One item of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// Something said.
    Message {
        /// The item's id.
        id: String,
        /// By whom.
        speaker: Speaker,
        /// The text of its parts.
        parts: Vec<String>,
        /// What is shown before the part of this place, in order; of a user alone.
        shown: Vec<Shown>,
    },
    /// What the model thought before it answered.
    Reasoning {
        /// The item's id.
        id: String,
        /// The thoughts.
        text: String,
    },
    /// The model calls a tool.
    Call {
        /// The item's id.
        id: String,
        /// The id that the call's output refers to.
        call_id: String,
        /// The tool.
        name: String,
        /// The arguments, which are to be a JSON object.
        arguments: String,
    },
    /// What a call came to.
    CallOutput {
        /// The item's id.
        id: String,
        /// The call.
        call_id: String,
        /// The tool's answer.
        output: String,
    },
}

/// An image or a sound in a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// How many parts of text come before it.
    pub(super) after: usize,
    /// Where it stands in its request.
    pub(super) at: String,
    /// It as this API has it.
    pub(super) part: Value,
}

impl Shown {
    /// It as a part of a chat.
    pub(super) fn in_chat(&self) -> Value {
        let Some(url) = self.part["image_url"].as_str() else {
            return self.part.clone();
        };
        json!({"type": "image_url", "image_url": {"url": url, "detail": self.part["detail"]}})
    }

    fn bytes(&self) -> usize {
        self.at.len() + value_bytes(&self.part) + size_of::<Self>()
    }
}

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speaker {
    /// Who sets the rules: `system` and `developer`.
    System,
    /// Who asks.
    User,
    /// Who answers.
    Assistant,
}

impl Speaker {
    /// The speaker's name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// A new id of an item, in OpenAI's form.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

impl Item {
    /// The item's id.
    #[must_use]
    pub fn id(&self) -> &str {
        match self {
            Self::Message { id, .. }
            | Self::Reasoning { id, .. }
            | Self::Call { id, .. }
            | Self::CallOutput { id, .. } => id,
        }
    }

    /// Says it in a chat.
    pub(super) fn add_to(&self, turns: &mut Turns) {
        match self {
            Self::Message {
                speaker,
                parts,
                shown,
                ..
            } => {
                let text = parts.concat();
                match speaker {
                    Speaker::User if !shown.is_empty() => show(parts, shown, turns),
                    Speaker::System => turns.system(&text),
                    Speaker::User => join(turns.user(), &text),
                    Speaker::Assistant => join(&mut turns.assistant().text, &text),
                }
            }
            Self::Reasoning { text, .. } => join(&mut turns.assistant().thinking, text),
            Self::Call {
                call_id,
                name,
                arguments,
                ..
            } => {
                let function = json!({"name": name, "arguments": arguments});
                let call = json!({"id": call_id, "type": "function", "function": function});
                turns.assistant().calls.push(call);
            }
            Self::CallOutput {
                call_id, output, ..
            } => turns.result(call_id, output),
        }
    }

    /// Whether it is something that a user says.
    pub(crate) fn is_user(&self) -> bool {
        matches!(
            self,
            Self::Message {
                speaker: Speaker::User,
                ..
            }
        )
    }

    /// Whether it tells the model how to behave.
    pub(crate) fn is_system(&self) -> bool {
        matches!(
            self,
            Self::Message {
                speaker: Speaker::System,
                ..
            }
        )
    }

    /// About how much memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let text = match self {
            Self::Message {
                id, parts, shown, ..
            } => {
                let texts: usize = parts.iter().map(|part| part.len() + 24).sum();
                id.len() + texts + shown.iter().map(Shown::bytes).sum::<usize>()
            }
            Self::Reasoning { id, text } => id.len() + text.len(),
            Self::Call {
                id,
                call_id,
                name,
                arguments,
            } => id.len() + call_id.len() + name.len() + arguments.len(),
            Self::CallOutput {
                id,
                call_id,
                output,
            } => id.len() + call_id.len() + output.len(),
        };
        text + size_of::<Self>()
    }
}

/// Texts and what is shown between them, in order.
fn show(parts: &[String], shown: &[Shown], turns: &mut Turns) {
    for place in 0..=parts.len() {
        for medium in shown.iter().filter(|medium| medium.after == place) {
            turns.show(medium.in_chat(), medium.at.clone());
        }
        if let Some(text) = parts.get(place) {
            match place {
                0 => join(turns.user(), text),
                _ => turns.user().push_str(text),
            }
        }
    }
}
