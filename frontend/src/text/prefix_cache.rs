//! Caches the tokens of prefixes: a conversation's history is not tokenized again in every turn.
//!
//! A prompt is cut after special tokens into [windows](borders::Window), which the tokenizer encodes one by one with the same
//! result. Each window's tokens are [kept](kept::KeptWindows) in bounded memory. A known prefix is a run of known windows from
//! any source: another turn, another conversation with the same system prompt, the same document.
//!
//! It serves only [`TextTokenizer`](super::TextTokenizer) and never returns other tokens than the tokenizer would. If that is not
//! certain, [`PrefixCache::try_new`] returns no cache.

mod borders;
mod kept;

use tokenizers::Tokenizer;

use self::borders::Borders;
use self::kept::KeptWindows;
use super::bounded::is_random;
use super::tokenizer::EncodedPrompt;

/// The fewest bytes that a window adds: a shorter one costs more to store and find than to tokenize.
const MIN_WINDOW_BYTES: usize = 128;

/// The borders of a tokenizer's texts, and the tokens of the windows seen. Shared by all requests to a model.
pub(super) struct PrefixCache {
    borders: Borders,
    kept: KeptWindows,
}

impl PrefixCache {
    /// Makes a cache of up to `max_bytes`. `None` if it could hold nothing, or if this tokenizer's texts cannot be cut: it has no
    /// border tokens, is random, or adds tokens of its own to every text.
    pub(super) fn try_new(tokenizer: &Tokenizer, max_bytes: usize) -> Option<Self> {
        Self::with_min_window(tokenizer, max_bytes, MIN_WINDOW_BYTES)
    }

    fn with_min_window(
        tokenizer: &Tokenizer,
        max_bytes: usize,
        min_window_bytes: usize,
    ) -> Option<Self> {
        if max_bytes == 0 || is_random(tokenizer.get_model()) {
            return None;
        }
        let borders = Borders::try_new(tokenizer, min_window_bytes)?;
        let kept = KeptWindows::new(max_bytes);
        Some(Self { borders, kept })
    }

    /// Returns the tokens of `text`, without those that a post-processor adds: the tokens known under `salt`, and the result of
    /// `encode` for the rest. `encode` must be the tokenizer's; it receives the number of tokens before its text. No lock is held
    /// while it runs.
    ///
    /// # Errors
    /// The errors of `encode`.
    pub(super) fn encode<E>(
        &self,
        salt: Option<&str>,
        text: &str,
        encode: impl Fn(&str, usize) -> Result<Vec<u32>, E>,
    ) -> Result<EncodedPrompt, E> {
        let mut all = EncodedPrompt::default();
        for window in self.borders.windows(text) {
            // Text after the last border rarely occurs again unchanged.
            let is_kept = window.ends_with_border();
            let known = is_kept
                .then(|| self.kept.get(salt, window.text()))
                .flatten();
            let new = match &known {
                Some(_) => Vec::new(),
                None => encode(window.text(), all.ids.len())?,
            };
            let ids = known.as_ref().map_or(new.as_slice(), |known| &known.ids);
            let Some(added) = window.added(ids) else {
                // The tokenizer matches differently than `Borders` does. The tokenizer is right.
                let ids = encode(text, 0)?;
                return Ok(EncodedPrompt {
                    ids,
                    cached_tokens: 0,
                });
            };
            if all.ids.is_empty() && !is_kept && added.len() == new.len() {
                // Does not copy a long text without borders.
                all.ids = new;
                continue;
            }
            all.ids.extend_from_slice(added);
            if known.is_some() {
                all.cached_tokens += added.len();
            } else if is_kept {
                self.kept.insert(salt, window.text(), new);
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
pub(super) mod tests;
