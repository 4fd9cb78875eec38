//! [`Vocabulary`]: the bytes of each token, from a `tokenizer.json` or from an engine that knows them.
//!
//! Grammars work on bytes, but each kind of tokenizer file spells tokens in its own way: byte-level BPE as one letter per
//! byte (GPT-2's table), SentencePiece as text with `▁` for a space and `<0x0A>` for a byte. The file's decoder tells which,
//! because decoding turns tokens into text.

use std::collections::HashMap;

use genset_backend_common::TokenId;
use serde_json::Value;

use super::error::VocabularyError;

/// The bytes of every token. Special tokens and unused ids have none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vocabulary {
    tokens: Vec<Token>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Token {
    /// An id that the tokenizer does not use, such as padding of the embedding.
    #[default]
    Unused,
    Text(Vec<u8>),
    /// A control token, by its name. It has no text, but a grammar may name it.
    Special(String),
}

impl Vocabulary {
    /// Creates a vocabulary of `vocab_size` unused ids.
    #[must_use]
    pub fn unused(vocab_size: usize) -> Self {
        Self {
            tokens: vec![Token::Unused; vocab_size],
        }
    }

    /// Sets the bytes that `token` adds to a text. Ignores an id outside the vocabulary.
    pub fn set_text(&mut self, token: TokenId, bytes: Vec<u8>) {
        self.set(token.into(), Token::Text(bytes));
    }

    /// Makes `token` a control token. It has no text, but a grammar may name it. Ignores an id outside the vocabulary.
    pub fn set_special(&mut self, token: TokenId, name: String) {
        self.set(token.into(), Token::Special(name));
    }

    /// Reads a `tokenizer.json`. `vocab_size` is the length of a row of logits. Larger ids cannot be sampled and are dropped;
    /// missing ids are unused.
    ///
    /// # Errors
    /// The file is malformed, or is of a kind whose tokens have no bytes of their own (WordPiece, WordLevel).
    pub fn try_from_tokenizer_json(
        json: &[u8],
        vocab_size: usize,
    ) -> Result<Self, VocabularyError> {
        let file: Value =
            serde_json::from_slice(json).map_err(|source| VocabularyError::Malformed { source })?;
        let spelling = Spelling::of(&file)?;
        let mut vocabulary = Self::unused(vocab_size);
        for (id, piece) in pieces(&file["model"]["vocab"]) {
            vocabulary.set(id, Token::Text(spelling.bytes(piece)));
        }
        let added = file["added_tokens"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        for token in added {
            if let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) {
                let is_special = token["special"].as_bool().unwrap_or(false);
                vocabulary.set(
                    id,
                    if is_special {
                        Token::Special(content.to_owned())
                    } else {
                        // The decoder treats added tokens like the model's own.
                        Token::Text(spelling.bytes(content))
                    },
                );
            }
        }
        Ok(vocabulary)
    }

    /// Makes control tokens of `ends`, also if their file does not: they end a text and are not part of it.
    pub(super) fn with_ends(mut self, ends: &[TokenId]) -> Self {
        for token in ends {
            let name = String::from_utf8_lossy(self.bytes(*token)).into_owned();
            if !name.is_empty() {
                self.set_special(*token, name);
            }
        }
        self
    }

    /// The number of ids, used or not.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no ids.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The bytes that `token` adds to a text; empty for special, unused and unknown ones.
    #[must_use]
    pub fn bytes(&self, token: TokenId) -> &[u8] {
        let place = usize::try_from(token).unwrap_or(usize::MAX);
        match self.tokens.get(place) {
            Some(Token::Text(bytes)) => bytes,
            Some(Token::Special(_) | Token::Unused) | None => &[],
        }
    }

    fn set(&mut self, id: u64, token: Token) {
        let place = usize::try_from(id).unwrap_or(usize::MAX);
        if let Some(slot) = self.tokens.get_mut(place) {
            *slot = token;
        }
    }

    /// The words for a token trie: special tokens begin with a marker byte, which never occurs in UTF-8.
    pub(super) fn words(&self) -> Vec<Vec<u8>> {
        let word = |token: &Token| match token {
            // A lone 0xFF would look like a marker. No text contains it.
            Token::Text(bytes) if bytes.first() == Some(&MARKER) => Vec::new(),
            Token::Text(bytes) => bytes.clone(),
            Token::Special(name) => [&[MARKER], name.as_bytes()].concat(),
            Token::Unused => Vec::new(),
        };
        self.tokens.iter().map(word).collect()
    }
}

