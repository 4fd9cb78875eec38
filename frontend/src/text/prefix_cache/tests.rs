//! Compares the cache with the tokenizer alone, for every way in which texts can interact at a border.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tokenizers::{Error, Tokenizer};

use super::*;
use crate::text::detokenize::fixtures;

/// A tokenizer, and the added tokens for its texts besides `PIECES`.
struct Subject {
    name: &'static str,
    tokenizer: Tokenizer,
    added: Vec<String>,
}

impl Subject {
    fn new(name: &'static str, json: &Value) -> Self {
        let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
        let mut added: Vec<_> = tokenizer
            .get_added_tokens_decoder()
            .into_values()
            .map(|token| token.content)
            .collect();
        added.sort();
        Self {
            name,
            tokenizer,
            added,
        }
    }

    /// False if no added token is a border.
    fn has_cache(&self) -> bool {
        PrefixCache::try_new(&self.tokenizer, 1).is_some()
    }

    fn plain(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = self.tokenizer.encode_fast(text, false)?;
        Ok(encoding.get_ids().to_vec())
    }

    fn cache(&self, max_bytes: usize, min_window_bytes: usize) -> PrefixCache {
        PrefixCache::with_min_window(&self.tokenizer, max_bytes, min_window_bytes).unwrap()
    }

    /// Encodes with and without the cache. Returns how many tokens were known, and in how many parts the rest was encoded.
    fn check(&self, cache: &PrefixCache, text: &str) -> (usize, usize) {
        let parts = RefCell::new(0);
        let cached = cache.encode(None, text, |part, _| {
            *parts.borrow_mut() += 1;
            self.plain(part)
        });
        let cached = cached.unwrap();
        let name = self.name;
        assert_eq!(cached.ids, self.plain(text).unwrap(), "{name}: {text:?}");
        (cached.cached_tokens, parts.into_inner())
    }

    /// Turns `picks` into text; half of it is added tokens.
    fn text(&self, picks: &[(bool, Index)]) -> String {
        let piece = |(is_added, index): &(bool, Index)| {
            if *is_added {
                index.get(&self.added).as_str()
            } else {
                *index.get(PIECES)
            }
        };
        picks.iter().map(piece).collect()
    }
}

/// What may behave differently beside a border: spaces of every kind, marks that combine to the left, letters, halves of added
/// tokens, and text that normalizers turn into added tokens.
const PIECES: &[&str] = &[
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "▁",
    "a",
    "ab",
    "abc",
    "x",
    "B",
    "the",
    "the quick brown",
    " fox",
    "don't",
    "'s",
    "1",
    "12345",
    ".",
    "...",
    "é",
    "e\u{301}",
    "\u{301}",
    "\u{200d}",
    "🦊",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "🇨🇭",
    "日本語",
    "שָׁלוֹם",
    "مرحبا",
    "ﬁ",
    "ＡＢ",
    "＜|s|＞",
    "<",
    "<|",
    "|>",
    "<|s|",
    "s|>",
    "<|S|>",
    "user\n",
    "assistant\n",
];

pub(in crate::text) fn added(content: &str, settings: &[&str]) -> Value {
    let is = |name| settings.contains(&name);
    json!({
        "content": content, "special": is("special"), "normalized": is("normalized"),
        "single_word": is("single_word"), "lstrip": is("lstrip"), "rstrip": is("rstrip"),
    })
}

pub(in crate::text) fn with_tokens(
    mut json: Value,
    tokens: impl IntoIterator<Item = Value>,
) -> Value {
    let ids = json["model"]["vocab"].as_object().map_or(0, |vocab| {
        vocab.values().filter_map(Value::as_u64).max().unwrap_or(0) + 1
    });
    let added = json["added_tokens"].as_array_mut().unwrap();
    let used = added.iter().filter_map(|token| token["id"].as_u64());
    let first = used.max().map_or(ids, |id| ids.max(id + 1));
    for (id, mut token) in (first..).zip(tokens) {
        token["id"] = id.into();
        added.push(token);
    }
    json
}

