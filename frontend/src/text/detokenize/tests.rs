//! The invariant, for every family of tokenizers and every decoder: outputs add up to the decoding of the whole.

use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};

use super::fixtures::{FAMILIES, Family, PIECES};
use super::*;

/// A part of a sequence of tokens.
#[derive(Debug, Clone)]
enum Part {
    /// Encoded by the tokenizer.
    Text(String),
    /// The tokens of single bytes, if there are any.
    Bytes(Vec<u8>),
    /// Any tokens, a few of them unknown.
    Ids(Vec<u32>),
    Special(Index),
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => select(PIECES).prop_map(str::to_owned),
        1 => "[a-z]{1,6}[ .,!?']{0,2}",
        1 => any::<String>(),
    ]
}

/// Code points that are cut, reversed, and mixed with invalid bytes.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        text().prop_map(String::into_bytes),
        (text(), any::<Index>()).prop_map(|(text, end)| {
            let bytes = text.into_bytes();
            let end = end.index(bytes.len() + 1);
            bytes[..end].to_vec()
        }),
        text().prop_map(String::into_bytes).prop_shuffle(),
        vec(0x80..=0xff_u8, 1..5),
    ]
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        4 => text().prop_map(Part::Text),
        3 => bytes().prop_map(Part::Bytes),
        2 => vec(0..800_u32, 1..6).prop_map(Part::Ids),
        1 => any::<Index>().prop_map(Part::Special),
    ]
}

/// A tokenizer, with indexes of its tokens.
struct Subject {
    name: String,
    tokenizer: Arc<TextTokenizer>,
    special: Vec<u32>,
    /// By byte: a token that stands for this byte alone.
    bytes: Vec<Option<u32>>,
}

impl Subject {
    fn new(name: String, tokenizer: Arc<TextTokenizer>) -> Self {
        let ids = || 0..1_000;
        let of_byte = |byte| ids().find(|&id| tokenizer.token_bytes(id) == [byte]);
        Self {
            name,
            special: ids().filter(|&id| tokenizer.is_special(id)).collect(),
            bytes: (0..=u8::MAX).map(of_byte).collect(),
            tokenizer,
        }
    }

    fn ids(&self, parts: &[Part]) -> Vec<u32> {
        let ids_of = |part: &Part| match part {
            Part::Text(text) => self.tokenizer.encode(text, false).unwrap(),
            Part::Bytes(bytes) => bytes
                .iter()
                .filter_map(|&byte| self.bytes[usize::from(byte)])
                .collect(),
            Part::Ids(ids) => ids.clone(),
            Part::Special(index) => vec![*index.get(&self.special)],
        };
        parts.iter().flat_map(ids_of).collect()
    }

    /// Checks the invariant for chunks of these sizes. Apart from held-back text, the output is also right if the text ends at
    /// any point.
    fn check(&self, ids: &[u32], sizes: &[usize], special: Special) {
        let whole = |ids: &[u32]| special.whole(&self.tokenizer, ids);
        let mut detokenizer = special.detokenizer(&self.tokenizer);
        let (mut out, mut taken) = (String::new(), 0);
        for &size in sizes.iter().cycle() {
            if taken == ids.len() {
                break;
            }
            let end = ids.len().min(taken + size);
            for &id in &ids[taken..end] {
                detokenizer.push(id, &mut out);
            }
            taken = end;
            let so_far = whole(&ids[..taken]);
            let name = &self.name;
            let held = so_far.strip_prefix(out.as_str());
            let held = held.unwrap_or_else(|| panic!("{name}: {out:?} of {so_far:?}, {ids:?}"));
            assert!(
                held.is_empty() || detokenizer.holds_back(),
                "{name}: {held:?} is missing, {ids:?}"
            );
        }
        detokenizer.finish(&mut out);
        assert_eq!(out, whole(ids), "{}: {special:?}, {ids:?}", self.name);
    }
}

/// At every split of the tokens into a prompt and its answer.
#[test]
fn text_behind_a_prompt_goes_on_with_it() {
    for Family {
        name, tokenizer, ..
    } in FAMILIES.iter()
    {
        let special = (0..1_000).find(|&id| tokenizer.is_special(id)).unwrap();
        let mut ids = vec![special];
        ids.extend(tokenizer.encode("the quick brown fox", false).unwrap());
        let whole = tokenizer.decode_all(&ids, true).unwrap();
        for at in 0..=ids.len() {
            let (prompt, answer) = ids.split_at(at);
            let mut out = tokenizer.decode_all(prompt, true).unwrap();
            let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), true).behind(prompt);
            for &id in answer {
                detokenizer.push(id, &mut out);
            }
            detokenizer.finish(&mut out);
            assert_eq!(out, whole, "{name}: {prompt:?} {answer:?}");
        }
    }
}

/// How special tokens are treated.
#[derive(Debug, Clone, Copy)]
enum Special {
    Kept,
    Skipped,
    /// Skipped, except this one.
    Shown(u32),
}

impl Special {
    fn detokenizer(self, tokenizer: &Arc<TextTokenizer>) -> Detokenizer {
        let tokenizer = Arc::clone(tokenizer);
        match self {
            Self::Kept => Detokenizer::new(tokenizer, false),
            Self::Skipped => Detokenizer::new(tokenizer, true),
            Self::Shown(id) => Detokenizer::new(tokenizer, true).showing([id].into()),
        }
    }

