//! Checks the bound with random texts, and when there is none.

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;

use super::*;
use crate::text::detokenize::fixtures::{self, FAMILIES, PIECES};

#[test]
fn families_without_a_bound_are_those_that_drop_text() {
    let has_bound = FAMILIES.iter().map(|family| {
        (
            family.name,
            family.tokenizer.longest_token_bytes().is_some(),
        )
    });
    let expected = [
        ("GPT-2", true),
        ("Llama 3", true),
        ("tiktoken", true),
        ("tiny-chat", true),
        ("Llama 2", true),
        ("Gemma", true),
        ("T5", false),
        ("BERT", false),
    ];
    assert!(has_bound.eq(expected));
}

#[test]
fn tokens_that_take_spaces_leave_no_bound() {
    let mut json = fixtures::tiny_chat_json();
    json["added_tokens"][0]["rstrip"] = true.into();
    assert_eq!(of(&json), None);
}

#[test]
fn normalizers_count() {
    let mut json = fixtures::tiny_chat_json();
    json["normalizer"] = json!(null);
    let plain = of(&json).unwrap();
    json["normalizer"] = json!({ "type": "Sequence", "normalizers": [
        { "type": "NFKC" },
        { "type": "Replace", "pattern": { "String": "abc" }, "content": "a" },
    ] });
    assert_eq!(of(&json), Some(plain * 4 * 3));
    json["normalizer"] = json!({ "type": "StripAccents" });
    assert_eq!(of(&json), None);
}

fn of(json: &serde_json::Value) -> Option<usize> {
    longest_token_bytes(&Tokenizer::from_bytes(json.to_string()).unwrap())
}

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_the_bound_says(
        picks in prop::collection::vec(prop::sample::select(PIECES), 0..20),
        family in any::<Index>(),
    ) {
        let (text, family) = (picks.concat(), family.get(&FAMILIES));
        if let Some(longest) = family.tokenizer.longest_token_bytes() {
            let tokens = family.tokenizer.encode(&text, false).unwrap().len();
            prop_assert!(text.len() <= tokens * longest, "{}: {text:?}", family.name);
        }
    }
}
