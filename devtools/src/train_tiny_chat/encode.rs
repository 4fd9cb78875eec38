//! Encodes text to token ids, and marks which of them the model learns to write.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use genset_devtools::checkout::read_tokenizer;
use genset_devtools::tiny_chat::{END_OF_TEXT, MESSAGE_END, MESSAGE_START};
use tokenizers::Tokenizer;

/// A space in a byte-level vocabulary.
const SPACE: char = 'Ġ';

/// The role of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// Token ids, and for each whether the model is trained to predict it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) learned: Vec<bool>,
}

impl Sequence {
    fn extend(&mut self, tokens: &[u32], learned: bool) {
        self.tokens.extend_from_slice(tokens);
        self.learned.resize(self.tokens.len(), learned);
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }
}

/// The text of a token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spelling {
    pub(crate) token: usize,
    pub(crate) has_space: bool,
    pub(crate) is_capital: bool,
    /// The token with the same letters in lower case and without a leading space, if it is another one.
    pub(crate) like: Option<usize>,
}

/// The model's tokenizer, with its chat template and special tokens.
#[derive(Debug)]
pub(crate) struct Encoder {
    tokenizer: Tokenizer,
    pub(crate) end_of_text: u32,
    pub(crate) message_end: u32,
}

impl Encoder {
    /// # Errors
    /// If the folder has no tokenizer, or the tokenizer lacks a special token.
    pub(crate) fn read(model: &Path) -> anyhow::Result<Self> {
        let tokenizer = read_tokenizer(model)?;
        let id = |token| {
            let id = tokenizer.token_to_id(token);
            id.with_context(|| format!("the tokenizer has no {token}"))
        };
        let (end_of_text, message_end) = (id(END_OF_TEXT)?, id(MESSAGE_END)?);
        ensure!(
            id(MESSAGE_START)? != message_end,
            "{MESSAGE_START} and {MESSAGE_END} are one token"
        );
        Ok(Self {
            tokenizer,
            end_of_text,
            message_end,
        })
    }