/// Added tokens that interact with others and with neighbouring text in every way except spaces.
fn awkward(json: Value) -> Value {
    with_tokens(
        json,
        [
            added("<|s|>", &["special"]),
            added("<|w|>", &["special", "single_word"]),
            added("ab", &["single_word"]),
            added("<|s|>x", &["special"]),
            added("|><|", &[]),
            added("x", &["special"]),
            added("<|n|>", &["special", "normalized"]),
            added("é.", &["normalized", "lstrip"]),
            added("12", &["normalized", "single_word"]),
            added("<|l|>", &["special", "lstrip"]),
        ],
    )
}

/// With tokens that also include the spaces on their right. The library panics if these spaces contain another token's beginning,
/// so no token may begin with a space.
fn stripping(json: Value) -> Value {
    with_tokens(
        awkward(json),
        [
            added("<|r|>", &["special", "rstrip"]),
            added("<|lr|>", &["special", "lstrip", "rstrip"]),
            added("the", &["single_word", "lstrip", "rstrip"]),
            added("B", &["rstrip"]),
        ],
    )
}

/// With tokens that are spaces, or begin or end with spaces.
fn spacious(json: Value) -> Value {
    with_tokens(
        awkward(json),
        [
            added(" <|p|>", &["special"]),
            added("<|q|> ", &["special"]),
            added("  ", &[]),
            added("\n", &["special", "lstrip"]),
            added("\u{3000}", &["lstrip", "single_word"]),
        ],
    )
}

pub(in crate::text) fn with(mut json: Value, part: &str, value: Value) -> Value {
    json[part] = value;
    json
}

fn metaspace(prepend_scheme: &str, split: bool) -> Value {
    json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": split })
}

/// Tokenizers with every kind of normalizer, pre-tokenizer, model and post-processor that may treat a text's parts differently
/// from the whole.
pub(in crate::text) fn families() -> Vec<(&'static str, Value)> {
    let byte_level = fixtures::byte_level_json();
    let sentence_piece = fixtures::sentence_piece_json();
    let word_piece = fixtures::word_piece_json();
    let prefix_space = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
    let llama2 = json!({ "type": "Sequence", "normalizers": [
        { "type": "Prepend", "prepend": "▁" },
        { "type": "Replace", "pattern": { "String": " " }, "content": "▁" },
    ] });
    let bert = json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true });
    let begins_with_bos = json!({ "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<|bos|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<|bos|>": { "id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"] } } });
    let strip = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
    let nfc = json!({ "type": "NFC" });
    let nfkc =
        json!({ "type": "Sequence", "normalizers": [{ "type": "NFKC" }, { "type": "Lowercase" }] });
    let digits = json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Digits", "individual_digits": false }, { "type": "Punctuation", "behavior": "Contiguous" },
        metaspace("first", true),
    ] });
    let on_byte_level = |part, value| with(byte_level.clone(), part, value);
    let on_sentence_piece = |part, value| with(sentence_piece.clone(), part, value);
    vec![
        ("tiny-chat", fixtures::tiny_chat_json()),
        ("byte-level", byte_level.clone()),
        ("prefix space", on_byte_level("pre_tokenizer", prefix_space)),
        ("split and byte-level", fixtures::llama_3_json()),
        ("tiktoken", fixtures::tiktoken_json()),
        ("NFC", on_byte_level("normalizer", nfc)),
        ("NFKC", on_byte_level("normalizer", nfkc)),
        ("strip", on_byte_level("normalizer", strip)),
        ("template", on_byte_level("post_processor", begins_with_bos)),
        ("metaspace always", sentence_piece.clone()),
        (
            "metaspace first",
            on_sentence_piece("pre_tokenizer", metaspace("first", true)),
        ),
        (
            "metaspace never",
            on_sentence_piece("pre_tokenizer", metaspace("never", true)),
        ),
        (
            "whole metaspace",
            on_sentence_piece("pre_tokenizer", metaspace("first", false)),
        ),
        ("digits", on_sentence_piece("pre_tokenizer", digits)),
        (
            "prepend",
            with(
                on_sentence_piece("pre_tokenizer", Value::Null),
                "normalizer",
                llama2,
            ),
        ),
        ("word piece", word_piece.clone()),
        ("BERT", with(word_piece, "normalizer", bert)),
        ("unigram", fixtures::unigram_json()),
        (
            "whole unigram",
            with(
                fixtures::unigram_json(),
                "pre_tokenizer",
                metaspace("first", false),
            ),
        ),
    ]
}

