//! [`Medium`]: the form of prompts and answers between the kit and an engine.

use genset_backend_common::{Capabilities, Input, TokenId, config::InputKind, request::ChatInput};
use serde_json::{Value, json};

/// The form of prompts and answers: tokens if the engine takes them, else text, else chat messages. An engine that takes only
/// whole bodies receives [a body](Self::Body), and no prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Medium {
    /// Token ids in both directions.
    #[default]
    Tokens,
    /// Text. Each of the kit's tokens is a word: 7 becomes "7".
    Text,
    /// As [`Self::Text`], in one user message.
    Chat,
    /// A text that is the whole body of a chat, except its model. It contains no other options, so only the warm-up uses it.
    Body,
}

impl Medium {
    /// The medium for an engine that declares `can`.
    #[must_use]
    pub fn of(can: &Capabilities) -> Self {
        Self::declared(can).next().unwrap_or_default()
    }

    /// All media of an engine that declares `can`, tokens first.
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

    /// Whether an engine that declares `can` takes prompts, and not only whole bodies, inputs to embed or pairs to score.
    pub(crate) fn takes_prompts(can: &Capabilities) -> bool {
        Self::declared(can).any(|medium| medium != Self::Body)
    }

    /// Whether prompts and answers are tokens.
    #[must_use]
    pub fn is_tokens(self) -> bool {
        self == Self::Tokens
    }

    /// The input kind that an engine declares for this medium.
    pub(crate) fn kind(self) -> InputKind {
        match self {
            Self::Tokens => InputKind::Tokens,
            Self::Text | Self::Body => InputKind::Text,
            Self::Chat => InputKind::Chat,
        }
    }

    /// A prompt of these tokens, or of as many words.
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

/// The API of a body. Which one an engine offers is in its worker's card, not in its declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completion,
}

impl Api {
    /// A body without streaming, except its model.
    pub(crate) fn body(self, prompt: &[TokenId]) -> Value {
        let mut body = json!({"max_tokens": 4, "stream": false});
        match self {
            Self::Chat => body["messages"] = json!([said(prompt)]),
            Self::Completion => body["prompt"] = spelled(prompt).into(),
        }
        body
    }
}

/// A user message.
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
        let takes_prompts = |kind: InputKind| {
            Medium::takes_prompts(&Capabilities {
                inputs: [kind].into(),
                whole_bodies: true,
                ..Capabilities::default()
            })
        };
        assert!(takes_prompts(InputKind::Chat) && !takes_prompts(InputKind::Text));
        assert!(!takes_prompts(InputKind::Embed) && !takes_prompts(InputKind::Score));
        let Input::Text(body) = Medium::Body.input(vec![7, 42]) else {
            panic!("a body is a text")
        };
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["messages"][0]["content"], "7 42");
    }
}
