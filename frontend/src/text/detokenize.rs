//! Turns generated token ids back into text, one id at a time.
//!
//! A [`Detokenizer`] serves one sequence: the stream's worker pushes each id as it arrives and forwards
//! the resulting text. It does not handle stop strings (see [`stop`](super::stop)) or transport.
//!
//! Its invariant: for every sequence of ids, known to the vocabulary or not, the outputs add up to
//! exactly the result of [`TextTokenizer::decode_all`] for all ids together. So it never emits part of
//! a code point, nor a U+FFFD that a later token would have resolved.
//!
//! It does not decode a window of recent tokens again and again. `plan` determines how much of the
//! decoding can be done per token, `pieces` stores that for the whole vocabulary, and `utf8` joins
//! split code points. So a push costs a table look-up and a copy, for any decoder and any length of
//! text.

pub(in crate::text) mod pieces;
mod plan;
mod utf8;

#[cfg(test)]
pub(super) mod fixtures;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use pieces::{Piece, Position};
use plan::{LeadingStrip, Plan};
use utf8::{ByteRun, LossyUtf8};

use super::tokenizer::TextTokenizer;

/// Decodes one sequence of token ids incrementally.
///
/// # Contract
///
/// Between two calls of [`push`](Self::push), text is held back only if a later token can still change
/// it: an unfinished code point (at most 3 bytes), or, with byte-fallback vocabularies, an unfinished
/// run of byte tokens. If a decoder stage rewrites the text as a whole, all text waits for
/// [`finish`](Self::finish); no common decoder has such a stage.
///
/// Apart from the text held back, a push takes constant time and allocates only to grow `out`.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use genset_frontend::text::{Detokenizer, TextTokenizer};
///
/// // A byte-level vocabulary: `Ã` and `©` stand for the two bytes of `é`.
/// let json = r###"{
///     "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
///     "pre_tokenizer": null, "post_processor": null,
///     "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true },
///     "model": { "type": "BPE", "vocab": { "caf": 0, "Ã": 1, "©": 2, "Ġ!": 3 }, "merges": [] }
/// }"###;
/// let tokenizer = Arc::new(TextTokenizer::from_bytes(json.as_bytes())?);
/// let mut detokenizer = Detokenizer::new(tokenizer, true);
/// let mut out = String::new();
/// detokenizer.push(0, &mut out);
/// detokenizer.push(1, &mut out);
/// assert_eq!(out, "caf"); // half of `é` waits for the other half
/// detokenizer.push(2, &mut out);
/// detokenizer.push(3, &mut out);
/// detokenizer.finish(&mut out);
/// assert_eq!(out, "café !");
/// # Ok::<(), genset_frontend::text::TokenizerError>(())
/// ```
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<TextTokenizer>,
    skip_special: bool,
    /// Special tokens that are shown nevertheless.
    shown: Arc<[u32]>,
    state: State,
}

#[derive(Debug)]
enum State {
    Streaming(Streaming),
    /// The ids so far, for a decoder that needs them all.
    Waiting(Vec<u32>),
}

#[derive(Debug)]
struct Streaming {
    /// The position of the next token.
    position: Position,
    /// What is still to be stripped from the start of the text.
    strip: Option<LeadingStrip>,
    /// Holds back only in byte-level vocabularies.
    utf8: LossyUtf8,
    /// Holds back only in byte-fallback vocabularies.
    run: ByteRun,
}

impl Detokenizer {
    /// Returns a decoder at the start of a sequence. With `skip_special`, special tokens contribute
    /// nothing.
    #[must_use]
    pub fn new(tokenizer: Arc<TextTokenizer>, skip_special: bool) -> Self {
        let state = match tokenizer.pieces().plan() {
            Plan::Incremental { strip, .. } => State::Streaming(Streaming {
                position: Position::First,
                strip: *strip,
                utf8: LossyUtf8::default(),
                run: ByteRun::default(),
            }),
            Plan::AtEnd => State::Waiting(Vec::new()),
        };
        Self {
            tokenizer,
            skip_special,
            shown: Arc::default(),
            state,
        }
    }

