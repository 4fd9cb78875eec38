//! Checks that a `tokenizer.json` fits a model.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::LoadError;

#[derive(Deserialize)]
struct Tokenizer {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: Vocab,
}

/// Names with ids, or in Unigram models pairs of name and score, whose index is the id.
#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    Ids(HashMap<String, u64>),
    Scores(Vec<Value>),
}

impl Default for Vocab {
    fn default() -> Self {
        Self::Scores(Vec::new())
    }
}

#[derive(Deserialize)]
struct Added {
    id: u64,
    content: String,
}

/// Rejects a tokenizer that produces tokens which the model does not have.
///
/// Tokens added beyond the vocabulary are only logged: some checkouts (Gemma 3's) have one for images that their text model
/// lacks, and a request with it fails by itself.
///
/// # Errors
/// The file is not a tokenizer, or its vocabulary is larger than the model's.
pub(crate) fn check(path: &Path, text: &[u8], vocab_size: usize) -> Result<(), LoadError> {
    let tokenizer: Tokenizer =
        serde_json::from_slice(text).map_err(|error| LoadError::broken(path, error))?;
    let is_beyond = |id: u64| usize::try_from(id).map_or(true, |id| id >= vocab_size);
    let beyond = match tokenizer.model.vocab {
        Vocab::Ids(ids) => ids
            .into_iter()
            .filter(|(_, id)| is_beyond(*id))
            .max_by_key(|(_, id)| *id),
        Vocab::Scores(scores) => {
            let last = scores.len().saturating_sub(1);
            let last = u64::try_from(last).unwrap_or(u64::MAX);
            let token = scores.last().and_then(|pair| pair.get(0)?.as_str());
            token
                .map(|token| (token.to_owned(), last))
                .filter(|(_, id)| is_beyond(*id))
        }
    };
    // An added token may be in the vocabulary too.
    let added = |token: &str| tokenizer.added_tokens.iter().any(|it| it.content == token);
    if let Some((token, id)) = beyond.filter(|(token, _)| !added(token)) {
        return Err(LoadError::TokenizerMismatch {
            path: path.to_owned(),
            token,
            id,
            vocab_size,
        });
    }
    for token in tokenizer.added_tokens.iter().filter(|it| is_beyond(it.id)) {
        tracing::warn!(
            token = token.content,
            id = token.id,
            vocab_size,
            "the tokenizer has a token that the model does not have; requests with it are refused"
        );
    }
    Ok(())
}