    fn ids(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(anyhow::Error::from_boxed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of the tokens, without special ones.
    pub(crate) fn decode(&self, ids: &[u32]) -> anyhow::Result<String> {
        let text = self.tokenizer.decode(ids, true);
        text.map_err(anyhow::Error::from_boxed)
    }

    /// Encodes messages with the chat template. The model learns the assistant's words and the end mark after them.
    ///
    /// A message's marks and words are tokenized separately, as in a prompt that ends where the assistant begins.
    pub(crate) fn conversation(&self, messages: &[(Role, &str)]) -> anyhow::Result<Sequence> {
        let mut sequence = Sequence::default();
        for &(role, content) in messages {
            let head = format!("{MESSAGE_START}{}\n", role.as_str());
            match role {
                Role::System | Role::User | Role::Tool => {
                    let message = format!("{head}{content}{MESSAGE_END}\n");
                    sequence.extend(&self.ids(&message)?, false);
                }
                Role::Assistant => {
                    sequence.extend(&self.ids(&head)?, false);
                    sequence.extend(&self.ids(&format!("{content}{MESSAGE_END}"))?, true);
                    sequence.extend(&self.ids("\n")?, false);
                }
            }
        }
        Ok(sequence)
    }

    /// Like [`Self::conversation`], for messages that own their text.
    pub(crate) fn messages(&self, messages: &[(Role, String)]) -> anyhow::Result<Sequence> {
        let messages = messages.iter().map(|(role, text)| (*role, text.as_str()));
        self.conversation(&messages.collect::<Vec<_>>())
    }

    /// The text of each token, and the token with the same letters in lower case and without a leading space, if it is
    /// another one.
    pub(crate) fn spellings(&self) -> Vec<Spelling> {
        let vocabulary = self.tokenizer.get_vocab(true);
        let index = |id: u32| usize::try_from(id).ok();
        let spellings = vocabulary.iter().filter_map(|(token, &id)| {
            let letters = token.strip_prefix(SPACE).unwrap_or(token);
            let small = letters.to_lowercase();
            let like = vocabulary.get(&small).filter(|&&like| like != id);
            Some(Spelling {
                token: index(id)?,
                has_space: letters != token,
                is_capital: small != letters,
                like: like.and_then(|&id| index(id)),
            })
        });
        let mut spellings: Vec<_> = spellings.collect();
        spellings.sort_unstable_by_key(|it| it.token);
        spellings
    }

    /// The token with this text, which must be exactly one.
    ///
    /// # Errors
    /// If the text is another number of tokens.
    pub(crate) fn one(&self, text: &str) -> anyhow::Result<usize> {
        match self.ids(text)?.as_slice() {
            [token] => Ok(usize::try_from(*token)?),
            tokens => bail!("{text:?} is {} tokens, not one", tokens.len()),
        }
    }

    /// The words that are one token after a space. Without the space most are several tokens, so their spelling must be
    /// learned.
    pub(crate) fn words(&self) -> Vec<String> {
        let vocabulary = self.tokenizer.get_vocab(true);
        let words = vocabulary.keys().filter_map(|it| it.strip_prefix(SPACE));
        let words = words.filter(|it| it.len() > 1 && it.chars().all(|c| c.is_ascii_alphabetic()));
        let mut words: Vec<String> = words.map(str::to_owned).collect();
        words.sort_unstable();
        words
    }

    /// The number of tokens.
    pub(crate) fn vocabulary(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// Encodes the conversation up to the assistant's turn.
    pub(crate) fn prompt(&self, messages: &[(Role, &str)]) -> anyhow::Result<Vec<u32>> {
        let mut tokens = self.conversation(messages)?.tokens;
        let head = format!("{MESSAGE_START}{}\n", Role::Assistant.as_str());
        tokens.extend(self.ids(&head)?);
        Ok(tokens)
    }

    /// Encodes a text without messages, learned entirely, with the end-of-document mark.
    pub(crate) fn document(&self, text: &str) -> anyhow::Result<Sequence> {
        let mut sequence = Sequence::default();
        sequence.extend(&self.ids(text)?, true);
        sequence.extend(&[self.end_of_text], true);
        Ok(sequence)
    }
}

#[cfg(test)]
mod tests {
    use genset_devtools::tiny_chat::folder;

    use super::*;

    const TALK: [(Role, &str); 5] = [
        (Role::System, "Be brief."),
        (Role::User, "Hello"),
        (Role::Assistant, "Hello! How can I help you?"),
        (Role::User, "Bye\n"),
        (Role::Assistant, "Goodbye!"),
    ];

    /// The messages as rendered by the model's own chat template.
    fn rendered(messages: &[(Role, &str)], add_generation_prompt: bool) -> String {
        let config = std::fs::read_to_string(folder().join("tokenizer_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        let template = config["chat_template"].as_str().unwrap();
        let message = |&(role, content): &(Role, &str)| {
            minijinja::context! { role => role.as_str(), content }
        };
        let messages: Vec<_> = messages.iter().map(message).collect();
        minijinja::Environment::new()
            .render_str(
                template,
                minijinja::context! { messages, add_generation_prompt },
            )
            .unwrap()
    }

    #[test]
    fn a_conversation_is_what_the_chat_template_writes() {
        let encoder = Encoder::read(folder()).unwrap();
        let sequence = encoder.conversation(&TALK).unwrap();
        assert_eq!(
            sequence.tokens,
            encoder.ids(&rendered(&TALK, false)).unwrap()
        );
        let prompt = encoder.prompt(&TALK[..4]).unwrap();
        assert_eq!(prompt, encoder.ids(&rendered(&TALK[..4], true)).unwrap());
    }

    #[test]
    fn only_the_answers_and_their_ends_are_learned() {
        let encoder = Encoder::read(folder()).unwrap();
        let sequence = encoder.conversation(&TALK).unwrap();
        let learned: Vec<u32> = std::iter::zip(&sequence.tokens, &sequence.learned)
            .filter_map(|(&token, &learned)| learned.then_some(token))
            .collect();
        let answers = "Hello! How can I help you?<|im_end|>Goodbye!<|im_end|>";
        assert_eq!(encoder.tokenizer.decode(&learned, false).unwrap(), answers);
        assert_eq!(
            learned
                .iter()
                .filter(|&&id| id == encoder.message_end)
                .count(),
            2
        );
    }

    #[test]
    fn a_document_is_learned_whole() {
        let encoder = Encoder::read(folder()).unwrap();
        let sequence = encoder.document("The sea.").unwrap();
        assert!(sequence.learned.iter().all(|&learned| learned));
        assert_eq!(sequence.tokens.last(), Some(&encoder.end_of_text));
    }
}