    fn whole(self, tokenizer: &TextTokenizer, ids: &[u32]) -> String {
        match self {
            Self::Kept => tokenizer.decode_all(ids, false).unwrap(),
            Self::Skipped => tokenizer.decode_all(ids, true).unwrap(),
            Self::Shown(shown) => {
                let is_seen = |&&id: &&u32| id == shown || !tokenizer.is_special(id);
                let seen: Vec<u32> = ids.iter().filter(is_seen).copied().collect();
                tokenizer.decode_all(&seen, false).unwrap()
            }
        }
    }
}

static OF_FAMILIES: LazyLock<Vec<Subject>> = LazyLock::new(|| {
    let subject = |family: &Family| {
        let tokenizer = Arc::clone(&family.tokenizer);
        Subject::new(family.name.to_owned(), tokenizer)
    };
    FAMILIES.iter().map(subject).collect()
});

/// Decoders other than those of the families, likely and unlikely.
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

static OF_DECODERS: LazyLock<Vec<Subject>> = LazyLock::new(|| {
    let subject = |decoder: Value| {
        let name = decoder.to_string();
        Subject::new(name, fixtures::with_decoder(decoder).unwrap())
    };
    decoders().into_iter().map(subject).collect()
});

proptest! {
    #[test]
    fn outputs_add_up_to_the_decoding_of_the_whole(
        parts in vec(part(), 0..8),
        sizes in vec(1..6_usize, 1..5),
        shown in any::<Index>(),
        decoder in any::<Index>(),
    ) {
        for subject in OF_FAMILIES.iter().chain([decoder.get(&OF_DECODERS)]) {
            let ids = subject.ids(&parts);
            let shown = Special::Shown(*shown.get(&subject.special));
            for special in [Special::Kept, Special::Skipped, shown] {
                subject.check(&ids, &sizes, special);
            }
        }
    }

    #[test]
    fn lossless_encodings_come_back_as_they_were(parts in vec(text(), 0..8)) {
        let text = parts.concat();
        // A special token spelled like a vocabulary entry.
        prop_assume!(!text.contains("Ġé"));
        for family in FAMILIES.iter().filter(|family| family.is_lossless) {
            let ids = family.tokenizer.encode(&text, false).unwrap();
            let out = outputs(&family.tokenizer, &ids, false).concat();
            prop_assert_eq!(&out, &text, "{}", family.name);
        }
    }
}

/// A vocabulary has a token for every byte, or for none.
#[test]
fn bytes_have_tokens_where_the_property_needs_them() {
    let counts = OF_FAMILIES
        .iter()
        .map(|subject| (&*subject.name, subject.bytes.iter().flatten().count()));
    let all = [
        ("GPT-2", 256),
        ("Llama 3", 256),
        ("tiktoken", 256),
        ("tiny-chat", 256),
        ("Llama 2", 256),
        ("Gemma", 256),
    ];
    assert!(counts.take(6).eq(all));
}

/// Returns the output of each token, and then that of `finish`.
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

fn id(tokenizer: &TextTokenizer, token: &str) -> u32 {
    tokenizer.token_id(token).unwrap()
}

#[test]
fn text_comes_out_with_the_token_that_completes_it() {
    let tokenizer = fixtures::byte_level();
    let ids = ["Ġthe", "ð", "Ł", "¦", "Ĭ", "Ġthe"].map(|token| id(&tokenizer, token));
    assert_eq!(
        outputs(&tokenizer, &ids, false),
        [" the", "", "", "", "🦊", " the", ""]
    );
}

#[test]
fn an_unfinished_code_point_is_replaced_when_it_cannot_be_finished() {
    let tokenizer = fixtures::byte_level();
    let ids = ["ð", "Ł", "Ġthe", "ð"].map(|token| id(&tokenizer, token));
    assert_eq!(
        outputs(&tokenizer, &ids, false),
        ["", "", "\u{fffd} the", "", "\u{fffd}"]
    );
}

#[test]
fn a_byte_run_waits_for_its_end_or_its_first_flaw() {
    let tokenizer = fixtures::llama_2();
    let [a, lead, text] = ["<0x41>", "<0xE2>", "▁the"].map(|token| id(&tokenizer, token));
    assert_eq!(
        outputs(&tokenizer, &[text, a, text], false),
        ["the", "", "A the", ""]
    );
    let flawed = outputs(&tokenizer, &[text, lead, a, a, text], false);
    assert_eq!(
        flawed,
        ["the", "", "\u{fffd}\u{fffd}", "\u{fffd}", " the", ""]
    );
}

#[test]
fn a_space_is_stripped_from_the_start_only() {
    let tokenizer = fixtures::llama_2();
    let ids = ["▁", "▁the", "▁the"].map(|token| id(&tokenizer, token));
    assert_eq!(outputs(&tokenizer, &ids, false), ["", " the", " the", ""]);
}

#[test]
fn unknown_ids_and_skipped_tokens_leave_no_trace() {
    let tokenizer = fixtures::word_piece();
    let [bos, the] = ["<|bos|>", "the"].map(|token| id(&tokenizer, token));
    let ids = [u32::MAX, bos, the, 1 << 30, the];
    assert_eq!(outputs(&tokenizer, &ids, true).concat(), "the the");
    assert_eq!(outputs(&tokenizer, &[], true), [""]);
}
