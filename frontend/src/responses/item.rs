//! [`Item`]: an item of a conversation in this API, from either side.

use serde_json::{Value, json};

use super::tools::seen_name;
use crate::json::value_bytes;
use crate::openai::call_json;
use crate::turns::{Turns, join};

/// One item of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A message.
    Message {
        /// The item's id.
        id: String,
        /// Its role.
        speaker: Speaker,
        /// The text of its parts.
        parts: Vec<String>,
        /// Media in the message, in order, each with the index of the part that follows it; only for users.
        shown: Vec<Shown>,
    },
    /// The model's reasoning before its answer.
    Reasoning {
        /// The item's id.
        id: String,
        /// The reasoning.
        text: String,
    },
    /// A tool call by the model.
    Call {
        /// The item's id.
        id: String,
        /// The id that the call's output refers to.
        call_id: String,
        /// The namespace of the function, if it has one.
        namespace: Option<String>,
        /// The function, or the custom tool.
        name: String,
        /// The arguments; should be a JSON object. The input of a custom tool.
        arguments: String,
        /// Whether it calls a custom tool.
        is_custom: bool,
    },
    /// The output of a call.
    CallOutput {
        /// The item's id.
        id: String,
        /// The call.
        call_id: String,
        /// The text of the tool's output.
        output: String,
        /// Media in the output, which follow its text.
        shown: Vec<Shown>,
        /// Whether it is a custom tool's.
        is_custom: bool,
    },
}

/// An image or audio in a message or in a call's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The number of text parts before it; in an output, of all.
    pub(super) after: usize,
    /// Its position in the request.
    pub(super) at: String,
    /// The part in this API's format.
    pub(super) part: Value,
}

impl Shown {
    /// The part in a chat's format.
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

/// The role of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speaker {
    /// Instructions: `system` and `developer`.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Speaker {
    /// The role's name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// A new item id in OpenAI's format.
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

    /// Adds it to a chat's turns.
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
                namespace,
                name,
                arguments,
                is_custom,
                ..
            } => {
                let name = seen_name(namespace.as_deref(), name);
                let call = call_json(call_id, &name, arguments, *is_custom);
                turns.assistant().calls.push(call);
            }
            Self::CallOutput {
                call_id,
                output,
                shown,
                ..
            } => {
                let media = shown
                    .iter()
                    .map(|medium| (medium.in_chat(), medium.at.clone()));
                turns.result(call_id, output, media.collect());
            }
        }
    }

    /// The role of a message; `None` for other items.
    pub(super) fn speaker(&self) -> Option<Speaker> {
        match self {
            Self::Message { speaker, .. } => Some(*speaker),
            Self::Reasoning { .. } | Self::Call { .. } | Self::CallOutput { .. } => None,
        }
    }

    /// Its approximate memory in bytes.
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
                namespace,
                name,
                arguments,
                is_custom: _,
            } => {
                let namespace = namespace.as_ref().map_or(0, String::len);
                id.len() + call_id.len() + namespace + name.len() + arguments.len()
            }
            Self::CallOutput {
                id,
                call_id,
                output,
                shown,
                is_custom: _,
            } => {
                let shown: usize = shown.iter().map(Shown::bytes).sum();
                id.len() + call_id.len() + output.len() + shown
            }
        };
        text + size_of::<Self>()
    }
}

/// Adds texts and the media between them, in order.
fn show(parts: &[String], shown: &[Shown], turns: &mut Turns) {
    let mut media = shown.iter().peekable();
    for place in 0..=parts.len() {
        while let Some(medium) = media.next_if(|medium| medium.after == place) {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    fn message(texts: usize, media: usize, after: impl Fn(usize) -> usize) -> Item {
        let shown = |index| Shown {
            after: after(index),
            at: format!("input[0].content[{index}]"),
            part: json!({"type": "input_image", "image_url": "https://a.example/", "detail": "auto"}),
        };
        Item::Message {
            id: "msg_1".into(),
            speaker: Speaker::User,
            parts: vec!["a".into(); texts],
            shown: (0..media).map(shown).collect(),
        }
    }

    fn messages(item: &Item) -> Vec<Value> {
        let mut turns = Turns::default();
        item.add_to(&mut turns);
        turns.into_messages().0
    }

    #[test]
    fn media_stay_between_the_texts_around_them() {
        let kinds = |item: &Item| -> Vec<Value> {
            let messages = messages(item);
            let parts = messages[0]["content"].as_array().unwrap();
            parts.iter().map(|part| part["type"].clone()).collect()
        };
        let (text, image) = ("text", "image_url");
        for (after, expected) in [
            ([0, 0], [image, image, text].as_slice()),
            ([0, 1], [image, text, image, text].as_slice()),
            ([1, 2], [text, image, text, image].as_slice()),
            ([2, 2], [text, image, image].as_slice()),
        ] {
            let item = message(2, 2, |index| after[index]);
            assert_eq!(kinds(&item), expected, "{after:?}");
        }
    }

    #[test]
    fn an_output_of_media_alone_is_listed_without_a_text() {
        let part =
            json!({"type": "input_image", "image_url": "https://a.example/", "detail": "auto"});
        let item = |output: &str| Item::CallOutput {
            id: "fco_1".into(),
            call_id: "a".into(),
            output: output.into(),
            shown: vec![Shown {
                after: 0,
                at: "input[0].output[0]".into(),
                part: part.clone(),
            }],
            is_custom: false,
        };
        let listed = |output: &str| {
            serde_json::to_value(item(output).json("completed")).unwrap()["output"].clone()
        };
        assert_eq!(listed(""), json!([part]));
        let text = json!({"type": "input_text", "text": "Here."});
        assert_eq!(listed("Here."), json!([text, part]));
    }

    /// CPU time of this thread, so that a loaded machine changes nothing.
    fn thread_time() -> Duration {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(
            time.tv_sec.try_into().unwrap(),
            time.tv_nsec.try_into().unwrap(),
        )
    }

    /// Comparing each text with each medium takes ten times the bound.
    #[test]
    fn many_texts_with_many_media_take_no_time_for_each_pair() {
        const MANY: usize = 40_000;
        let item = message(MANY, MANY, |_| MANY);
        let begun = thread_time();
        assert_eq!(messages(&item).len(), 1);
        let taken = thread_time() - begun;
        assert!(taken < Duration::from_secs(3), "{taken:?}");
    }
}
