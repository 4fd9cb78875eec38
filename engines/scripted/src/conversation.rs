//! [`Conversation`]: the parts of a request that the script sees, whether it is text, chat messages or tokens.

use genset_backend_common::{
    EngineError, GenerateRequest, Input, RequestField, request::ChatInput,
};
use serde_json::Value;

use crate::script::PromptMarks;
use crate::vocabulary::Vocabulary;

/// What replies are matched on, and the values that their texts can name.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Conversation {
    /// The text of the last message with the role `user`; empty if there is none.
    pub(crate) last_user: String,
    /// The role of the last message, if messages are known.
    pub(crate) last_role: Option<String>,
    /// The number of messages, if known; a plain prompt counts as one.
    pub(crate) message_count: usize,
    /// The number of words in all messages. It serves as the prompt's token count if there are no token ids.
    pub(crate) words: u32,
}

impl Conversation {
    /// Reads text or chat messages.
    ///
    /// # Errors
    /// `Unsupported` for another kind of input.
    pub(crate) fn of_text(request: &GenerateRequest) -> Result<Self, EngineError> {
        match &request.input {
            Input::Text(text) => Ok(Self::of_prompt(text.to_string())),
            Input::Chat(chat) => Ok(Self::of_chat(chat)),
            Input::Tokens(_) | Input::Embed(_) | Input::Score(_) => Err(EngineError::unsupported(
                RequestField::Prompt,
                "this engine takes text and chat messages",
            )),
        }
    }

    /// Reads a prompt of tokens: the last user message between its marks, or the whole prompt if it has no such mark.
    ///
    /// # Errors
    /// `Unsupported` for another kind of input; the vocabulary's error if decoding fails.
    pub(crate) fn of_tokens(
        request: &GenerateRequest,
        vocabulary: &dyn Vocabulary,
        marks: &PromptMarks,
    ) -> Result<Self, EngineError> {
        let prompt = vocabulary.decode(request.tokens()?)?;
        let last_user = marks.last_user(&prompt);
        Ok(Self {
            last_user: last_user.unwrap_or(&prompt).to_owned(),
            ..Self::default()
        })
    }

    fn of_prompt(text: String) -> Self {
        Self {
            words: count_words(&text),
            last_user: text,
            last_role: Some("user".into()),
            message_count: 1,
        }
    }

    fn of_chat(chat: &ChatInput) -> Self {
        let has_role = |role: &'static str| move |message: &&Value| message["role"] == role;
        let last_user = chat.messages.iter().rev().find(has_role("user"));
        let last = chat.messages.last();
        Self {
            last_user: last_user.map(text_of).unwrap_or_default(),
            last_role: last.and_then(|message| message["role"].as_str().map(str::to_owned)),
            message_count: chat.messages.len(),
            words: chat
                .messages
                .iter()
                .map(|message| count_words(&text_of(message)))
                .fold(0, u32::saturating_add),
        }
    }
}

/// The text of a message, which is a string or the text parts of a list.
fn text_of(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part["text"].as_str())
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

fn count_words(text: &str) -> u32 {
    u32::try_from(text.split_whitespace().count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_user_message_is_found_behind_tool_results() {
        let chat = ChatInput {
            messages: vec![
                json!({"role": "system", "content": "be brief"}),
                json!({"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}),
                json!({"role": "assistant", "content": null}),
                json!({"role": "tool", "content": "42"}),
            ],
            tools: vec![],
        };
        let expected = Conversation {
            last_user: "one two".into(),
            last_role: Some("tool".into()),
            message_count: 4,
            words: 5,
        };
        assert_eq!(Conversation::of_chat(&chat), expected);
    }

    #[test]
    fn a_chat_without_a_user_has_an_empty_last_user_message() {
        let chat = ChatInput {
            messages: vec![json!({"role": "system", "content": "be brief"})],
            tools: vec![],
        };
        assert_eq!(Conversation::of_chat(&chat).last_user, "");
    }
}
