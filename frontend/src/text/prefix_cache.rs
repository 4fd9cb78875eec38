//! Tokens of texts that begin as others did: a conversation's history is not tokenized again with every turn.
//!
//! A prompt is cut after special tokens into [windows](borders::Window) that the tokenizer takes one by one with the same
//! result; what a window's tokens are is [kept](kept::KeptWindows) in bounded memory. A known prefix is a run of known
//! windows, wherever it comes from: another turn, another conversation with the same system prompt, the same document.
//!
//! It serves [`TextTokenizer`](super::TextTokenizer) alone and never gives other tokens than the tokenizer would. Where that
//! is not certain, [`PrefixCache::try_new`] says that there is no cache.

mod borders;
mod kept;

use tokenizers::Tokenizer;

use self::borders::Borders;
use self::kept::KeptWindows;
use super::bounded::is_random;
use super::tokenizer::EncodedPrompt;

/// No window adds fewer bytes than this: a shorter one costs more to keep and to find than to tokenize.
const MIN_WINDOW_BYTES: usize = 128;

/// Where a tokenizer's texts may be cut, and the tokens of what was seen between. Shared by all requests of a model.
pub(super) struct PrefixCache {
    borders: Borders,
    kept: KeptWindows,
}

impl PrefixCache {
    /// A cache of so many bytes; `None` when it could hold nothing, or texts for this tokenizer cannot be cut: it has no
    /// border tokens, or is random, or adds tokens of its own to every text.
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

    /// The tokens of `text` without those that a post-processor adds: those known under `salt`, and for the rest what `encode` gives.
    /// `encode` must be the tokenizer's, and no lock is held while it runs. It is told how many tokens came before.
    ///
    /// # Errors
    /// What `encode` says.
    pub(super) fn encode<E>(
        &self,
        salt: Option<&str>,
        text: &str,
        encode: impl Fn(&str, usize) -> Result<Vec<u32>, E>,
    ) -> Result<EncodedPrompt, E> {
        let mut all = EncodedPrompt::default();
        for window in self.borders.windows(text) {
            // What comes after the last border is rarely seen again as it is.
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
                // The tokenizer matches otherwise than `Borders` does. It is right.
                let ids = encode(text, 0)?;
                return Ok(EncodedPrompt {
                    ids,
                    cached_tokens: 0,
                });
            };
            if all.ids.is_empty() && !is_kept && added.len() == new.len() {
                // A long text without borders is not copied.
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