const MARKER: u8 = llguidance::toktrie::TokTrie::SPECIAL_TOKEN_MARKER;

/// Ids and pieces: an object for BPE, a list of pairs for Unigram.
fn pieces(vocab: &Value) -> Vec<(u64, &str)> {
    match vocab {
        Value::Object(vocab) => vocab
            .iter()
            .filter_map(|(piece, id)| Some((id.as_u64()?, piece.as_str())))
            .collect(),
        Value::Array(vocab) => (0..)
            .zip(vocab)
            .filter_map(|(id, pair)| Some((id, pair[0].as_str()?)))
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Vec::new(),
    }
}

/// How a tokenizer spells bytes.
enum Spelling {
    /// One letter per byte.
    ByteLevel(HashMap<char, u8>),
    /// Text with its own character for the space, and `<0xNN>` for bytes.
    Pieces { space: char, has_bytes: bool },
}

impl Spelling {
    fn of(file: &Value) -> Result<Self, VocabularyError> {
        let model = file["model"]["type"].as_str().unwrap_or_default();
        let mut steps = Vec::new();
        flatten(&file["decoder"], &mut steps);
        let has = |kind: &str| steps.iter().any(|step| step["type"] == kind);
        let is_known = matches!(model, "BPE" | "Unigram" | "");
        if is_known && has("ByteLevel") {
            return Ok(Self::ByteLevel(byte_letters()));
        }
        let space = steps.iter().find_map(|step| space_letter(step));
        if is_known && (space.is_some() || has("ByteFallback")) {
            return Ok(Self::Pieces {
                space: space.unwrap_or('▁'),
                has_bytes: has("ByteFallback"),
            });
        }
        let decoder = steps.iter().filter_map(|step| step["type"].as_str());
        Err(VocabularyError::UnknownKind {
            model: model.to_owned(),
            decoder: decoder.collect::<Vec<_>>().join(", "),
        })
    }

    fn bytes(&self, piece: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel(letters) => {
                let bytes: Option<Vec<u8>> = piece
                    .chars()
                    .map(|letter| letters.get(&letter).copied())
                    .collect();
                // A piece with other letters is literal text, for the decoder too.
                bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
            }
            Self::Pieces { space, has_bytes } => match byte_piece(piece) {
                Some(byte) if *has_bytes => vec![byte],
                _ => piece.replace(*space, " ").into_bytes(),
            },
        }
    }
}

fn byte_piece(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2)
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// The letter that a decoder step replaces by a space.
fn space_letter(step: &Value) -> Option<char> {
    let letter = match step["type"].as_str()? {
        "Metaspace" => step["replacement"].as_str().unwrap_or("▁"),
        "Replace" if step["content"] == " " => step["pattern"]["String"].as_str()?,
        _ => return None,
    };
    let mut letters = letter.chars();
    letters.next().filter(|_| letters.next().is_none())
}

/// A decoder's steps: the decoder itself, or the elements of a sequence.
fn flatten<'a>(decoder: &'a Value, steps: &mut Vec<&'a Value>) {
    match decoder["decoders"].as_array() {
        Some(inner) if decoder["type"] == "Sequence" => {
            inner.iter().for_each(|step| flatten(step, steps));
        }
        _ => steps.push(decoder),
    }
}

