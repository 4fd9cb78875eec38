//! The memory that tokenizing a long prompt takes.

use genset_frontend::text::{EncodeLimits, TextTokenizer};

use crate::counting::{live_bytes, peak_bytes, reset_peak};
use crate::tokenizer;

/// The text's length in bytes; the library alone would take 150 to 300 times as many.
const TEXT_BYTES: usize = 1 << 19;

/// What one part of the text takes, for any length of text: some hundred times 16 KiB, and the word cache.
const PART_BYTES: usize = 12 << 20;

/// Returns the number of tokens of `text`, and the peak of memory beyond what was there before.
fn peak(tokenizer: &TextTokenizer, text: &str) -> (usize, usize) {
    let before = live_bytes();
    reset_peak();
    let prompt = tokenizer
        .encode_prompt(text, false, &EncodeLimits::NONE)
        .unwrap();
    let peak = usize::try_from(peak_bytes() - before).unwrap();
    (peak, prompt.ids.len())
}

#[test]
fn a_long_prompt_takes_its_tokens_and_one_part_of_it() {
    let spaces = format!("{}x", " ".repeat(200 << 10));
    for pattern in [
        "a",
        "e\u{301}",
        "aA1! ",
        &spaces,
        "the quick brown fox, 12345\n",
        "日本語、",
    ] {
        let text = pattern.repeat(TEXT_BYTES / pattern.len());
        let (peak, tokens) = peak(tokenizer(), &text);
        // The list of tokens grows by a quarter, and a normalized copy by at most half its bytes.
        let allowed = tokens * 5 + text.len() * 3 / 2 + PART_BYTES;
        assert!(
            peak <= allowed,
            "{:?}: {peak} bytes for {tokens} tokens",
            text.get(..6)
        );
    }
}
