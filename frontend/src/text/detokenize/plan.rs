//! Divides a tokenizer's decoder into a part stored in a table and a part applied as tokens arrive.
//!
//! A decoder of the `tokenizers` crate is a chain of stages over the whole list of tokens. In every
//! common chain, the first stages look at one token at a time, and at most at whether it is the first.
//! So [`Chain`] can run the crate's own stages over the vocabulary once. The rest is joining, byte
//! fallback and stripping the text's start: the [`Plan`] for [`Detokenizer`](super::Detokenizer).
//!
//! # Source
//!
//! The decoders in `tokenizers::decoders`, with whose results the tests compare.

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;

use crate::text::tokenizer::TokenizerError;

/// How pieces become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::text) enum Plan {
    /// Pieces are joined as they arrive.
    Incremental {
        /// What a piece consists of.
        content: Content,
        /// What to strip from the start of the text.
        strip: Option<LeadingStrip>,
    },
    /// A later stage needs the whole text, which no common decoder does: text is decoded at the end.
    AtEnd,
}

/// What the tokens of a vocabulary consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::text) enum Content {
    /// Text.
    Text,
    /// Text, and tokens like `<0xE2>` for single bytes.
    TextAndFallbackBytes,
    /// Bytes, each written as one character of the byte-level alphabet.
    ByteLevel,
}

/// Drops up to `left` characters `content` from the start of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::text) struct LeadingStrip {
    pub(in crate::text) content: char,
    pub(in crate::text) left: usize,
}

/// A decoder, divided into the stages stored in the table and the plan for the rest.
pub(super) struct Chain {
    /// Stages that map each token to one piece and need to know only whether it is the first.
    per_token: Vec<DecoderWrapper>,
    /// Without a decoder, tokens are joined with spaces.
    joins_by_space: bool,
    pub(super) plan: Plan,
}

impl Chain {
    pub(super) fn try_new(decoder: Option<&DecoderWrapper>) -> Result<Self, TokenizerError> {
        let mut stages = Vec::new();
        if let Some(decoder) = decoder {
            flatten(decoder, &mut stages);
        }
        let cuts_ends = |stage: &&DecoderWrapper| matches!(stage, DecoderWrapper::Strip(strip) if strip.stop > 0);
        if stages.iter().any(cuts_ends) {
            // It would make the `tokenizers` crate panic.
            let reason = "Strip with `stop` above 0 cannot decode tokens shorter than `stop`";
            return Err(TokenizerError::UnsupportedDecoder {
                reason: reason.to_owned(),
            });
        }

        let mut division = Division {
            per_token: Vec::new(),
            content: Content::Text,
            strip: None,
            reached: Reached::PerToken,
        };
        let is_divided = stages.into_iter().all(|stage| division.take(stage));
        let Division { content, strip, .. } = division;
        Ok(if is_divided {
            Self {
                per_token: division.per_token,
                joins_by_space: decoder.is_none(),
                plan: Plan::Incremental { content, strip },
            }
        } else {
            // The table then stores the raw tokens.
            Self {
                per_token: Vec::new(),
                joins_by_space: false,
                plan: Plan::AtEnd,
            }
        })
    }

    /// Returns the pieces of tokens that are not the first of their text.
    pub(super) fn later(&self, tokens: &[Option<String>]) -> Result<Vec<String>, TokenizerError> {
        // Another token before them, so that none of them is the first.
        let before_all = std::iter::once(String::new());
        let tokens = tokens.iter().map(|token| token.clone().unwrap_or_default());
        let mut pieces = self.run(before_all.chain(tokens).collect())?;
        pieces.remove(0);
        if self.joins_by_space {
            for piece in &mut pieces {
                piece.insert(0, ' ');
            }
        }
        Ok(pieces)
    }

    /// Returns the pieces of tokens that are the first of their text, if any stage distinguishes them.
    pub(super) fn first(
        &self,
        tokens: &[Option<String>],
    ) -> Result<Option<Vec<String>>, TokenizerError> {
        let heeds_position = |stage: &DecoderWrapper| {
            matches!(
                stage,
                DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_)
            )
        };
        if !self.joins_by_space && !self.per_token.iter().any(heeds_position) {
            return Ok(None);
        }
        let alone = |token: &Option<String>| {
            let pieces = self.run(vec![token.clone().unwrap_or_default()])?;
            Ok(pieces.concat())
        };
        tokens.iter().map(alone).collect::<Result<_, _>>().map(Some)
    }

    fn run(&self, tokens: Vec<String>) -> Result<Vec<String>, TokenizerError> {
        self.per_token
            .iter()
            .try_fold(tokens, |tokens, stage| stage.decode_chain(tokens))
            .map_err(|source| TokenizerError::Decode { source })
    }
}

