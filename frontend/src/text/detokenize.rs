//! Generated token ids back to text, one id at a time.
//!
//! A [`Detokenizer`] serves one sequence: the stream's worker pushes each id as it arrives and passes
//! on what comes out. It knows nothing of stop strings (see [`stop`](super::stop)) or of how the text
//! is sent.
//!
//! The law it keeps: for every sequence of ids, known to the vocabulary or not, the outputs add up to
//! exactly what [`TextTokenizer::decode_all`] makes of all ids together. So it never emits part of a
//! code point, nor a U+FFFD that a later token would have resolved.
//!
//! It does not decode a window of recent tokens again and again. `plan` finds out how much of decoding
//! can be done per token, `pieces` holds that for the whole vocabulary, and `utf8` joins what tokens
//! split. So one push costs a table look-up and a copy, whatever the decoder and however long the text.

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
/// Between [`push`](Self::push) and `push`, text is held back only where a later token can still change
/// it: an unfinished code point (at most 3 bytes), or, with byte-fallback vocabularies, a run of byte
/// tokens, until it ends. A decoder stage that rewrites the text as a whole, as no common one does,
/// makes all text wait for [`finish`](Self::finish).
///
/// A push takes constant time and allocates nothing but the growth of `out`, apart from what it holds back.
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
    /// Special tokens that are not skipped.
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
    /// Where the next token stands.
    position: Position,
    /// What is still to be stripped from the start of the text.
    strip: Option<LeadingStrip>,
    /// Holds back only in byte-level vocabularies.
    utf8: LossyUtf8,
    /// Holds back only in byte-fallback vocabularies.
    run: ByteRun,
}

impl State {
    fn new(plan: &Plan) -> Self {
        match plan {
            Plan::Incremental { strip, .. } => Self::Streaming(Streaming {
                position: Position::First,
                strip: *strip,
                utf8: LossyUtf8::default(),
                run: ByteRun::default(),
            }),
            Plan::AtEnd => Self::Waiting(Vec::new()),
        }
    }
}

impl Detokenizer {
    /// A decoder at the start of a sequence. With `skip_special`, special tokens contribute nothing.
    #[must_use]
    pub fn new(tokenizer: Arc<TextTokenizer>, skip_special: bool) -> Self {
        let state = State::new(tokenizer.pieces().plan());
        Self {
            tokenizer,
            skip_special,
            shown: Arc::default(),
            state,
        }
    }

    /// Special tokens that contribute their text nevertheless.
    #[must_use]
    pub fn showing(mut self, tokens: Arc<[u32]>) -> Self {
        self.shown = tokens;
        self
    }

    /// The same decoder, at the start of a sequence whose text goes on with that of `prompt`: the space between them stays. A
    /// decoder that waits for the end knows no prompt.
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
    /// An id that the vocabulary does not know contributes nothing.
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

    /// Whether text of the latest token waits for a later one.
    #[must_use]
    pub fn holds_back(&self) -> bool {
        match &self.state {
            State::Streaming(streaming) => {
                streaming.utf8.holds_back() || streaming.run.holds_back()
            }
            State::Waiting(ids) => !ids.is_empty(),
        }
    }

    /// The sequence ends: appends what was held back, with U+FFFD for code points left unfinished.
    /// A token pushed after this begins another sequence.
    pub fn finish(&mut self, out: &mut String) {
        let initial = State::new(self.tokenizer.pieces().plan());
        match std::mem::replace(&mut self.state, initial) {
            State::Streaming(mut streaming) => streaming.finish(out),
            State::Waiting(ids) => self.decode_at_end(&ids, out),
        }
    }

    fn decode_at_end(&self, ids: &[u32], out: &mut String) {
        // What is to be skipped was not pushed.
        match self.tokenizer.decode_all(ids, false) {
            Ok(text) => out.push_str(&text),
            Err(error) => {
                // Only a pattern that backtracks without end gets here; better raw text than none.
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
            Piece::FallbackByte(byte) => self.run.push(byte, out),
        }
        self.strip_start(before, out);
    }

    fn finish(&mut self, out: &mut String) {
        let before = out.len();
        self.flush(out);
        self.strip_start(before, out);
    }

    /// What is held back cannot change any more.
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
    /// Strips `out[from..]`; true if nothing after it is to be stripped.
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
