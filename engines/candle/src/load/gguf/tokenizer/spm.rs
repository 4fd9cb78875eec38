//! SentencePiece's BPE vocabularies with scores, which GGUF files call llama: Llama 2, Mistral, Gemma.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::super::header::Value;
use super::Vocabulary;
use crate::error::LoadError;

/// The character for a space in tokens.
const SPACE: &str = "\u{2581}";

/// More bytes than any token has. Every split of a token is looked up, which would take forever for a long one.
const MAX_TOKEN_BYTES: usize = 1 << 10;

/// The memory limit of the merges, counted with [`MERGE_BYTES`]. Gemma's half a million merges take a third of it.
const MAX_MERGES_BYTES: usize = 128 << 20;

/// Bytes of a merge beside its text.
const MERGE_BYTES: usize = 64;

pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<Json, LoadError> {
    let scores = match vocabulary.find("scores") {
        Some(Value::Numbers(scores)) if scores.len() == vocabulary.tokens.len() => scores,
        Some(_) | None => {
            let problem = "it has a vocabulary but not a score for each token";
            return Err(LoadError::no_tokenizer(vocabulary.path, problem));
        }
    };
    let mut lengths = vocabulary.tokens.iter().map(String::len);
    if let Some(length) = lengths.find(|length| *length > MAX_TOKEN_BYTES) {
        let problem = format!(
            "it has a token of {length} bytes; {MAX_TOKEN_BYTES} are the most that are read"
        );
        return Err(LoadError::no_tokenizer(vocabulary.path, problem));
    }
    let Some(merges) = merges(vocabulary.tokens, scores) else {
        let problem = format!(
            "the merges of its vocabulary take more than {MAX_MERGES_BYTES} bytes, the most that are made"
        );
        return Err(LoadError::no_tokenizer(vocabulary.path, problem));
    };
    let mut vocab = Map::new();
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        vocab.insert(token.clone(), id.into());
    }
    let adds_prefix = vocabulary.flag("add_space_prefix").unwrap_or(true);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let normalizer = if adds_prefix {
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]})
    } else {
        replace
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if adds_prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "post_processor": vocabulary.post_processor(),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": vocabulary.token("unknown_token_id"),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
            "merges": merges,
        },
    }))
}

/// Every pair of tokens whose concatenation is a token, the highest score first, which is SentencePiece's order. `None` if they
/// take more than [`MAX_MERGES_BYTES`]: repetitive tokens can have any number of pairs.
fn merges(tokens: &[String], scores: &[f64]) -> Option<Vec<[String; 2]>> {
    let ids: HashMap<&str, usize> = tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.as_str(), id))
        .collect();
    let mut found = Vec::new();
    let mut left = MAX_MERGES_BYTES;
    for (token, score) in tokens.iter().zip(scores) {
        let mut pairs: Vec<(usize, usize)> = token
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (first, second) = token.split_at(at);
                Some((*ids.get(first)?, *ids.get(second)?))
            })
            .collect();
        left = left.checked_sub(pairs.len() * (token.len() + MERGE_BYTES))?;
        pairs.sort_unstable();
        found.extend(pairs.into_iter().map(|pair| (*score, pair)));
    }
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let token = |id: usize| tokens.get(id).cloned().unwrap_or_default();
    let merges = found
        .into_iter()
        .map(|(_, (first, second))| [token(first), token(second)]);
    Some(merges.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_scores_merge_first() {
        let tokens = ["a", "b", "ab", "aba", "ba"].map(str::to_owned);
        let scores = [-1.0, -2.0, -4.0, -9.0, -3.0];
        let merges = merges(&tokens, &scores).unwrap();
        let shown: Vec<String> = merges.iter().map(|pair| pair.join("+")).collect();
        assert_eq!(shown, ["b+a", "a+b", "a+ba", "ab+a"]);
    }

    #[test]
    fn merges_without_bound_are_refused() {
        let tokens: Vec<String> = (1..=MAX_TOKEN_BYTES).map(|n| "a".repeat(n)).collect();
        let scores = vec![0.0; tokens.len()];
        assert!(merges(&tokens, &scores).is_none());
        assert!(merges(&tokens[..64], &scores[..64]).is_some());
    }
}
