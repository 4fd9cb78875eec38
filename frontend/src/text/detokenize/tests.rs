//! The law, for every family of decoders: outputs add up to the decoding of the whole.

use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

type Shared = LazyLock<Arc<TextTokenizer>>;

static BYTE_LEVEL: Shared = LazyLock::new(fixtures::byte_level);
static TIKTOKEN: Shared = LazyLock::new(fixtures::tiktoken);
static SENTENCE_PIECE: Shared = LazyLock::new(fixtures::sentence_piece);
static WORD_PIECE: Shared = LazyLock::new(fixtures::word_piece);

/// Every token's output by itself, and what `finish` added.
fn outputs(tokenizer: &Arc<TextTokenizer>, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip_special);
    let push = |&id: &u32| {
        let mut out = String::new();
        detokenizer.push(id, &mut out);
        out
    };
    let mut outputs: Vec<String> = ids.iter().map(push).collect();
    let mut last = String::new();
    detokenizer.finish(&mut last);
    outputs.push(last);
    outputs
}

fn assert_law(tokenizer: &Arc<TextTokenizer>, ids: &[u32]) {
    for skip_special in [false, true] {
        let whole = tokenizer.decode_all(ids, skip_special).unwrap();
        assert_eq!(
            outputs(tokenizer, ids, skip_special).concat(),
            whole,
            "{ids:?}"
        );
    }
}

/// Ids of any kind, a few of them unknown.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    vec(0..700_u32, 0..40)
}

/// Text of any kind, rich in what splits badly.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-z]{1,6}[ .,!?']{0,2}",
        any::<String>(),
        prop::sample::select(vec![
            " ",
            "  ",
            "\n",
            "🦊",
            "👩‍👩‍👧‍👦",
            "👍🏽",
            "e\u{301}",
            "שָׁלוֹם ",
            "مرحبا",
            "日本語",
            "do not",
            " n't",
            " ' ",
            "<0xE2>",
            "▁",
            "\u{fffd}",
            "<|eos|>",
            "<tool>",
            "é ☕",
        ])
        .prop_map(str::to_owned),
    ];
    vec(part, 0..8).prop_map(|parts| parts.concat())
}

/// An encoding with its end cut off and its middle disturbed.
fn damaged(tokenizer: &TextTokenizer, text: &str, cut: usize, extra: &[u32]) -> Vec<u32> {
    let mut ids = tokenizer.encode(text, false).unwrap();
    ids.truncate(ids.len().saturating_sub(cut));
    let middle = ids.len() / 2;
    ids.splice(middle..middle, extra.iter().copied());
    ids
}

proptest! {
    #[test]
    fn any_ids(ids in ids()) {
        for tokenizer in [&BYTE_LEVEL, &TIKTOKEN, &SENTENCE_PIECE, &WORD_PIECE] {
            assert_law(tokenizer, &ids);
        }
    }

    /// Runs of single bytes, whole, cut and mixed with other tokens.
    #[test]
    fn any_bytes(text in text(), cut in 0..4_usize, noise in vec((0..80_usize, 0..700_u32), 0..3)) {
        for tokenizer in [&BYTE_LEVEL, &SENTENCE_PIECE] {
            let id_of = |&byte: &u8| (0..).find(|&id| tokenizer.token_bytes(id) == [byte]).unwrap();
            let bytes = &text.as_bytes()[..text.len().saturating_sub(cut)];
            let mut ids: Vec<u32> = bytes.iter().map(id_of).collect();
            for &(at, id) in &noise {
                ids.insert(at.min(ids.len()), id);
            }
            assert_law(tokenizer, &ids);
        }
    }

    #[test]
    fn any_text(text in text(), cut in 0..4_usize, extra in vec(0..700_u32, 0..3)) {
        for tokenizer in [&BYTE_LEVEL, &TIKTOKEN, &SENTENCE_PIECE, &WORD_PIECE] {
            assert_law(tokenizer, &damaged(tokenizer, &text, cut, &extra));
        }
    }

    #[test]
    fn byte_level_encodings_come_back_as_they_were(text in text()) {
        for tokenizer in [&BYTE_LEVEL, &TIKTOKEN] {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(outputs(tokenizer, &ids, false).concat(), &*text);
        }
    }
}

