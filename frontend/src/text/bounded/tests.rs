//! Compares long texts' tokens with the library's, for every kind of tokenizer, with parts so small that every cut occurs.

mod charsmap;

use std::cell::Cell;
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};

use self::charsmap::precompiled;
use super::*;
use crate::text::TextTokenizer;
use crate::text::detokenize::fixtures::{self, PIECES};
use crate::text::prefix_cache::tests::{added, families, with, with_tokens};

struct Subject {
    name: String,
    tokenizer: Tokenizer,
    encoder: BoundedEncoder,
    /// The same encoder with a word cache, filled by earlier texts.
    remembering: BoundedEncoder,
    added: Vec<String>,
}

/// Word expressions of other models: Qwen 2, and `o200k_base` of GPT-4o and gpt-oss.
const QWEN_2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn regex(pattern: &str, behavior: &str, invert: bool) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": behavior, "invert": invert })
}

fn sequence(steps: &[Value]) -> Value {
    json!({ "type": "Sequence", "pretokenizers": steps })
}

fn normalizers(parts: &[Value]) -> Value {
    json!({ "type": "Sequence", "normalizers": parts })
}

/// Merges across every border, for texts that are one word.
fn without_words() -> Value {
    let texts = fixtures::corpus().map(|text| text.replace(' ', "▁").repeat(3));
    let trainer = BpeTrainer::builder()
        .vocab_size(420)
        .show_progress(false)
        .build();
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer
        .train(&mut TrainerWrapper::from(trainer), texts)
        .unwrap();
    let mut json = serde_json::to_value(&tokenizer).unwrap();
    json["normalizer"] = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for token in ["<unk>", "the▁quick▁brown", "▁▁▁▁▁▁"] {
        vocab.insert(token.to_owned(), vocab.len().into());
    }
    json["model"]["unk_token"] = "<unk>".into();
    with_tokens(
        json,
        [added("<|s|>", &["special"]), added("▁▁x", &["normalized"])],
    )
}

fn pre_tokenizers() -> Vec<Value> {
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let mut all = vec![
        sequence(&[regex(QWEN_2_WORDS, "Isolated", false), bytes.clone()]),
        sequence(&[regex(O200K_WORDS, "Removed", true), bytes.clone()]),
        sequence(&[
            regex(r"\p{N}{1,3}", "Isolated", false),
            regex("[一-龥぀-ゟ゠-ヿ]+", "Isolated", false),
            regex(r"\s?\p{L}+|\s+(?!\S)|\s+", "Isolated", false),
            bytes.clone(),
        ]),
        sequence(&[
            json!({ "type": "Punctuation", "behavior": "Contiguous" }),
            json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true }),
            json!({ "type": "Digits", "individual_digits": true }),
        ]),
        sequence(&[
            json!({ "type": "WhitespaceSplit" }),
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true }),
            bytes.clone(),
        ]),
        sequence(&[json!({ "type": "Whitespace" }), bytes.clone()]),
        sequence(&[json!({ "type": "BertPreTokenizer" }), bytes.clone()]),
        sequence(&[
            json!({ "type": "CharDelimiterSplit", "delimiter": "a" }),
            bytes.clone(),
        ]),
        bytes.clone(),
    ];
    for behavior in [
        "Isolated",
        "Removed",
        "Contiguous",
        "MergedWithPrevious",
        "MergedWithNext",
    ] {
        for invert in [false, true] {
            all.push(sequence(&[
                regex(r"\s|the|e*", behavior, invert),
                bytes.clone(),
            ]));
        }
        let punctuation = json!({ "type": "Punctuation", "behavior": behavior });
        all.push(sequence(&[punctuation, bytes.clone()]));
        let literal = json!({ "type": "Split", "pattern": { "String": "  " }, "behavior": behavior, "invert": false });
        all.push(sequence(&[literal, bytes.clone()]));
    }
    all
}