/// GPT-2's table: printable bytes of Latin-1 map to themselves, the others to the letters from U+0100 on.
fn byte_letters() -> HashMap<char, u8> {
    let mut others = '\u{100}'..;
    (0..=u8::MAX)
        .filter_map(|byte| {
            let is_itself = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let letter = if is_itself {
                Some(char::from(byte))
            } else {
                others.next()
            };
            letter.map(|letter| (letter, byte))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(file: &Value, vocab_size: usize) -> Vocabulary {
        Vocabulary::try_from_tokenizer_json(file.to_string().as_bytes(), vocab_size).unwrap()
    }

    #[test]
    fn what_an_engine_knows_is_what_a_file_says() {
        let file = json!({
            "model": {"type": "BPE", "vocab": {"Ġhi": 0}},
            "decoder": {"type": "ByteLevel"},
            "added_tokens": [{"id": 2, "content": "<s>", "special": true}],
        });
        let mut known = Vocabulary::unused(3);
        known.set_text(0, b" hi".to_vec());
        known.set_special(2, "<s>".into());
        known.set_text(3, b"outside".to_vec());
        assert_eq!(known, read(&file, 3));
    }

    #[test]
    fn byte_level_letters_become_bytes() {
        let vocabulary = read(
            &json!({
                "model": {"type": "BPE", "vocab": {"Ġhi": 0, "Ċ": 1, "Ã©": 2, "ÿ": 3, "<s>": 4, "｜": 5}},
                "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
                "added_tokens": [
                    {"id": 4, "content": "<s>", "special": true},
                    {"id": 6, "content": "Ġ plain", "special": false},
                    {"id": 99, "content": "outside", "special": false},
                ],
            }),
            8,
        );
        let bytes: Vec<&[u8]> = (0..9).map(|token| vocabulary.bytes(token)).collect();
        let none: &[u8] = b"";
        assert_eq!(
            bytes,
            [
                b" hi",
                b"\n" as &[u8],
                "é".as_bytes(),
                b"\xff",
                none,
                "｜".as_bytes(),
                "Ġ plain".as_bytes(),
                none,
                none
            ]
        );
        let words = vocabulary.words();
        assert_eq!(
            (words[3].as_slice(), words[4].as_slice()),
            (none, b"\xff<s>" as &[u8])
        );
        assert_eq!(byte_letters().len(), 256);
    }

    #[test]
    fn pieces_become_bytes() {
        let vocab = json!([
            ["<unk>", 0.0],
            ["▁a", -1.0],
            ["<0x0A>", -2.0],
            ["▁▁", -3.0],
            ["<0xZZ>", -3.0]
        ]);
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]});
        let added = json!([{"id": 0, "content": "<unk>", "special": true}]);
        let file = json!({"model": {"type": "Unigram", "vocab": vocab}, "decoder": decoder, "added_tokens": added});
        let vocabulary = read(&file, 5);
        let bytes: Vec<&[u8]> = (0..5).map(|token| vocabulary.bytes(token)).collect();
        assert_eq!(bytes, [b"" as &[u8], b" a", b"\n", b"  ", b"<0xZZ>"]);
        let metaspace = json!({"model": {"type": "Unigram", "vocab": vocab}, "decoder": {"type": "Metaspace", "replacement": "▁"}});
        let vocabulary = read(&metaspace, 5);
        assert_eq!(
            (vocabulary.bytes(1), vocabulary.bytes(2)),
            (b" a" as &[u8], b"<0x0A>" as &[u8])
        );
    }

    /// Gemma's runs of spaces are added tokens in the spelling of its pieces.
    #[test]
    fn added_tokens_are_spelled_like_the_models_own() {
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]});
        let added = json!([
            {"id": 1, "content": "▁▁", "special": false},
            {"id": 2, "content": "<table>", "special": false},
        ]);
        let model = json!({"type": "BPE", "vocab": {"▁a": 0, "▁▁": 1, "<table>": 2}});
        let file = json!({"model": model, "decoder": decoder, "added_tokens": added});
        let vocabulary = read(&file, 3);
        let bytes: Vec<&[u8]> = (0..3).map(|token| vocabulary.bytes(token)).collect();
        assert_eq!(bytes, [b" a" as &[u8], b"  ", b"<table>"]);
    }

    #[test]
    fn other_kinds_are_refused_by_name() {
        for (file, named) in [
            (
                json!({"model": {"type": "WordPiece", "vocab": {}}, "decoder": {"type": "WordPiece"}}),
                "WordPiece",
            ),
            (
                json!({"model": {"type": "BPE", "vocab": {}}, "decoder": null}),
                "BPE",
            ),
            (json!([1]), "''"),
        ] {
            let error =
                Vocabulary::try_from_tokenizer_json(file.to_string().as_bytes(), 1).unwrap_err();
            assert!(
                matches!(error, VocabularyError::UnknownKind { .. }),
                "{error}"
            );
            assert!(error.to_string().contains(named), "{error}");
        }
        let error = Vocabulary::try_from_tokenizer_json(b"{", 1).unwrap_err();
        assert!(
            matches!(error, VocabularyError::Malformed { .. }),
            "{error}"
        );
    }
}
