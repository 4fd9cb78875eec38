//! How many bytes of a text one token can stand for. A text that cannot fit is then refused before it is tokenized.
//!
//! The result is an upper bound, computed once from a tokenizer's settings and vocabulary. There is none if a part of a text may
//! leave no trace in its tokens: dropped white space, removed characters, or words of any length that become one unknown token.
//! [`TextTokenizer`](super::TextTokenizer) calls it.

use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{Model, NormalizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// Composition and compatibility forms shrink a text by at most this factor: the four bytes of a mathematical letter become one
/// ASCII letter.
const UNICODE_FORM_SHRINKS: usize = 4;

/// A Kelvin sign, of three bytes, becomes a `k`.
const LOWERCASE_SHRINKS: usize = 3;

/// Returns the most bytes of a text that one token can stand for, if there is a bound.
pub(super) fn longest_token_bytes(tokenizer: &Tokenizer) -> Option<usize> {
    let added = tokenizer.get_added_tokens_decoder();
    if added.values().any(|token| token.lstrip || token.rstrip) {
        return None;
    }
    let normalized = |id| tokenizer.id_to_token(id).map_or(0, |token| token.len());
    let longest_added = added
        .iter()
        .map(|(&id, token)| token.content.len().max(normalized(id)))
        .max();
    let shrinks = tokenizer
        .get_normalizer()
        .map_or(Some(1), normalizer_shrinks)?;
    let pre_tokenizer = tokenizer.get_pre_tokenizer();
    let is_byte_level = match pre_tokenizer {
        Some(pre_tokenizer) if removes(pre_tokenizer) => return None,
        Some(pre_tokenizer) => maps_bytes(pre_tokenizer),
        None => false,
    };
    let of_model = longest_of_model(tokenizer.get_model(), is_byte_level)?;
    Some(of_model.max(longest_added.unwrap_or(0)).max(1) * shrinks)
}

/// Returns the largest factor by which a normalizer shrinks a text.
fn normalizer_shrinks(normalizer: &NormalizerWrapper) -> Option<usize> {
    match normalizer {
        NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_) => Some(UNICODE_FORM_SHRINKS),
        NormalizerWrapper::Lowercase(_) => Some(LOWERCASE_SHRINKS),
        NormalizerWrapper::Prepend(_) => Some(1),
        NormalizerWrapper::Replace(replace) => {
            let pattern = serde_json::to_value(replace).ok()?;
            let pattern = pattern["pattern"]["String"].as_str()?.len();
            let content = replace.content.len();
            (content > 0).then(|| pattern.div_ceil(content))
        }
        NormalizerWrapper::Sequence(sequence) => {
            sequence.as_ref().iter().try_fold(1_usize, |all, next| {
                all.checked_mul(normalizer_shrinks(next)?)
            })
        }
        // They remove characters, or follow a table.
        NormalizerWrapper::BertNormalizer(_)
        | NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::StripAccents(_)
        | NormalizerWrapper::Nmt(_)
        | NormalizerWrapper::Precompiled(_)
        | NormalizerWrapper::ByteLevel(_) => None,
    }
}

/// Whether it may drop a part of the text.
fn removes(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    let removed = SplitDelimiterBehavior::Removed;
    match pre_tokenizer {
        PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref().iter().any(removes),
        PreTokenizerWrapper::Split(split) => split.behavior == removed,
        PreTokenizerWrapper::Punctuation(punctuation) => punctuation.behavior == removed,
        PreTokenizerWrapper::ByteLevel(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::FixedLength(_)
        | PreTokenizerWrapper::Metaspace(_) => false,
        PreTokenizerWrapper::BertPreTokenizer(_)
        | PreTokenizerWrapper::Delimiter(_)
        | PreTokenizerWrapper::UnicodeScripts(_)
        | PreTokenizerWrapper::Whitespace(_)
        | PreTokenizerWrapper::WhitespaceSplit(_) => true,
    }
}

/// Whether the model receives one character for each byte.
fn maps_bytes(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref().iter().any(maps_bytes),
        PreTokenizerWrapper::BertPreTokenizer(_)
        | PreTokenizerWrapper::Delimiter(_)
        | PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::FixedLength(_)
        | PreTokenizerWrapper::Metaspace(_)
        | PreTokenizerWrapper::Punctuation(_)
        | PreTokenizerWrapper::Split(_)
        | PreTokenizerWrapper::UnicodeScripts(_)
        | PreTokenizerWrapper::Whitespace(_)
        | PreTokenizerWrapper::WhitespaceSplit(_) => false,
    }
}

fn longest_of_model(model: &ModelWrapper, is_byte_level: bool) -> Option<usize> {
    let is_complete = match model {
        ModelWrapper::BPE(bpe) => is_complete(bpe, is_byte_level),
        // Adjacent unknown characters become one token, unless the vocabulary has byte tokens.
        ModelWrapper::Unigram(unigram) => unigram.byte_fallback() && has_all_bytes(unigram),
        ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
    };
    if !is_complete {
        return None;
    }
    let bytes = |token: &String| {
        if is_byte_level {
            token.chars().count()
        } else {
            token.len()
        }
    };
    let longest = model.get_vocab().keys().map(bytes).max()?;
    // An unknown character becomes one token.
    Some(longest.max(char::MAX.len_utf8()))
}

/// Whether every character of a text is part of a token, and adjacent unknown characters are not fused into one.
fn is_complete(bpe: &BPE, is_byte_level: bool) -> bool {
    let has_unknown = bpe.unk_token.is_some() && !bpe.fuse_unk && !bpe.byte_fallback;
    is_alike_everywhere(bpe) && (has_unknown || has_token_for_all(bpe, is_byte_level))
}

/// Whether the model treats a character alike at the beginning, in the middle and at the end of a word.
pub(super) fn is_alike_everywhere(bpe: &BPE) -> bool {
    let is_none = |part: &Option<String>| part.as_ref().is_none_or(String::is_empty);
    is_none(&bpe.continuing_subword_prefix) && is_none(&bpe.end_of_word_suffix)
}

/// Whether the model has a token for every character, or for all its bytes. `is_byte_level` says that words consist of letters
/// that stand for bytes.
pub(super) fn has_token_for_all(bpe: &BPE, is_byte_level: bool) -> bool {
    if is_byte_level {
        byte_level_alphabet().all(|letter| bpe.token_to_id(&letter).is_some())
    } else {
        bpe.byte_fallback && has_all_bytes(bpe)
    }
}

fn byte_level_alphabet() -> impl Iterator<Item = String> {
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    alphabet.into_iter().map(String::from)
}

/// Whether the vocabulary has a token for each byte.
fn has_all_bytes(model: &impl Model) -> bool {
    (0..=u8::MAX).all(|byte| model.token_to_id(&format!("<0x{byte:02X}>")).is_some())
}

#[cfg(test)]
mod tests;