fn with_normalizers() -> Vec<(&'static str, Value)> {
    let part = |name: &str| json!({ "type": name });
    let strip = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let spaces = json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": "▁" });
    let bert = json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": true, "lowercase": true });
    let table = precompiled(&[
        ("\t", " "),
        ("\n", " "),
        ("\u{3000}", " "),
        ("\u{200b}", ""),
        ("\0", ""),
        ("ﬁ", "fi"),
        ("é", "e"),
        ("e\u{301}", "é"),
        ("ﾞ", "\u{3099}"),
        ("ｶﾞ", "ガ"),
        ("\u{1100}\u{1161}", "가"),
        ("Ａ", "A"),
        ("👍🏽", "👍"),
    ]);
    let doubled = json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": " " });
    let strips_right = json!({ "type": "Strip", "strip_left": false, "strip_right": true });
    vec![
        ("NFD", part("NFD")),
        ("NFKD", part("NFKD")),
        (
            "Nmt",
            normalizers(&[part("Nmt"), part("NFKC"), strip.clone(), spaces.clone()]),
        ),
        (
            "accents",
            normalizers(&[part("NFD"), part("Lowercase"), part("StripAccents")]),
        ),
        ("strips", strip),
        ("bert", bert),
        ("XLM-R", normalizers(&[table.clone(), doubled])),
        ("T5", normalizers(&[table, strips_right, spaces.clone()])),
        (
            "replaces",
            normalizers(&[
                replace("the", "▁"),
                replace(" ", "▁"),
                json!({ "type": "Prepend", "prepend": "▁" }),
                part("NFC"),
            ]),
        ),
    ]
}

fn tokenizers() -> Vec<(String, Value)> {
    let mut all: Vec<_> = families()
        .into_iter()
        .map(|(name, json)| (name.to_owned(), json))
        .collect();
    all.push(("Llama 2".to_owned(), fixtures::llama_2_json()));
    all.push(("Gemma".to_owned(), fixtures::gemma_json()));
    all.push(("without words".to_owned(), without_words()));
    let fused = with(without_words(), "pre_tokenizer", json!(null));
    for setting in ["fuse_unk", "ignore_merges"] {
        let mut json = fused.clone();
        json["model"][setting] = true.into();
        all.push((setting.to_owned(), json));
    }
    let bytes = fixtures::llama_3_json();
    for pre_tokenizer in pre_tokenizers() {
        let name = pre_tokenizer.to_string();
        all.push((name, with(bytes.clone(), "pre_tokenizer", pre_tokenizer)));
    }
    for (name, normalizer) in with_normalizers() {
        all.push((
            format!("bytes, {name}"),
            with(bytes.clone(), "normalizer", normalizer.clone()),
        ));
        all.push((
            format!("no words, {name}"),
            with(without_words(), "normalizer", normalizer),
        ));
    }
    all
}

/// With tokens that include the spaces beside them, are parts of each other, or are found in normalized text.
fn with_more_tokens(json: Value) -> Value {
    with_tokens(
        json,
        [
            added("<|m|>", &["special"]),
            added("<|m|>x", &["special"]),
            added("|><|", &[]),
            added("<|l|>", &["special", "lstrip"]),
            added("<|r|>", &["special", "rstrip"]),
            added("<|lr|>", &["lstrip", "rstrip"]),
            added("<|n|>", &["special", "normalized"]),
            added("é.", &["normalized", "lstrip"]),
            added("B", &["normalized"]),
        ],
    )
}

fn tokenizer(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string()).unwrap()
}

fn subjects() -> Vec<Result<Subject, String>> {
    let both = |(name, json): (String, Value)| {
        [
            (name.clone(), json.clone()),
            (format!("{name}, more tokens"), with_more_tokens(json)),
        ]
    };
    let subject = |(name, json): (String, Value)| {
        let tokenizer = tokenizer(&json);
        let encoder = BoundedEncoder::try_new(&tokenizer);
        let remembering = BoundedEncoder::try_new(&tokenizer);
        let (Some(encoder), Some(mut remembering)) = (encoder, remembering) else {
            return Err(name);
        };
        remembering.remember_words(&tokenizer, 64 << 10);
        let added = tokenizer.get_added_tokens_decoder().into_values();
        let mut added: Vec<_> = added.map(|token| token.content).collect();
        added.sort();
        Ok(Subject {
            name,
            tokenizer,
            encoder,
            remembering,
            added,
        })
    };
    tokenizers()
        .into_iter()
        .flat_map(both)
        .map(subject)
        .collect()
}

