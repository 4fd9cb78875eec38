//! Bounds how much longer a text may become through the steps of a `tokenizer.json` before it is split into tokens. One line of
//! that file can replace each letter by a page.
//!
//! [`check`] refuses files whose rules could lengthen a text more than any real file does. Below that, normalization is bounded:
//! each part by [`growth`], and the whole text by [`most_bytes`].

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use regex_automata::util::syntax;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::normalizers::NormalizerWrapper;

use super::tokenizer::TokenizerError;

/// The largest factor by which all steps together may lengthen a text. ALBERT's reach about 700, because Unicode forms turn one
/// three-byte letter into 33 bytes.
const MAX_GROWTH: usize = 4096;
/// The same factor for decoding a token: the token table stores all decoded tokens.
const MAX_DECODED_GROWTH: usize = 8;
/// The largest normalized size of one added token, and of all: they are normalized when the file is loaded.
const ADDED_TOKEN_BYTES: usize = 32 << 20;
const ADDED_TOKENS_BYTES: usize = 256 << 20;
/// The most bytes produced at once: from a part that can be cut, and from one that cannot.
const WINDOW_BYTES: usize = 1 << 20;
const WHOLE_BYTES: usize = 32 << 20;
/// A normalized text is at most this many times as long as the original, plus a constant.
const USUAL_GROWTH: usize = 8;
const ANY_BYTES: usize = 1 << 20;

/// The parts of a `tokenizer.json` that determine how long texts become.
#[derive(Deserialize)]
struct Steps {
    normalizer: Option<Value>,
    decoder: Option<Value>,
    added_tokens: Option<Vec<Added>>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
}

/// Refuses a `tokenizer.json` whose steps could make a text far longer.
///
/// # Errors
/// [`TokenizerError::Load`].
pub(super) fn check(json: &[u8]) -> Result<(), TokenizerError> {
    let refused = |reason: String| TokenizerError::Load {
        source: reason.into(),
    };
    let steps: Steps = serde_json::from_slice(json).map_err(|error| TokenizerError::Load {
        source: error.into(),
    })?;
    let normalized = steps.normalizer.as_ref().map_or(1, growth);
    if normalized > MAX_GROWTH {
        return Err(refused(format!(
            "its normalizer may make a text more than {MAX_GROWTH} times as long"
        )));
    }
    if steps.decoder.as_ref().map_or(1, growth) > MAX_DECODED_GROWTH {
        return Err(refused(format!(
            "its decoder may make a token more than {MAX_DECODED_GROWTH} times as long"
        )));
    }
    let added = steps.added_tokens.unwrap_or_default();
    let lengths = added
        .iter()
        .map(|token| token.content.len().saturating_mul(normalized));
    let longest = lengths.clone().max().unwrap_or(0);
    let all = lengths.fold(0, usize::saturating_add);
    if longest > ADDED_TOKEN_BYTES || all > ADDED_TOKENS_BYTES {
        return Err(refused("its added tokens are too long".to_owned()));
    }
    Ok(())
}

/// Returns the largest factor by which `normalizer` lengthens a text.
pub(super) fn of_normalizer(normalizer: Option<&NormalizerWrapper>) -> usize {
    let steps = normalizer.map(serde_json::to_value).transpose();
    steps.map_or(MAX_GROWTH, |steps| steps.as_ref().map_or(1, growth))
}

/// Returns the most bytes to normalize at once of a text that can be cut.
pub(super) fn window_bytes(growth: usize) -> usize {
    (WINDOW_BYTES / growth.max(1)).max(1)
}

/// Returns the most bytes to normalize at once of a text that cannot be cut.
pub(super) fn whole_bytes(growth: usize) -> usize {
    (WHOLE_BYTES / growth.max(1)).max(1)
}

/// Returns the most bytes that a text of this length may become.
pub(super) fn most_bytes(text_bytes: usize) -> usize {
    text_bytes
        .saturating_mul(USUAL_GROWTH)
        .saturating_add(ANY_BYTES)
}

/// Returns the largest factor by which these steps, one after another, lengthen a text.
fn growth(steps: &Value) -> usize {
    match steps {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 1,
        Value::Array(items) => product(items.iter().map(growth)),
        Value::Object(entries) => {
            of_step(entries).saturating_mul(product(entries.values().map(growth)))
        }
    }
}

fn product(factors: impl Iterator<Item = usize>) -> usize {
    factors.fold(1, usize::saturating_mul)
}

/// Returns a step's factor. Goes by its fields rather than its name, which old files lack.
fn of_step(step: &Map<String, Value>) -> usize {
    let text = |name: &str| step.get(name).and_then(Value::as_str);
    if let (Some(pattern), Some(content)) = (step.get("pattern"), text("content")) {
        return match pattern.get("String").and_then(Value::as_str) {
            Some(literal) if !literal.is_empty() => content.len().div_ceil(literal.len()).max(1),
            None if takes_some(pattern) => content.len().max(1),
            // An expression may match the empty text, which is everywhere.
            Some(_) | None => content.len().saturating_add(1),
        };
    }
    if let Some(prepended) = text("prepend") {
        return prepended.len().saturating_add(1);
    }
    if let Some(charsmap) = text("precompiled_charsmap") {
        return longest_mapped(charsmap);
    }
    match text("type") {
        Some("NFC" | "NFD") => 3,
        Some("NFKC" | "NFKD") => 11,
        Some("Lowercase" | "ByteLevel") => 2,
        Some("Bert" | "BertNormalizer") => 12,
        Some(_) | None => 1,
    }
}

