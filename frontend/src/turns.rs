//! Turns of a conversation, on their way from another API's blocks or items to a chat's messages: what one role says in a row
//! is one message.

use serde_json::{Map, Value, json};

/// The messages that are whole, and the one in the making.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    messages: Vec<Value>,
    /// At most one of these two is there.
    user: Option<UserTurn>,
    assistant: Option<AssistantTurn>,
    /// Where in the request the media stand, in order.
    media_at: Vec<String>,
}

/// What a user said and showed.
#[derive(Debug, Default)]
struct UserTurn {
    /// Media, and the texts before them, as a chat's parts.
    parts: Vec<Value>,
    text: String,
}

/// What an assistant thought, said and called.
#[derive(Debug, Default)]
pub(crate) struct AssistantTurn {
    pub(crate) text: String,
    pub(crate) thinking: String,
    /// In the shape of a chat's `tool_calls`.
    pub(crate) calls: Vec<Value>,
}

impl Turns {
    /// The user's text that is in the making, or a new one.
    pub(crate) fn user(&mut self) -> &mut String {
        self.close_assistant();
        &mut self.user.get_or_insert_default().text
    }

    /// The user shows a medium, which is a part of a chat's message and stands at `at` in the request.
    pub(crate) fn show(&mut self, part: Value, at: String) {
        self.close_assistant();
        self.media_at.push(at);
        let turn = self.user.get_or_insert_default();
        turn.close_text();
        turn.parts.push(part);
    }

    /// The assistant's message that is in the making, or a new one.
    pub(crate) fn assistant(&mut self) -> &mut AssistantTurn {
        self.close_user();
        self.assistant.get_or_insert_default()
    }

    /// A message of instructions.
    pub(crate) fn system(&mut self, text: &str) {
        self.push(json!({"role": "system", "content": text}));
    }

    /// What the call `id` came to.
    pub(crate) fn result(&mut self, id: &str, text: &str) {
        self.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }

    /// Whether the assistant spoke last.
    pub(crate) fn is_assistants(&self) -> bool {
        self.assistant.is_some()
    }

    /// The chat's messages, and where in the request their media stand.
    pub(crate) fn into_messages(mut self) -> (Vec<Value>, Vec<String>) {
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
        // Templates take a key for its presence.
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