static SUBJECTS: LazyLock<(Vec<Subject>, Vec<String>)> = LazyLock::new(|| {
    let (mut known, mut unknown) = (Vec::new(), Vec::new());
    for subject in subjects() {
        match subject {
            Ok(subject) => known.push(subject),
            Err(name) => unknown.push(name),
        }
    }
    (known, unknown)
});

/// What may behave differently beside a cut: runs of every kind, beside pieces that are hard to split.
const MORE: &[&str] = &[
    "a",
    "ab",
    "the",
    " the quick",
    "THE",
    "Aa",
    "'s",
    "12",
    "3456",
    "...",
    "!?",
    "é.",
    "B",
    "B ",
    "x",
    "▁▁x",
    "<|m|>",
    "<|s|>",
    "<|n|>",
    "<",
    "|",
    "\u{316}",
    "\u{1161}",
    "\u{1100}",
    "\u{11a8}",
    "が",
    "ﾞ",
    "ｶ",
    "\u{3000}",
    "ⅷ",
    "ǅ",
    "İ",
    "ß",
    "\u{94d}",
    "क",
    "\u{c}",
];

/// A part of a text: a piece, repeated.
fn part() -> impl Strategy<Value = (u8, Index, usize)> {
    let times = prop_oneof![4 => Just(1_usize), 1 => 2..5_usize, 1 => 5..60_usize];
    (0..4_u8, any::<Index>(), times)
}

fn text(subject: &Subject, parts: &[(u8, Index, usize)]) -> String {
    let part = |(kind, index, times): &(u8, Index, usize)| {
        let piece = match kind {
            0 if !subject.added.is_empty() => index.get(&subject.added).as_str(),
            0 | 1 => *index.get(PIECES),
            _ => *index.get(MORE),
        };
        piece.repeat(*times)
    };
    parts.iter().map(part).collect()
}

fn check(subject: &Subject, text: &str, window: usize) {
    let sizes = Sizes {
        window,
        whole: 1 << 20,
    };
    for special in [false, true] {
        let expected = subject.tokenizer.encode_fast(text, special).unwrap();
        for encoder in [&subject.encoder, &subject.remembering] {
            let limits = &EncodeLimits::NONE;
            let ids = encoder.encode_in(sizes, &subject.tokenizer, text, special, limits);
            assert_eq!(
                ids.unwrap(),
                expected.get_ids(),
                "{}, {window}: {text:?}",
                subject.name
            );
        }
    }
}

proptest! {
    #[test]
    fn tokens_are_those_of_the_library(
        parts in prop::collection::vec(part(), 0..12),
        window in prop::sample::select(vec![1, 2, 3, 4, 6, 9, 16, 40, 100]),
        subject in any::<Index>(),
    ) {
        let subject = subject.get(&SUBJECTS.0);
        check(subject, &text(subject, &parts), window);
    }
}

#[test]
fn every_tokenizer_takes_every_piece_in_parts() {
    let all: String = PIECES.iter().chain(MORE).copied().collect();
    let runs: String = PIECES
        .iter()
        .chain(MORE)
        .map(|piece| piece.repeat(9))
        .collect();
    for subject in &SUBJECTS.0 {
        check(subject, &all, 1);
        check(subject, &all, 5);
        check(subject, &runs, 40);
    }
}

#[test]
fn what_cannot_be_done_in_parts_is_known() {
    // Where the library sees the beginning of a changed text is not modelled.
    assert_eq!(SUBJECTS.1, ["whole unigram", "whole unigram, more tokens"]);
    let is_bounded = |json: &Value| BoundedEncoder::try_new(&tokenizer(json)).is_some();
    let json = fixtures::tiny_chat_json();
    assert!(is_bounded(&json));
    for (part, value) in [
        ("pre_tokenizer", json!({ "type": "UnicodeScripts" })),
        (
            "pre_tokenizer",
            json!({ "type": "FixedLength", "length": 5 }),
        ),
        (
            "normalizer",
            json!({ "type": "Replace", "pattern": { "Regex": "a.*b" }, "content": "c" }),
        ),
        (
            "added_tokens",
            json!([with(added("x", &["single_word"]), "id", json!(0))]),
        ),
    ] {
        assert!(
            !is_bounded(&with(json.clone(), part, value.clone())),
            "{value}"
        );
    }
}