/// Every family with its own added tokens, and with more.
static SUBJECTS: LazyLock<Vec<Subject>> = LazyLock::new(|| {
    let with_more = |(name, json): (_, Value)| {
        [json.clone(), stripping(json.clone()), spacious(json)]
            .map(|json| Subject::new(name, &json))
    };
    families()
        .into_iter()
        .flat_map(with_more)
        .filter(Subject::has_cache)
        .collect()
});

fn messages(count: Range<usize>) -> impl Strategy<Value = Vec<Vec<(bool, Index)>>> {
    let picks = prop::collection::vec((prop::bool::weighted(0.4), any::<Index>()), 0..10);
    prop::collection::vec(picks, count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(768))]

    /// Conversations grow turn by turn, in any order and with one cache, which is sometimes too small for them.
    #[test]
    fn tokens_are_those_of_the_tokenizer(
        conversations in prop::collection::vec(messages(1..6), 1..4),
        max_bytes in prop::sample::select(vec![1, 900, 2_000, 1 << 20]),
        min_window_bytes in prop::sample::select(vec![0, 1, 7, 30]),
        subject in any::<Index>(),
    ) {
        let subject = subject.get(&SUBJECTS);
        let cache = subject.cache(max_bytes, min_window_bytes);
        for _ in 0..2 {
            for messages in &conversations {
                let mut text = String::new();
                for message in messages {
                    text.push_str(&subject.text(message));
                    subject.check(&cache, &text);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Requests that share a cache too small for all of them.
    #[test]
    fn tokens_are_those_of_the_tokenizer_at_once(
        conversations in prop::collection::vec(messages(4..8), 4),
        max_bytes in prop::sample::select(vec![2_000, 1 << 20]),
        subject in any::<Index>(),
    ) {
        let subject = subject.get(&SUBJECTS);
        let cache = subject.cache(max_bytes, 4);
        std::thread::scope(|scope| {
            for first in 0..conversations.len() {
                let (cache, conversations) = (&cache, &conversations);
                scope.spawn(move || {
                    for messages in conversations.iter().cycle().skip(first).take(2 * conversations.len()) {
                        let text: String = messages.iter().map(|picks| subject.text(picks)).collect();
                        subject.check(cache, &text);
                    }
                });
            }
        });
    }
}

fn subject(name: &str) -> &'static Subject {
    SUBJECTS
        .iter()
        .find(|subject| subject.name == name)
        .unwrap()
}

fn turns(count: usize) -> String {
    let turn = |turn| {
        format!(
            "<|im_start|>user\nturn {turn}: {}<|im_end|>\n",
            "the fox ".repeat(30)
        )
    };
    (0..count).map(turn).collect()
}

#[test]
fn a_turn_costs_what_is_new_in_it() {
    let tiny_chat = subject("tiny-chat");
    let cache = tiny_chat.cache(1 << 20, MIN_WINDOW_BYTES);
    let mut before = 0;
    for count in 1..10 {
        let text = turns(count);
        let (cached_tokens, parts) = tiny_chat.check(&cache, &text);
        assert_eq!(cached_tokens, before, "{count}");
        // The new message, and the line break after it.
        assert_eq!(parts, 2, "{count}");
        before = tiny_chat.plain(text.trim_end()).unwrap().len();
    }
}

#[test]
fn what_begins_otherwise_shares_what_follows() {
    let tiny_chat = subject("tiny-chat");
    let cache = tiny_chat.cache(1 << 20, MIN_WINDOW_BYTES);
    tiny_chat.check(&cache, &turns(5));
    let other = turns(5).replacen("turn 0", "Turn 0", 1);
    let first = tiny_chat.plain(&other[..other.find("<|im_end|>").unwrap()]);
    let (cached_tokens, parts) = tiny_chat.check(&cache, &other);
    let all = tiny_chat.plain(other.trim_end()).unwrap().len();
    assert_eq!((cached_tokens, parts), (all - first.unwrap().len() - 1, 2));
}

#[test]
fn windows_overlap_by_a_border_and_no_more() {
    let tiny_chat = subject("tiny-chat");
    let cache = tiny_chat.cache(1, 10);
    let text = |text: &str| {
        cache
            .borders
            .windows(text)
            .map(|window| window.text().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        text("ab<|im_start|>c<|im_end|>\n<|im_start|>d"),
        [
            "ab<|im_start|>",
            "<|im_start|>c<|im_end|>",
            "<|im_end|>\n<|im_start|>",
            "<|im_start|>d"
        ]
    );
    assert_eq!(text("ab<|im_end|>"), ["ab<|im_end|>"]);
    assert_eq!(text("ab"), ["ab"]);
    assert_eq!(text(""), [""]);
}

#[test]
fn tokens_other_than_expected_are_not_trusted() {
    let tiny_chat = subject("tiny-chat");
    let cache = tiny_chat.cache(1 << 20, 0);
    let text = "a<|im_start|>b<|im_end|>c";
    let ids = |part: &str, _| Ok::<_, Infallible>(vec![if part == text { 7 } else { 8 }]);
    for _ in 0..2 {
        let encoded = cache.encode(None, text, ids).unwrap();
        let expected = EncodedPrompt {
            ids: vec![7],
            cached_tokens: 0,
        };
        assert_eq!(encoded, expected);
    }
}

/// So that clients cannot find out what others send.
#[test]
fn what_is_known_under_one_salt_is_not_under_another() {
    let tiny_chat = subject("tiny-chat");
    let cache = tiny_chat.cache(1 << 20, 0);
    let text = "a<|im_start|>b<|im_end|>c";
    let known = |salt| {
        let encoded = cache.encode(salt, text, |part, _| tiny_chat.plain(part));
        encoded.unwrap().cached_tokens
    };
    let salts = [None, Some("a"), Some("b")];
    assert_eq!(salts.map(known), [0; 3]);
    assert!(salts.map(known).iter().all(|tokens| *tokens > 0));
}

#[test]
fn errors_are_the_tokenizers_and_nothing_wrong_is_kept() {
    let tiny_chat = subject("tiny-chat");
    let cache = tiny_chat.cache(1 << 20, 0);
    let text = "a<|im_start|>b<|im_end|>c";
    assert_eq!(cache.encode(None, text, |_, _| Err("no")), Err("no"));
    let (cached_tokens, _) = tiny_chat.check(&cache, text);
    assert_eq!(cached_tokens, 0);
}

#[test]
fn there_is_no_cache_where_it_could_not_be_exact() {
    let has_cache = |json: &Value, max_bytes| {
        let tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
        PrefixCache::try_new(&tokenizer, max_bytes).is_some()
    };
    assert!(has_cache(&fixtures::tiny_chat_json(), 1));
    assert!(!has_cache(&fixtures::tiny_chat_json(), 0));

    let mut random = fixtures::tiny_chat_json();
    random["model"]["dropout"] = 0.1.into();
    assert!(!has_cache(&random, 1 << 20));

    let bare = with(fixtures::tiny_chat_json(), "added_tokens", json!([]));
    assert!(!has_cache(&bare, 1 << 20));
    for settings in [["special", "single_word"], ["special", "normalized"]] {
        let none_is_border = with_tokens(bare.clone(), [added("<|x|>", &settings)]);
        assert!(!has_cache(&none_is_border, 1 << 20));
    }

    let twice = json!({ "type": "TemplateProcessing", "special_tokens": {},
        "single": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }] });
    assert!(!has_cache(
        &with(fixtures::tiny_chat_json(), "post_processor", twice),
        1 << 20
    ));
}
