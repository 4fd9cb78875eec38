//! Turns bytes into text when code points arrive in parts.
//!
//! There are two rules for bytes that are not UTF-8. A byte-level decoder replaces each maximal invalid
//! part by one U+FFFD, as [`String::from_utf8_lossy`] does: [`LossyUtf8`]. A byte-fallback decoder
//! checks a whole run of byte tokens, and replaces each of its bytes if the run is not UTF-8:
//! [`ByteRun`].

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// The beginning of a code point: at most three bytes that more bytes can still complete.
#[derive(Debug, Clone, Copy, Default)]
struct Fragment {
    bytes: [u8; 4],
    len: usize,
}

/// The result of adding a byte to a [`Fragment`]; the fragment is empty again unless `Incomplete`.
enum Step {
    Complete(char),
    Incomplete,
    /// The byte does not continue the fragment. It may begin another code point.
    Broken,
}

impl Fragment {
    fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn push(&mut self, byte: u8) -> Step {
        self.bytes[self.len] = byte;
        let len = std::mem::take(&mut self.len) + 1;
        match str::from_utf8(&self.bytes[..len]) {
            Ok(text) => text.chars().next().map_or(Step::Broken, Step::Complete),
            // No error length: valid so far, so shorter than four bytes.
            Err(error) if error.error_len().is_none() => {
                self.len = len;
                Step::Incomplete
            }
            Err(_) => Step::Broken,
        }
    }

    /// Replaces the fragment by `bytes`, if they are the beginning of a code point.
    fn try_start(&mut self, bytes: &[u8]) -> bool {
        let starts = str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none());
        if starts {
            self.bytes[..bytes.len()].copy_from_slice(bytes);
            self.len = bytes.len();
        }
        starts
    }
}

/// [`String::from_utf8_lossy`] for bytes that arrive in pieces: for every split into `push`es, the
/// outputs add up to its result for the whole.
#[derive(Debug, Default)]
pub(super) struct LossyUtf8 {
    fragment: Fragment,
}

impl LossyUtf8 {
    /// Whether it waits for the rest of a code point.
    pub(super) fn holds_back(&self) -> bool {
        !self.fragment.is_empty()
    }

    pub(super) fn push(&mut self, mut bytes: &[u8], out: &mut String) {
        while !self.fragment.is_empty() {
            let Some((&byte, rest)) = bytes.split_first() else {
                return;
            };
            match self.fragment.push(byte) {
                Step::Complete(c) => {
                    out.push(c);
                    bytes = rest;
                }
                Step::Incomplete => bytes = rest,
                Step::Broken => out.push(REPLACEMENT), // and `byte` is checked again
            }
        }
        let mut seen = 0;
        for chunk in bytes.utf8_chunks() {
            out.push_str(chunk.valid());
            let invalid = chunk.invalid();
            seen += chunk.valid().len() + invalid.len();
            let is_last = seen == bytes.len();
            let is_held = is_last && self.fragment.try_start(invalid);
            if !is_held && !invalid.is_empty() {
                out.push(REPLACEMENT);
            }
        }
    }

    /// Replaces an unfinished code point by U+FFFD. Called at the end of the bytes, and before text.
    pub(super) fn flush(&mut self, out: &mut String) {
        if !self.fragment.is_empty() {
            self.fragment = Fragment::default();
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
    /// The whole code points so far; meaningless once broken.
    text: String,
    fragment: Fragment,
    /// The number of bytes held back.
    held_bytes: usize,
    is_broken: bool,
}

impl ByteRun {
    /// Whether it waits for the end of the run.
    pub(super) fn holds_back(&self) -> bool {
        self.held_bytes > 0
    }

    pub(super) fn push(&mut self, byte: u8, out: &mut String) {
        self.held_bytes += 1;
        if !self.is_broken {
            match self.fragment.push(byte) {
                Step::Complete(c) => self.text.push(c),
                Step::Incomplete => {}
                Step::Broken => self.is_broken = true,
            }
        }
        if self.is_broken {
            self.replace_held(out);
        }
    }

    /// Ends the run.
    pub(super) fn flush(&mut self, out: &mut String) {
        if self.held_bytes == 0 && !self.is_broken {
            return;
        }
        if self.fragment.is_empty() && !self.is_broken {
            out.push_str(&self.text);
        } else {
            self.replace_held(out);
        }
        self.text.clear();
        self.fragment = Fragment::default();
        self.held_bytes = 0;
        self.is_broken = false;
    }

    fn replace_held(&mut self, out: &mut String) {
        out.extend(std::iter::repeat_n(REPLACEMENT, self.held_bytes));
        self.held_bytes = 0;
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

    #[test]
    fn a_code_point_comes_out_with_its_last_byte() {
        let (mut lossy, mut out) = (LossyUtf8::default(), String::new());
        for &byte in &"🦊".as_bytes()[..3] {
            lossy.push(&[byte], &mut out);
            assert_eq!(out, "");
        }
        lossy.push(&"🦊".as_bytes()[3..], &mut out);
        assert_eq!(out, "🦊");
    }

    #[test]
    fn a_truncated_end_is_one_replacement() {
        let (mut lossy, mut out) = (LossyUtf8::default(), String::new());
        lossy.push(&"🦊".as_bytes()[..3], &mut out);
        lossy.flush(&mut out);
        lossy.flush(&mut out);
        assert_eq!(out, "\u{fffd}");
    }
}