/// Limits apply to texts of a tokenizer that takes them whole, and to long words without a known cut.
#[test]
fn what_cannot_be_cut_is_limited() {
    let encode = |json: &Value, text: &str| {
        let tokenizer = TextTokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        tokenizer.encode_prompt(text, false, &EncodeLimits::NONE)
    };
    let scripts = json!({ "type": "Sequence", "pretokenizers": [{ "type": "UnicodeScripts" }, { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }] });
    let whole = with(fixtures::tiny_chat_json(), "pre_tokenizer", scripts);
    assert!(encode(&whole, &"one two ".repeat(WHOLE_BYTES / 8)).is_ok());
    let error = encode(&whole, &"one two ".repeat(WHOLE_BYTES / 8 + 1)).unwrap_err();
    assert!(
        matches!(
            error,
            TokenizerError::TooLong {
                max_bytes: WHOLE_BYTES,
                ..
            }
        ),
        "{error}"
    );

    // An expression that looks around only at its end, as most do, needs no limit.
    let tiny_chat = fixtures::tiny_chat_json();
    assert!(encode(&tiny_chat, &" ".repeat(WHOLE_BYTES + 1)).is_ok());
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let looks = sequence(&[regex(r"\s+(?!\S)|\S+|\s", "Isolated", false), bytes]);
    let looks = with(tiny_chat, "pre_tokenizer", looks);
    assert!(encode(&looks, &" ".repeat(WHOLE_BYTES)).is_ok());
    let error = encode(&looks, &" ".repeat(WHOLE_BYTES + 1)).unwrap_err();
    assert!(matches!(error, TokenizerError::TooLong { .. }), "{error}");

    let unigram = fixtures::unigram_json();
    assert!(encode(&unigram, &"one two ".repeat(WHOLE_BYTES / 4)).is_ok());
    let error = encode(&unigram, &"one".repeat(WHOLE_BYTES / 3 + 1)).unwrap_err();
    assert!(matches!(error, TokenizerError::TooLong { .. }), "{error}");
}

#[test]
fn limits_end_the_work_between_parts() {
    let json = fixtures::tiny_chat_json().to_string();
    let tokenizer = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
    for text in [
        "one two ".repeat(WINDOW_BYTES),
        "a".repeat(WINDOW_BYTES * 8),
    ] {
        let limits = EncodeLimits {
            max_tokens: 100,
            ..EncodeLimits::NONE
        };
        let error = tokenizer.encode_prompt(&text, false, &limits).unwrap_err();
        // A word is encoded in one piece, a long one in windows.
        assert!(
            matches!(
                error,
                TokenizerError::TooManyTokens {
                    at_least: 101..=WINDOW_BYTES,
                    max_tokens: 100
                }
            ),
            "{error}"
        );

        let asked = Cell::new(0);
        let should_stop = || asked.replace(asked.get() + 1) == 3;
        let limits = EncodeLimits {
            should_stop: &should_stop,
            ..EncodeLimits::NONE
        };
        let error = tokenizer.encode_prompt(&text, false, &limits).unwrap_err();
        assert!(matches!(error, TokenizerError::Stopped), "{error}");
        assert_eq!(asked.get(), 4);
    }
}

/// The count continues across the borders at which known prompts end.
#[test]
fn limits_count_the_tokens_of_all_parts() {
    let json = fixtures::tiny_chat_json().to_string();
    let tokenizer = TextTokenizer::from_bytes(json.as_bytes())
        .unwrap()
        .with_cache(1 << 20);
    let text = format!("{}<|im_end|>", "one two three ".repeat(20)).repeat(4);
    let tokens = tokenizer.encode(&text, false).unwrap().len();
    for _ in 0..2 {
        for (max_tokens, is_ok) in [
            (tokens, true),
            (tokens - 1, false),
            (tokens / 2, false),
            (0, false),
        ] {
            let limits = EncodeLimits {
                max_tokens,
                ..EncodeLimits::NONE
            };
            match tokenizer.encode_prompt(&text, false, &limits) {
                Ok(prompt) => assert!(is_ok && prompt.ids.len() == tokens),
                Err(TokenizerError::TooManyTokens {
                    at_least,
                    max_tokens: said,
                }) => {
                    assert!(
                        !is_ok && said == max_tokens && at_least > max_tokens && at_least <= tokens
                    );
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}