/// Whether the pattern is an expression that never matches the empty text. False if libraries may read it differently.
fn takes_some(pattern: &Value) -> bool {
    let Some(expression) = pattern.get("Regex").and_then(Value::as_str) else {
        return false;
    };
    let parsed = syntax::parse(expression).ok();
    let shortest = parsed.and_then(|parsed| parsed.properties().minimum_len());
    !expression.contains("(?") && shortest.is_some_and(|bytes| bytes > 0)
}

/// Returns the most bytes to which SentencePiece's table maps a letter. Its texts are stored one after another, behind a tree.
fn longest_mapped(charsmap: &str) -> usize {
    let Ok(table) = STANDARD.decode(charsmap) else {
        return usize::MAX;
    };
    let Some((tree_bytes, rest)) = table.split_first_chunk() else {
        return 1;
    };
    let tree_bytes = usize::try_from(u32::from_le_bytes(*tree_bytes)).unwrap_or(usize::MAX);
    let texts = rest.get(tree_bytes..).unwrap_or_default();
    let lengths = texts.split(|byte| *byte == 0).map(<[u8]>::len);
    lengths.max().unwrap_or(0).max(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::detokenize::fixtures;
    use crate::text::{EncodeLimits, TextTokenizer};

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn literal(pattern: &str, content: &str) -> Value {
        replace(json!({"String": pattern}), content)
    }

    fn sequence(steps: &[Value]) -> Value {
        json!({"type": "Sequence", "normalizers": steps})
    }

    fn load(part: &str, value: Value) -> Result<TextTokenizer, TokenizerError> {
        let mut json = fixtures::tiny_chat_json();
        json[part] = value;
        TextTokenizer::from_bytes(json.to_string().as_bytes())
    }

    /// A table with an empty tree.
    fn charsmap(texts: &str) -> Value {
        let table = [&8_u32.to_le_bytes()[..], &[0; 8], texts.as_bytes()].concat();
        json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(table)})
    }

    #[test]
    fn steps_of_known_models_are_far_from_the_limit() {
        let spaces = replace(json!({"Regex": " {2,}"}), "▁");
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        let map = charsmap(&format!("a\0{}\0b\0", "c".repeat(33)));
        let kind = |name: &str| json!({"type": name});
        for (steps, expected) in [
            (literal(" ", "▁"), 3),
            (sequence(&[prepend, literal(" ", "▁")]), 12),
            (sequence(&[map.clone(), spaces.clone()]), 99),
            (replace(json!({"Regex": " *"}), "▁"), 4),
            (replace(json!({"Regex": "\\b"}), "▁"), 4),
            (replace(json!({"Regex": "(?=a)"}), "▁"), 4),
            (
                sequence(&[
                    literal("``", "\""),
                    literal("''", "\""),
                    kind("NFKD"),
                    kind("StripAccents"),
                    kind("Lowercase"),
                    map,
                    replace(json!({"Regex": " {2,}"}), " "),
                ]),
                726,
            ),
            (kind("BertNormalizer"), 12),
        ] {
            assert_eq!(growth(&steps), expected, "{steps}");
            assert!(expected <= MAX_GROWTH);
        }
        assert!(load("normalizer", literal(" ", "▁")).is_ok());
    }

    #[test]
    fn files_that_make_pages_of_letters_are_refused() {
        let page = "x".repeat(5000);
        let hundred = "a".repeat(100);
        for (part, value) in [
            ("normalizer", literal("a", &page)),
            ("normalizer", replace(json!({"Regex": ""}), &page)),
            (
                "normalizer",
                sequence(&[literal("a", &hundred), literal("a", &hundred)]),
            ),
            (
                "normalizer",
                json!({"type": "Prepend", "prepend": page.clone()}),
            ),
            ("normalizer", charsmap(&page)),
            // The form of old files.
            (
                "normalizer",
                json!({"pattern": {"String": "a"}, "content": page.clone()}),
            ),
            (
                "decoder",
                json!({"type": "Sequence", "decoders": [literal("a", &page)]}),
            ),
        ] {
            let start: String = value.to_string().chars().take(100).collect();
            let error = load(part, value).expect_err("too much");
            assert!(matches!(error, TokenizerError::Load { .. }), "{start}");
        }
        let long = json!([{"id": 0, "content": "a".repeat(33 << 20), "special": true, "normalized": true,
            "single_word": false, "lstrip": false, "rstrip": false}]);
        assert!(load("added_tokens", long).is_err());
    }

    /// Within the limit for files, but more growth than any real file causes.
    #[test]
    fn a_text_does_not_become_far_longer() {
        let tokenizer = load("normalizer", literal("a", &"b".repeat(100))).unwrap();
        let encode = |text: &str| tokenizer.encode_prompt(text, false, &EncodeLimits::NONE);
        assert!(encode(&"a".repeat(1000)).is_ok());
        let error = encode(&"a".repeat(30_000)).unwrap_err();
        assert!(matches!(error, TokenizerError::TooLong { .. }), "{error}");
        assert!(encode(&"cde ".repeat(100_000)).is_ok());
        // A tokenizer that takes texts whole.
        let mut json = fixtures::tiny_chat_json();
        json["normalizer"] = literal("a", &"b".repeat(100));
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "UnicodeScripts"},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        ]});
        let whole = TextTokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        let encode = |text: &str| whole.encode_prompt(text, false, &EncodeLimits::NONE);
        assert!(encode(&"a".repeat(1000)).is_ok());
        let error = encode(&"a".repeat(30_000)).unwrap_err();
        assert!(matches!(error, TokenizerError::TooLong { .. }), "{error}");
    }
}
