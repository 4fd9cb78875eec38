//! [`Prompts`]: turns pieces of a load into prompts with the right number of tokens, as far as the server reveals token counts.

use genset_simulate::{Piece, Turn};
use serde_json::{Value, json};

use super::ApiName;

/// The material of prompts: words that tokenizers know, most of them as one token.
const WORDS: &str = "time year people way day man thing woman life child world school state family student group country \
    problem hand part place case week company system program question work government number night point home water room \
    mother area money story fact month lot right study book eye job word business issue side kind head house service friend \
    father power hour game line end member law car city community name president team minute idea body information back \
    parent face others level office door health person art war history party result change morning reason research girl guy \
    moment air teacher force education foot boy age policy music market sense nation plan college interest death experience \
    effect use class control field development role effort rate heart drug show leader light voice wife police mind price";

/// The way to write prompts for a server.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompts {
    /// Token ids, which give exact lengths.
    Ids(Vec<u32>),
    /// Words with this many tokens each, and this many tokens around a prompt.
    Words { per_word: f64, around: f64 },
}

/// The conversation so far.
#[derive(Debug, Default)]
pub(super) struct Said {
    ids: Vec<u32>,
    text: String,
    messages: Vec<Value>,
}

impl Prompts {
    /// Words that are not yet measured: one token each.
    pub(super) const UNMEASURED: Self = Self::Words {
        per_word: 1.0,
        around: 0.0,
    };

    /// The words of prompts, as one text.
    pub(super) fn sample() -> String {
        WORDS.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Every word `rounds` times, or some ids. Words differ in their number of tokens; a prompt of a few words would not show the
    /// mean.
    pub(super) fn probe(&self, rounds: u32) -> Said {
        let mut said = Said::default();
        match self {
            Self::Ids(ids) => said.ids.extend(ids.iter().take(8)),
            Self::Words { .. } => {
                let rounds = (0..rounds).map(|_| Self::sample());
                said.add(rounds.collect::<Vec<_>>().join(" "));
            }
        }
        said
    }

    /// Computes the tokens per word from two counts: every word once, and every word `rounds` times.
    pub(super) fn measured(once: u64, rounds: u32, several: u64) -> Self {
        let words = u32::try_from(WORDS.split_whitespace().count()).unwrap_or(u32::MAX);
        Self::of((words, once), (words * rounds, several))
    }

    fn of((few, few_tokens): (u32, u64), (many, many_tokens): (u32, u64)) -> Self {
        let float = |tokens: u64| f64::from(u32::try_from(tokens).unwrap_or(u32::MAX));
        let per_word =
            (float(many_tokens) - float(few_tokens)) / f64::from(many.saturating_sub(few).max(1));
        // Treats words as single tokens if the server's counts make no sense.
        if !(0.1..=20.0).contains(&per_word) {
            return Self::UNMEASURED;
        }
        Self::Words {
            per_word,
            around: (float(few_tokens) - f64::from(few) * per_word).max(0.0),
        }
    }

    /// Adds a turn's text to the conversation.
    pub(super) fn ask(&self, said: &mut Said, turn: &Turn) {
        match self {
            Self::Ids(ids) => {
                for piece in &turn.pieces {
                    said.ids.extend(pick(*piece, ids));
                }
            }
            Self::Words { per_word, around } => {
                let all: Vec<&str> = WORDS.split_whitespace().collect();
                let mut words = Vec::new();
                for (number, piece) in turn.pieces.iter().enumerate() {
                    // The surrounding tokens are deducted from the request's own piece, so that shared beginnings stay equal.
                    let is_last = number + 1 == turn.pieces.len();
                    let less = if is_last && said.messages.is_empty() {
                        *around
                    } else {
                        0.0
                    };
                    let tokens = (f64::from(piece.tokens) - less) / per_word;
                    let least = f64::from(u8::from(is_last));
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_sign_loss,
                        reason = "between 0 and twenty times a length"
                    )]
                    let tokens = tokens.round().max(least) as u32;
                    words.extend(pick(
                        Piece {
                            id: piece.id,
                            tokens,
                        },
                        &all,
                    ));
                }
                said.add(words.join(" "));
            }
        }
    }
}

