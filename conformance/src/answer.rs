//! [`Answer`]: the items of a stream up to its end. [`Generated`]: the generated tokens or text.

use std::fmt;

use genset_backend_common::output::{Finished, TokenChunk, TokenLogprob, Usage, Violation};
use genset_backend_common::{EngineError, FinishReason, Output, TokenId};

/// The items of a stream up to its end.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Every item, in order; the last is the terminal.
    pub items: Vec<Result<Output, EngineError>>,
    /// The rule that the raw stream broke, if any.
    pub violation: Option<Violation>,
    /// Whether the stream returned `None` again after its end.
    pub is_fused: bool,
}

impl Answer {
    /// The answer of a stream that broke no rule.
    #[must_use]
    pub fn of(items: Vec<Result<Output, EngineError>>) -> Self {
        Self {
            items,
            violation: None,
            is_fused: true,
        }
    }

    /// Everything generated, including the terminal's part.
    #[must_use]
    pub fn generated(&self) -> Generated {
        let mut generated = Generated::default();
        for output in self.items.iter().flatten() {
            generated.push(output);
        }
        generated
    }

    /// All tokens, including those of the terminal; empty for an answer in text.
    #[must_use]
    pub fn tokens(&self) -> Vec<TokenId> {
        let ids = |chunk: &TokenChunk| chunk.token_ids.to_vec();
        self.chunks().flat_map(ids).collect()
    }

    /// The text of an answer in text.
    #[must_use]
    pub fn text(&self) -> String {
        let text_of = |output: &Output| match output {
            Output::Text(chunk) => Some(chunk.text.clone()),
            Output::Tokens(_) | Output::Finished(_) | Output::Embeddings(_) | Output::Scores(_) => {
                None
            }
        };
        self.items.iter().flatten().filter_map(text_of).collect()
    }

    /// The log probabilities of all tokens, including those of the terminal.
    #[must_use]
    pub fn logprobs(&self) -> Vec<TokenLogprob> {
        let logprobs = |chunk: &TokenChunk| chunk.logprobs.clone();
        self.chunks().flat_map(logprobs).collect()
    }

    fn chunks(&self) -> impl Iterator<Item = &TokenChunk> {
        self.items.iter().flatten().filter_map(chunk_of)
    }

    /// Its tokens from index `first` on, with their log probabilities, without the end.
    #[must_use]
    pub(crate) fn after(&self, first: usize) -> Self {
        let mut chunk: TokenChunk = self.tokens().into_iter().skip(first).collect();
        chunk
            .logprobs
            .extend(self.logprobs().into_iter().skip(first));
        Self::of(vec![Ok(Output::Tokens(chunk))])
    }

    /// The finish reason; `None` if it ended with an error.
    #[must_use]
    pub fn reason(&self) -> Option<FinishReason> {
        self.finished().map(|finished| finished.reason)
    }

    /// The usage; `None` if it ended with an error.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.finished().map(|finished| finished.usage)
    }

    /// The terminal item; `None` if it ended with an error.
    #[must_use]
    pub fn finished(&self) -> Option<&Finished> {
        match self.items.last() {
            Some(Ok(Output::Finished(finished))) => Some(finished),
            _ => None,
        }
    }

    /// The error that it ended with.
    #[must_use]
    pub fn error(&self) -> Option<&EngineError> {
        self.items.last().and_then(|item| item.as_ref().err())
    }
}

/// The tokens of an item, or `None` if it is of another kind.
pub(crate) fn chunk_of(output: &Output) -> Option<&TokenChunk> {
    match output {
        Output::Tokens(chunk) => Some(chunk),
        Output::Finished(finished) => Some(&finished.last),
        Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => None,
    }
}

/// Generated tokens or text. Two values are equal if their tokens or texts are equal: how an answer is split into items is the
/// engine's choice.
#[derive(Clone, Default)]
pub struct Generated {
    tokens: usize,
    /// Token ids, or characters.
    units: Vec<u32>,
    is_text: bool,
}

impl Generated {
    /// The number of tokens; for text, as counted by the engine.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether nothing was generated.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens == 0 && self.units.is_empty()
    }

    /// Its units: token ids, or the characters of a text.
    #[must_use]
    pub fn units(&self) -> &[u32] {
        &self.units
    }

    /// Adds the content of an item.
    pub fn push(&mut self, output: &Output) {
        let tokens = usize::try_from(output.token_count()).unwrap_or(usize::MAX);
        self.tokens = self.tokens.saturating_add(tokens);
        if let Some(chunk) = chunk_of(output) {
            self.units.extend_from_slice(&chunk.token_ids);
        }
        if let Output::Text(chunk) = output {
            self.is_text = true;
            self.units.extend(chunk.text.chars().map(u32::from));
        }
    }

    /// Appends the rest.
    pub fn extend(&mut self, rest: &Self) {
        self.tokens = self.tokens.saturating_add(rest.tokens);
        self.units.extend_from_slice(&rest.units);
        self.is_text |= rest.is_text;
    }
}

impl PartialEq for Generated {
    fn eq(&self, other: &Self) -> bool {
        self.units == other.units
    }
}

impl Eq for Generated {}

impl fmt::Debug for Generated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_text {
            let text: String = self
                .units
                .iter()
                .filter_map(|c| char::from_u32(*c))
                .collect();
            return fmt::Debug::fmt(&text, f);
        }
        fmt::Debug::fmt(&self.units, f)
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::output::TextChunk;

    use super::*;

    fn text(text: &str, token_count: u32) -> Output {
        Output::Text(TextChunk {
            text: text.into(),
            token_count,
        })
    }

    #[test]
    fn texts_are_compared_however_they_are_cut() {
        let (mut cut, mut whole) = (Generated::default(), Generated::default());
        cut.push(&text("é o", 1));
        cut.push(&text("ne", 2));
        whole.push(&text("é one", 3));
        assert_eq!(cut, whole);
        assert_eq!((cut.len(), format!("{cut:?}")), (3, "\"é one\"".to_owned()));
    }

    #[test]
    fn tokens_are_counted_where_they_are() {
        let mut generated = Generated::default();
        generated.push(&Output::from(7));
        generated.extend(&generated.clone());
        assert_eq!((generated.len(), generated.units()), (2, &[7, 7][..]));
    }
}