/// Decoders beyond the four families, likely and unlikely.
fn decoders() -> Vec<Value> {
    let replace = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
    let regex = json!({ "type": "Replace", "pattern": { "Regex": "[aeiou]+" }, "content": "*" });
    let metaspace =
        |scheme| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme });
    let fallback = json!({ "type": "ByteFallback" });
    let fuse = json!({ "type": "Fuse" });
    let strip = |start| json!({ "type": "Strip", "content": " ", "start": start, "stop": 0 });
    let word_piece = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true });
    let bpe = json!({ "type": "BPEDecoder", "suffix": "e" });
    let ctc =
        json!({ "type": "CTC", "pad_token": "▁", "word_delimiter_token": "e", "cleanup": true });
    let sequence = |stages: &[&Value]| json!({ "type": "Sequence", "decoders": stages });
    vec![
        Value::Null,
        metaspace("always"),
        metaspace("first"),
        metaspace("never"),
        sequence(&[]),
        sequence(&[&fuse]),
        sequence(&[&replace, &fallback, &fuse]),
        sequence(&[&replace, &fallback, &fuse, &strip(3)]),
        sequence(&[&replace, &fuse, &strip(0), &fuse]),
        sequence(&[&replace, &strip(2), &fallback]),
        sequence(&[&metaspace("always"), &fallback, &fuse]),
        sequence(&[&regex, &word_piece]),
        sequence(&[&fallback]),
        sequence(&[&byte_level, &strip(2)]),
        sequence(&[&replace, &byte_level, &fuse]),
        // Decoded at the end:
        bpe.clone(),
        ctc.clone(),
        sequence(&[&fallback, &metaspace("always")]),
        sequence(&[&fuse, &metaspace("always")]),
        sequence(&[&replace, &fuse, &regex]),
        sequence(&[&byte_level, &regex]),
        sequence(&[&fuse, &strip(1), &strip(1)]),
        sequence(&[&word_piece, &bpe]),
    ]
}

static OTHERS: LazyLock<Vec<Arc<TextTokenizer>>> = LazyLock::new(|| {
    let load = |decoder| fixtures::with_decoder(decoder).unwrap();
    decoders().into_iter().map(load).collect()
});

proptest! {
    #[test]
    fn any_decoder(ids in ids(), text in text(), cut in 0..4_usize) {
        for tokenizer in OTHERS.iter() {
            assert_law(tokenizer, &ids);
            assert_law(tokenizer, &damaged(tokenizer, &text, cut, &ids[..ids.len().min(2)]));
        }
    }
}

fn id(tokenizer: &TextTokenizer, token: &str) -> u32 {
    tokenizer.token_id(token).unwrap()
}

#[test]
fn text_comes_out_with_the_token_that_completes_it() {
    let tokenizer = &BYTE_LEVEL;
    let ids = ["Ġthe", "ð", "Ł", "¦", "Ĭ", "Ġthe"].map(|token| id(tokenizer, token));
    assert_eq!(
        outputs(tokenizer, &ids, false),
        [" the", "", "", "", "🦊", " the", ""]
    );
}

#[test]
fn an_unfinished_code_point_is_replaced_when_it_cannot_be_finished() {
    let tokenizer = &BYTE_LEVEL;
    let ids = ["ð", "Ł", "Ġthe", "ð"].map(|token| id(tokenizer, token));
    assert_eq!(
        outputs(tokenizer, &ids, false),
        ["", "", "\u{fffd} the", "", "\u{fffd}"]
    );
}

#[test]
fn a_byte_run_waits_for_its_end_or_its_first_flaw() {
    let tokenizer = &SENTENCE_PIECE;
    let [a, lead, text] = ["<0x41>", "<0xE2>", "▁the"].map(|token| id(tokenizer, token));
    assert_eq!(
        outputs(tokenizer, &[text, a, text], false),
        ["the", "", "A the", ""]
    );
    let flawed = outputs(tokenizer, &[text, lead, a, a, text], false);
    assert_eq!(
        flawed,
        ["the", "", "\u{fffd}\u{fffd}", "\u{fffd}", " the", ""]
    );
}

#[test]
fn a_space_is_stripped_from_the_start_only() {
    let tokenizer = &SENTENCE_PIECE;
    let ids = ["▁", "▁the", "▁the"].map(|token| id(tokenizer, token));
    assert_eq!(outputs(tokenizer, &ids, false), ["", " the", " the", ""]);
}

#[test]
fn unknown_ids_and_skipped_tokens_leave_no_trace() {
    let tokenizer = &WORD_PIECE;
    let [bos, the] = ["<|bos|>", "the"].map(|token| id(tokenizer, token));
    let ids = [u32::MAX, bos, the, 1 << 30, the];
    assert_eq!(outputs(tokenizer, &ids, true).concat(), "the the");
    assert_eq!(outputs(tokenizer, &[], true), [""]);
}

#[test]
fn finish_begins_a_new_sequence() {
    let the = id(&SENTENCE_PIECE, "▁the");
    let mut detokenizer = Detokenizer::new(Arc::clone(&SENTENCE_PIECE), false);
    let mut out = String::new();
    for _ in 0..2 {
        detokenizer.push(the, &mut out);
        detokenizer.finish(&mut out);
    }
    assert_eq!(out, "thethe");
}