impl Said {
    /// Writes the prompt into a request.
    pub(super) fn write(&self, api: ApiName, request: &mut Value) {
        let (field, prompt) = match api {
            ApiName::Chat => ("messages", json!(self.messages)),
            ApiName::Completions if self.ids.is_empty() => {
                ("prompt", json!(self.text.trim_start()))
            }
            ApiName::Completions => ("prompt", json!(self.ids)),
        };
        if let Some(fields) = request.as_object_mut() {
            fields.insert(field.into(), prompt);
        }
    }

    fn add(&mut self, words: String) {
        self.text.push(' ');
        self.text.push_str(&words);
        self.messages
            .push(json!({"role": "user", "content": words}));
    }

    /// Adds the server's answer.
    pub(super) fn answered(&mut self, text: &str) {
        self.text.push_str(text);
        self.messages
            .push(json!({"role": "assistant", "content": text}));
    }
}

/// The items that a piece consists of.
fn pick<T: Copy>(piece: Piece, of: &[T]) -> Vec<T> {
    let mut drawn = Vec::new();
    piece.write(&mut drawn);
    let count = u32::try_from(of.len()).unwrap_or(u32::MAX).max(1);
    drawn
        .into_iter()
        .filter_map(|token| of.get(usize::try_from(token % count).ok()?).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn turn(pieces: &[(u64, u32)]) -> Turn {
        let pieces = pieces.iter().map(|&(id, tokens)| Piece { id, tokens });
        Turn {
            after: Duration::ZERO,
            pieces: pieces.collect(),
            max_tokens: 1,
        }
    }

    fn words(prompts: &Prompts, pieces: &[(u64, u32)]) -> Vec<String> {
        let mut said = Said::default();
        prompts.ask(&mut said, &turn(pieces));
        said.text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn words_are_as_many_as_their_tokens_say_and_beginnings_are_shared() {
        let measured = Prompts::of((8, 26), (136, 282));
        let expected = Prompts::Words {
            per_word: 2.0,
            around: 10.0,
        };
        assert_eq!(measured, expected);
        let (one, other) = (
            words(&measured, &[(1, 40), (2, 30)]),
            words(&measured, &[(1, 40), (3, 30)]),
        );
        assert_eq!(one.len(), 20 + 10);
        assert_eq!(one[..20], other[..20]);
        assert!(one != other);
        assert_eq!(words(&measured, &[(2, 1)]).len(), 1, "never none");
    }

    #[test]
    fn counts_of_no_use_are_not_used() {
        assert_eq!(Prompts::measured(0, 2, 0), Prompts::UNMEASURED);
    }

    #[test]
    fn a_conversation_holds_what_was_answered() {
        let mut said = Said::default();
        for answer in ["one", "two"] {
            Prompts::UNMEASURED.ask(&mut said, &turn(&[(5, 3)]));
            said.answered(answer);
        }
        let mut request = json!({});
        said.write(ApiName::Chat, &mut request);
        let roles: Vec<&Value> = { request["messages"].as_array().unwrap().iter() }
            .map(|message| &message["role"])
            .collect();
        assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
        let mut request = json!({});
        said.write(ApiName::Completions, &mut request);
        assert!(request["prompt"].as_str().unwrap().ends_with("two"));
    }

    #[test]
    fn ids_are_those_of_the_server() {
        let mut said = Said::default();
        Prompts::Ids(vec![7, 9]).ask(&mut said, &turn(&[(1, 0), (2, 50)]));
        let mut request = json!({});
        said.write(ApiName::Completions, &mut request);
        let ids = request["prompt"].as_array().unwrap();
        assert_eq!(ids.len(), 50);
        assert!(ids.iter().all(|id| [7, 9].contains(&id.as_u64().unwrap())));
    }
}
