//! [`Medium`]: in what the kit speaks with an engine.

use genset_backend_common::{Capabilities, Input, TokenId, config::InputKind, request::ChatInput};
use serde_json::{Value, json};

/// In what the kit speaks with an engine: tokens where it takes them, else text, else chat messages. Of an engine that takes nothing
/// but whole bodies only what is no prompt is asked, and [a body](Self::Body).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Medium {
    /// Token ids, there and back.
    #[default]
    Tokens,
    /// Text. A token of the kit's is a word then: 7 is spelled "7".
    Text,
    /// As [`Self::Text`], in one message of the user's.
    Chat,
    /// A text that is the whole body of a chat, but for its model. What else a request asks for is not in it, so it is for the warm-up alone.
    Body,
}

impl Medium {
    /// What an engine is spoken with that declares `can`.
    #[must_use]
    pub fn of(can: &Capabilities) -> Self {
        Self::declared(can).next().unwrap_or_default()
    }

    /// All that an engine can be spoken with that declares `can`, tokens first.
    pub(crate) fn declared(can: &Capabilities) -> impl Iterator<Item = Self> {
        let all = [Self::Tokens, Self::Text, Self::Chat, Self::Body];
        all.into_iter().filter(|medium| {
            let is_spoken = match medium {
                Self::Tokens | Self::Chat => true,
                Self::Text => !can.whole_bodies,
                Self::Body => can.whole_bodies,
            };
            is_spoken && can.inputs.contains(&medium.kind())
        })
    }

    /// Whether prompts and answers are tokens.
    #[must_use]
    pub fn is_tokens(self) -> bool {
        self == Self::Tokens
    }

    /// What an engine declares that is spoken with like this.
    pub(crate) fn kind(self) -> InputKind {
        match self {
            Self::Tokens => InputKind::Tokens,
            Self::Text | Self::Body => InputKind::Text,
            Self::Chat => InputKind::Chat,
        }
    }

    /// A prompt of tokens, or of as many words.
    #[must_use]
    pub fn input(self, prompt: Vec<TokenId>) -> Input {
        match self {
            Self::Tokens => Input::Tokens(prompt.into()),
            Self::Text => Input::Text(spelled(&prompt).into()),
            Self::Chat => Input::Chat(
                ChatInput {
                    messages: vec![said(&prompt)],
                    tools: Vec::new(),
                }
                .into(),
            ),
            Self::Body => Input::Text(Api::Chat.body(&prompt).to_string().into()),
        }
    }
}

/// What a body asks for. Which of the two an engine is offered by stands in its worker's card, not in what it declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completion,
}

impl Api {
    /// A body that is not streamed, but for its model.
    pub(crate) fn body(self, prompt: &[TokenId]) -> Value {
        let mut body = json!({"max_tokens": 4, "stream": false});
        match self {
            Self::Chat => body["messages"] = json!([said(prompt)]),
            Self::Completion => body["prompt"] = spelled(prompt).into(),
        }
        body
    }
}

/// A message of the user's.
fn said(prompt: &[TokenId]) -> Value {
    json!({"role": "user", "content": spelled(prompt)})
}

fn spelled(prompt: &[TokenId]) -> String {
    let words: Vec<String> = prompt.iter().map(ToString::to_string).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_taken_before_text_and_text_before_chat() {
        let of = |kinds: &[InputKind]| {
            Medium::of(&Capabilities {
                inputs: kinds.iter().copied().collect(),
                ..Capabilities::default()
            })
        };
        assert_eq!(of(&[InputKind::Text, InputKind::Tokens]), Medium::Tokens);
        assert_eq!(of(&[InputKind::Chat, InputKind::Text]), Medium::Text);
        assert_eq!(of(&[InputKind::Chat]), Medium::Chat);
        assert_eq!(Medium::Text.input(vec![7, 42]), Input::Text("7 42".into()));
    }

    #[test]
    fn a_text_of_an_engine_of_whole_bodies_is_no_prompt() {
        let of = |kinds: &[InputKind]| {
            Medium::of(&Capabilities {
                inputs: kinds.iter().copied().collect(),
                whole_bodies: true,
                ..Capabilities::default()
            })
        };
        assert_eq!(of(&[InputKind::Tokens, InputKind::Text]), Medium::Tokens);
        assert_eq!(of(&[InputKind::Chat, InputKind::Text]), Medium::Chat);
        assert_eq!(of(&[InputKind::Text]), Medium::Body);
        let Input::Text(body) = Medium::Body.input(vec![7, 42]) else {
            panic!("a body is a text")
        };
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["messages"][0]["content"], "7 42");
    }
}
