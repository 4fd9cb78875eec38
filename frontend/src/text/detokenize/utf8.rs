//! Turns bytes into text when code points arrive in parts.
//!
//! There are two rules for bytes that are not UTF-8. A byte-level decoder replaces each maximal invalid
//! part by one U+FFFD, as [`String::from_utf8_lossy`] does: [`LossyUtf8`]. A byte-fallback decoder
//! checks a whole run of byte tokens, and replaces each of its bytes if the run is not UTF-8:
//! [`ByteRun`].

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Whether more bytes can complete these as a code point.
fn is_begun(bytes: &[u8]) -> bool {
    str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// [`String::from_utf8_lossy`] for bytes that arrive in pieces: for every split into `push`es, the
/// outputs add up to its result for the whole.
#[derive(Debug, Default)]
pub(super) struct LossyUtf8 {
    /// Between pushes, the beginning of a code point: at most three bytes.
    held: Vec<u8>,
}

impl LossyUtf8 {
    /// Whether it waits for the rest of a code point.
    pub(super) fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    pub(super) fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in self.held.utf8_chunks() {
            out.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = done + invalid.len() == self.held.len();
            if is_last && is_begun(invalid) {
                break;
            }
            if !invalid.is_empty() {
                out.push(REPLACEMENT);
                done += invalid.len();
            }
        }
        self.held.drain(..done);
    }

    /// Replaces an unfinished code point by U+FFFD. Called at the end of the bytes, and before text.
    pub(super) fn flush(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            self.held.clear();
            out.push(REPLACEMENT);
        }
    }
}

/// A run of byte tokens, checked as a whole: its text if all of it is UTF-8, else one U+FFFD per byte.
///
/// The result is unknown until the run ends, so its text is held back. Once the run is known not to be
/// UTF-8, each further byte is output at once.
#[derive(Debug, Default)]
pub(super) struct ByteRun {
    held: Vec<u8>,
    /// How many of the bytes held back are whole code points.
    whole: usize,
    is_broken: bool,
}

impl ByteRun {
    /// Whether it waits for the end of the run.
    pub(super) fn holds_back(&self) -> bool {
        !self.held.is_empty()
    }

    pub(super) fn push(&mut self, byte: u8, out: &mut String) {
        self.held.push(byte);
        if !self.is_broken {
            let rest = &self.held[self.whole..];
            if str::from_utf8(rest).is_ok() {
                self.whole = self.held.len();
            } else {
                self.is_broken = !is_begun(rest);
            }
        }
        if self.is_broken {
            self.replace_held(out);
        }
    }

    /// Ends the run.
    pub(super) fn flush(&mut self, out: &mut String) {
        match str::from_utf8(&self.held) {
            Ok(text) => out.push_str(text),
            Err(_) => self.replace_held(out),
        }
        self.held.clear();
        self.whole = 0;
        self.is_broken = false;
    }

    fn replace_held(&mut self, out: &mut String) {
        out.extend(self.held.drain(..).map(|_| REPLACEMENT));
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use tokenizers::Decoder;
    use tokenizers::decoders::byte_fallback::ByteFallback;

    use super::*;

    /// Bytes in which valid, truncated and impossible sequences are all likely.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            (any::<char>(), 1..4_usize).prop_map(|(c, cut)| {
                let mut bytes = c.to_string().into_bytes();
                bytes.truncate(cut);
                bytes
            }),
            vec(0x80..=0xff_u8, 0..4),
        ];
        vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn lossy_agrees_with_the_standard_library(bytes in bytes(), sizes in vec(0..6_usize, 1..8)) {
            let (mut lossy, mut out) = (LossyUtf8::default(), String::new());
            let mut rest = bytes.as_slice();
            for size in sizes.into_iter().cycle().chain([1]) {
                if rest.is_empty() { break }
                let (piece, after) = rest.split_at(size.clamp(1, rest.len()));
                lossy.push(piece, &mut out);
                lossy.push(&[], &mut out);
                rest = after;
            }
            lossy.flush(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn byte_runs_agree_with_the_byte_fallback_decoder(runs in vec(bytes(), 1..4)) {
            let (mut run, mut out, mut tokens) = (ByteRun::default(), String::new(), Vec::new());
            for bytes in runs {
                for byte in bytes {
                    run.push(byte, &mut out);
                    tokens.push(format!("<0x{byte:02X}>"));
                }
                run.flush(&mut out);
                out.push('|');
                tokens.push("|".to_owned());
            }
            prop_assert_eq!(out, ByteFallback::default().decode(tokens).unwrap());
        }
    }
}
