//! Converts another API's blocks or items to a chat's messages: consecutive items of one role become one message.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

/// Stands in a result for each of its media.
const SHOWN_BELOW: &str = "[shown below]";

/// The complete messages, and the current one.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    messages: Vec<Value>,
    /// At most one of these two is set.
    user: Option<UserTurn>,
    assistant: Option<AssistantTurn>,
    /// The positions of the media in the request, in order.
    media_at: Vec<String>,
    /// The media of the latest results, as [`Self::show`] takes them.
    of_results: Vec<(Value, String)>,
}

/// What a user wrote and attached.
#[derive(Debug, Default)]
struct UserTurn {
    /// Media, and the texts before them, as a chat's parts.
    parts: Vec<Value>,
    text: String,
}

/// An assistant's reasoning, text and calls.
#[derive(Debug, Default)]
pub(crate) struct AssistantTurn {
    pub(crate) text: String,
    pub(crate) thinking: String,
    /// In the format of a chat's `tool_calls`.
    pub(crate) calls: Vec<Value>,
}

impl Turns {
    /// The current user message's text, or a new one.
    pub(crate) fn user(&mut self) -> &mut String {
        self.close_assistant();
        self.show_of_results();
        &mut self.user.get_or_insert_default().text
    }

    /// Adds a medium to the user message: a part of a chat's message, at position `at` in the request.
    pub(crate) fn show(&mut self, part: Value, at: String) {
        self.close_assistant();
        self.show_of_results();
        self.add_medium(part, at);
    }

    /// Shows the media of the latest results to the model as the user's: templates show none in results. They come behind the last
    /// result of a row, because templates want the results of a turn together.
    fn show_of_results(&mut self) {
        for (part, at) in std::mem::take(&mut self.of_results) {
            self.add_medium(part, at);
        }
    }

    fn add_medium(&mut self, part: Value, at: String) {
        self.media_at.push(at);
        let turn = self.user.get_or_insert_default();
        turn.close_text();
        turn.parts.push(part);
    }

    /// The current assistant message, or a new one.
    pub(crate) fn assistant(&mut self) -> &mut AssistantTurn {
        self.show_of_results();
        self.close_user();
        self.assistant.get_or_insert_default()
    }

    /// Adds a system message.
    pub(crate) fn system(&mut self, text: &str) {
        self.show_of_results();
        self.push(json!({"role": "system", "content": text}));
    }

    /// Adds the result of the call `id`, with its media as [`Self::show`] takes them.
    pub(crate) fn result(&mut self, id: &str, text: &str, media: Vec<(Value, String)>) {
        let mut text = Cow::Borrowed(text);
        for _ in &media {
            join(text.to_mut(), SHOWN_BELOW);
        }
        self.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
        self.of_results.extend(media);
    }

    /// Whether the last turn is the assistant's.
    pub(crate) fn is_assistants(&self) -> bool {
        self.assistant.is_some()
    }

    /// The chat's messages, and the positions of their media in the request.
    pub(crate) fn into_messages(mut self) -> (Vec<Value>, Vec<String>) {
        self.show_of_results();
        self.close_user();
        self.close_assistant();
        (self.messages, self.media_at)
    }

    fn push(&mut self, message: Value) {
        self.close_user();
        self.close_assistant();
        self.messages.push(message);
    }

    fn close_user(&mut self) {
        if let Some(turn) = self.user.take() {
            self.messages.push(turn.into_message());
        }
    }

    fn close_assistant(&mut self) {
        if let Some(turn) = self.assistant.take() {
            self.messages.push(turn.into_message());
        }
    }
}

impl UserTurn {
    fn close_text(&mut self) {
        if !self.text.is_empty() {
            let text = std::mem::take(&mut self.text);
            self.parts.push(json!({"type": "text", "text": text}));
        }
    }

    fn into_message(mut self) -> Value {
        if self.parts.is_empty() {
            return json!({"role": "user", "content": self.text});
        }
        self.close_text();
        json!({"role": "user", "content": self.parts})
    }
}

impl AssistantTurn {
    fn into_message(self) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        message.insert("content".into(), self.text.into());
        // Templates test for the key's presence.
        if !self.thinking.is_empty() {
            message.insert("reasoning_content".into(), self.thinking.into());
        }
        if !self.calls.is_empty() {
            message.insert("tool_calls".into(), self.calls.into());
        }
        Value::Object(message)
    }
}

/// Adds a paragraph.
pub(crate) fn join(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_of_results_follow_the_last_result() {
        let mut turns = Turns::default();
        let medium = |at: &str| (json!({"type": "image_url"}), at.to_owned());
        turns.result("a", "Here.", vec![medium("1")]);
        turns.result("b", "", vec![medium("2")]);
        turns.system("Be brief.");
        turns.result("c", "No.", Vec::new());
        let (messages, media_at) = turns.into_messages();
        let tool =
            |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
        let expected = [
            tool("a", "Here.\n\n[shown below]"),
            tool("b", "[shown below]"),
            json!({"role": "user", "content": [{"type": "image_url"}, {"type": "image_url"}]}),
            json!({"role": "system", "content": "Be brief."}),
            tool("c", "No."),
        ];
        assert_eq!(messages, expected);
        assert_eq!(media_at, ["1", "2"]);
    }
}