/// A chain that is being divided.
struct Division {
    per_token: Vec<DecoderWrapper>,
    content: Content,
    strip: Option<LeadingStrip>,
    reached: Reached,
}

/// The point in the chain that the division has reached.
#[derive(Clone, Copy)]
enum Reached {
    PerToken,
    ByteFallback,
    Joined,
    Stripped,
}

impl Division {
    /// Takes the chain's next stage; false if it cannot be applied as tokens arrive.
    fn take(&mut self, stage: &DecoderWrapper) -> bool {
        use DecoderWrapper as Stage;
        self.reached = match (self.reached, stage) {
            (
                Reached::PerToken,
                Stage::Replace(_) | Stage::Metaspace(_) | Stage::WordPiece(_) | Stage::Strip(_),
            ) => {
                self.per_token.push(stage.clone());
                Reached::PerToken
            }
            (Reached::PerToken, Stage::ByteFallback(_)) => {
                self.content = Content::TextAndFallbackBytes;
                Reached::ByteFallback
            }
            (Reached::PerToken, Stage::ByteLevel(_)) => {
                self.content = Content::ByteLevel;
                Reached::Joined
            }
            (Reached::Stripped, Stage::Fuse(_)) => Reached::Stripped,
            (_, Stage::Fuse(_)) => Reached::Joined,
            (Reached::Joined, Stage::Strip(stage)) => {
                self.strip = Some(LeadingStrip {
                    content: stage.content,
                    left: stage.start,
                });
                Reached::Stripped
            }
            _ => return false,
        };
        true
    }
}

fn flatten<'a>(decoder: &'a DecoderWrapper, stages: &mut Vec<&'a DecoderWrapper>) {
    if let DecoderWrapper::Sequence(sequence) = decoder {
        for stage in sequence.get_decoders() {
            flatten(stage, stages);
        }
    } else {
        stages.push(decoder);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plan(decoder: serde_json::Value) -> Plan {
        let decoder: DecoderWrapper = serde_json::from_value(decoder).unwrap();
        Chain::try_new(Some(&decoder)).unwrap().plan
    }

    #[test]
    fn chains_in_common_use_are_incremental() {
        let incremental = |content, strip| Plan::Incremental { content, strip };
        let strip = Some(LeadingStrip {
            content: ' ',
            left: 1,
        });
        let replace = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
        let byte_level =
            json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true });
        let metaspace =
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always" });
        let llama_2 = json!({ "type": "Sequence", "decoders": [
            replace, { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] });
        let gemma = json!({ "type": "Sequence", "decoders": [
            replace, { "type": "ByteFallback" }, { "type": "Fuse" },
        ] });
        let nested = json!({ "type": "Sequence", "decoders": [
            { "type": "Sequence", "decoders": [byte_level, { "type": "Fuse" }] },
        ] });
        assert_eq!(plan(byte_level), incremental(Content::ByteLevel, None));
        assert_eq!(plan(nested), incremental(Content::ByteLevel, None));
        assert_eq!(plan(metaspace), incremental(Content::Text, None));
        let content = Content::TextAndFallbackBytes;
        assert_eq!(plan(gemma), incremental(content, None));
        assert_eq!(plan(llama_2), incremental(content, strip));
    }

    #[test]
    fn a_stage_over_the_whole_text_waits_for_the_end() {
        let regex = json!({ "type": "Replace", "pattern": { "Regex": "a+" }, "content": "a" });
        let decoders = [json!({ "type": "Fuse" }), regex];
        assert_eq!(
            plan(json!({ "type": "Sequence", "decoders": decoders })),
            Plan::AtEnd
        );
        assert_eq!(
            plan(json!({ "type": "BPEDecoder", "suffix": "</w>" })),
            Plan::AtEnd
        );
    }
}
