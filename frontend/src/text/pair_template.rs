//! [`PairTemplate`]: how a tokenizer joins two texts for a model that reads both at once.

use tokenizers::Tokenizer;

/// The tokens that a tokenizer's post-processor puts around and between two texts.
///
/// # Examples
/// ```
/// use genset_frontend::text::TextTokenizer;
///
/// let json = br###"{
///     "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
///     "pre_tokenizer": { "type": "Whitespace" }, "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": false },
///     "post_processor": { "type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1] },
///     "model": { "type": "WordLevel", "vocab": { "[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "good": 3, "day": 4 }, "unk_token": "[UNK]" }
/// }"###;
/// let tokenizer = TextTokenizer::from_bytes(json)?;
/// let template = tokenizer.pair_template().expect("a post-processor for pairs");
/// let pair = template.join(&[3], &[4, 4]);
/// assert_eq!(pair.ids, [1, 3, 2, 4, 4, 2]);
/// assert_eq!(pair.first_tokens, 3);
/// # Ok::<(), genset_frontend::text::TokenizerError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairTemplate {
    before: Vec<u32>,
    between: Vec<u32>,
    after: Vec<u32>,
    /// How many tokens between the texts have the first text's type; `None` if all tokens have that type.
    first_between: Option<usize>,
}

/// The tokens of two joined texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPair {
    /// All tokens.
    pub ids: Vec<u32>,
    /// How many tokens, counted from the first, have the first type (BERT's token type 0).
    pub first_tokens: usize,
}

impl PairTemplate {
    /// Returns the template of a tokenizer; `None` if it has none, puts nothing between the texts, or does more than put fixed
    /// tokens around and between them.
    pub(super) fn try_new(tokenizer: &Tokenizer) -> Option<Self> {
        let template = Self::from_pair(tokenizer, "a", "b")?;
        let is_same = |(first, second)| {
            Self::from_pair(tokenizer, first, second).is_some_and(|other| other == template)
        };
        let others = [("b a", "a"), ("a", "a b a")];
        (!template.between.is_empty() && others.into_iter().all(is_same)).then_some(template)
    }

    fn from_pair(tokenizer: &Tokenizer, first: &str, second: &str) -> Option<Self> {
        let bare = |text: &str| Some(tokenizer.encode_fast(text, false).ok()?.get_ids().to_vec());
        let (first, second, pair) = (
            bare(first)?,
            bare(second)?,
            tokenizer.encode_fast((first, second), true).ok()?,
        );
        let ids = pair.get_ids();
        let is_added = pair.get_special_tokens_mask();
        let added_from = |place: usize| {
            is_added
                .iter()
                .skip(place)
                .take_while(|mask| **mask == 1)
                .count()
        };
        let first_at = added_from(0);
        let first_end = first_at + first.len();
        let second_at = first_end + added_from(first_end);
        let second_end = second_at + second.len();
        if ids.get(first_at..first_end)? != first || ids.get(second_at..second_end)? != second {
            return None;
        }
        let kinds = pair.get_type_ids();
        let of_first = kinds.iter().take_while(|kind| **kind == 0).count();
        let is_in_two_parts = kinds.iter().skip(of_first).all(|kind| *kind == 1);
        let first_between = match of_first {
            _ if !is_in_two_parts => return None,
            all if all == ids.len() => None,
            part if (first_end..=second_at).contains(&part) => Some(part - first_end),
            _ => return None,
        };
        Some(Self {
            before: ids.get(..first_at)?.to_vec(),
            between: ids.get(first_end..second_at)?.to_vec(),
            after: ids.get(second_end..)?.to_vec(),
            first_between,
        })
    }

    /// Returns the number of tokens that it adds.
    #[must_use]
    pub fn added_tokens(&self) -> usize {
        self.before.len() + self.between.len() + self.after.len()
    }

    /// Joins two texts, each tokenized alone and without special tokens, into one sequence.
    #[must_use]
    pub fn join(&self, first: &[u32], second: &[u32]) -> EncodedPair {
        let parts: [&[u32]; 5] = [&self.before, first, &self.between, second, &self.after];
        let ids = parts.concat();
        let of_first = |between: usize| self.before.len() + first.len() + between;
        EncodedPair {
            first_tokens: self.first_between.map_or(ids.len(), of_first),
            ids,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::text::detokenize::fixtures;

    /// A tokenizer with this post-processor, which refers to tokens 0 and 1.
    fn with_processor(processor: Value) -> Tokenizer {
        let mut json = fixtures::word_piece_json();
        json["post_processor"] = processor;
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    fn template(pair: &Value) -> Value {
        json!({
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": pair,
            "special_tokens": {"|": {"id": "|", "ids": [1], "tokens": ["|"]}},
        })
    }

    fn text(id: &str, kind: u32) -> Value {
        json!({"Sequence": {"id": id, "type_id": kind}})
    }

    fn mark(kind: u32) -> Value {
        json!({"SpecialToken": {"id": "|", "type_id": kind}})
    }

    /// Compares every token and its type.
    #[test]
    fn pairs_are_those_of_the_library() {
        for processor in [
            json!({"type": "BertProcessing", "sep": ["s", 1], "cls": ["c", 0]}),
            json!({"type": "RobertaProcessing", "sep": ["s", 1], "cls": ["c", 0], "trim_offsets": true, "add_prefix_space": false}),
            template(&json!([
                mark(0),
                text("A", 0),
                mark(0),
                mark(0),
                text("B", 1),
                mark(1)
            ])),
            template(&json!([text("A", 0), mark(1), text("B", 1)])),
            template(&json!([text("A", 0), mark(0), text("B", 0)])),
        ] {
            let tokenizer = with_processor(processor.clone());
            let template = PairTemplate::try_new(&tokenizer).unwrap();
            for (first, second) in [("a b", "b"), ("a", "the quick fox, a b a"), ("?", "a")] {
                let alone = |text: &str| tokenizer.encode_fast(text, false).unwrap();
                let joined = template.join(alone(first).get_ids(), alone(second).get_ids());
                let pair = tokenizer.encode_fast((first, second), true).unwrap();
                assert_eq!(joined.ids, pair.get_ids(), "{processor}");
                let kinds = pair.get_type_ids().iter();
                let of_first = kinds.filter(|kind| **kind == 0).count();
                assert_eq!(joined.first_tokens, of_first, "{processor}");
            }
        }
    }

    #[test]
    fn what_puts_nothing_between_or_tells_kinds_otherwise_is_no_template() {
        for processor in [
            Value::Null,
            template(&json!([text("A", 0), text("B", 1)])),
            template(&json!([text("A", 0), text("B", 1), mark(1)])),
            template(&json!([text("A", 1), mark(0), text("B", 0)])),
            template(&json!([text("A", 0), mark(0), text("B", 2)])),
            template(&json!([text("B", 0), mark(0), text("A", 1)])),
        ] {
            let tokenizer = with_processor(processor.clone());
            assert_eq!(PairTemplate::try_new(&tokenizer), None, "{processor}");
        }
    }
}