    /// Shows the text of these special tokens nevertheless.
    #[must_use]
    pub fn showing(mut self, tokens: Arc<[u32]>) -> Self {
        self.shown = tokens;
        self
    }

    /// Sets that the text continues that of `prompt`: the space between the two stays. A decoder that
    /// waits for the end ignores the prompt.
    #[must_use]
    pub fn behind(mut self, prompt: &[u32]) -> Self {
        let pieces = self.tokenizer.pieces();
        let is_text = |&token: &u32| pieces.is_visible(token, self.skip_special);
        if let State::Streaming(streaming) = &mut self.state
            && prompt.iter().any(is_text)
        {
            streaming.position = Position::Later;
            streaming.strip = None;
        }
        self
    }

    /// Takes the next token of the sequence and appends the text that is now certain to `out`, if any.
    /// An unknown id contributes nothing.
    #[inline]
    pub fn push(&mut self, token: u32, out: &mut String) {
        let pieces = self.tokenizer.pieces();
        if self.skip_special && pieces.is_special(token) && !self.shown.contains(&token) {
            return;
        }
        match &mut self.state {
            State::Streaming(streaming) => {
                if let Some(piece) = pieces.get(token, streaming.position) {
                    streaming.position = Position::Later;
                    streaming.push(piece, out);
                }
            }
            State::Waiting(ids) => ids.push(token),
        }
    }

    /// Whether text of the latest token is held back.
    #[must_use]
    pub fn holds_back(&self) -> bool {
        match &self.state {
            State::Streaming(streaming) => {
                streaming.utf8.holds_back() || streaming.run.holds_back()
            }
            State::Waiting(ids) => !ids.is_empty(),
        }
    }

    /// Ends the sequence: appends what was held back, with U+FFFD for unfinished code points. No token
    /// is pushed after this.
    pub fn finish(&mut self, out: &mut String) {
        match &mut self.state {
            State::Streaming(streaming) => streaming.finish(out),
            State::Waiting(ids) => {
                let ids = std::mem::take(ids);
                self.decode_at_end(&ids, out);
            }
        }
    }

    fn decode_at_end(&self, ids: &[u32], out: &mut String) {
        // Tokens to skip were not pushed.
        match self.tokenizer.decode_all(ids, false) {
            Ok(text) => out.push_str(&text),
            Err(error) => {
                // Happens only if a pattern backtracks without end; raw text is better than none.
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "decoding without the tokenizer's decoder"
                );
                out.extend(ids.iter().map(|&id| self.tokenizer.token_text(id)));
            }
        }
    }
}

impl Streaming {
    #[inline]
    fn push(&mut self, piece: Piece<'_>, out: &mut String) {
        let before = out.len();
        match piece {
            Piece::Text(text) => {
                self.flush(out);
                out.push_str(text);
            }
            Piece::Bytes(bytes) => self.utf8.push(bytes, out),
            Piece::FallbackByte(byte) => self.run.push(*byte, out),
        }
        self.strip_start(before, out);
    }

    fn finish(&mut self, out: &mut String) {
        let before = out.len();
        self.flush(out);
        self.strip_start(before, out);
    }

    /// Appends what is held back, which can no longer change.
    #[inline]
    fn flush(&mut self, out: &mut String) {
        self.utf8.flush(out);
        self.run.flush(out);
    }

    /// Strips `out[from..]`, the latest output, if the text has only just begun.
    #[inline]
    fn strip_start(&mut self, from: usize, out: &mut String) {
        if let Some(strip) = &mut self.strip
            && out.len() > from
        {
            let is_done = strip.apply(from, out);
            if is_done {
                self.strip = None;
            }
        }
    }
}

impl LeadingStrip {
    /// Strips `out[from..]`. Returns true once nothing more is to be stripped.
    #[cold]
    fn apply(&mut self, from: usize, out: &mut String) -> bool {
        let text = &out[from..];
        let stripped = text
            .chars()
            .take(self.left)
            .take_while(|&c| c == self.content)
            .count();
        let cut = stripped * self.content.len_utf8();
        let reached_other = cut < text.len();
        out.drain(from..from + cut);
        self.left -= stripped;
        reached_other || self.left == 0
    }
}
