//! Loads tokenizers, and encodes and decodes whole texts; what the library cannot do is an error.

use super::*;
use crate::text::detokenize::fixtures;

#[test]
fn special_tokens_are_found_in_text_and_skipped_on_request() {
    let tokenizer = fixtures::byte_level();
    let eos = tokenizer.token_id("<|eos|>").unwrap();
    assert!(tokenizer.is_special(eos));
    assert_eq!(tokenizer.id_to_token(eos).unwrap(), "<|eos|>");
    let ids = tokenizer.encode("the<|eos|>", false).unwrap();
    assert_eq!(ids.last(), Some(&eos));
    assert_eq!(tokenizer.decode_all(&ids, true).unwrap(), "the");
    assert_eq!(tokenizer.decode_all(&ids, false).unwrap(), "the<|eos|>");
    assert_eq!(tokenizer.decode_all(&[eos], true).unwrap(), "");
}

#[test]
fn token_text_is_what_the_token_adds() {
    let byte_level = fixtures::byte_level();
    let the = byte_level.token_id("Ġthe").unwrap();
    assert_eq!(byte_level.token_text(the), " the");
    let lead_byte = byte_level.token_id("ð").unwrap();
    assert_eq!(byte_level.token_bytes(lead_byte), [0xf0]);
    assert_eq!(byte_level.token_text(lead_byte), "\u{fffd}");
    assert_eq!(byte_level.token_text(u32::MAX), "");

    let sentence_piece = fixtures::llama_2();
    let byte = sentence_piece.token_id("<0xE2>").unwrap();
    assert_eq!(sentence_piece.token_bytes(byte), [0xe2]);
}

#[test]
fn truncation_and_padding_of_the_file_are_dropped() {
    let mut json = fixtures::byte_level_json();
    json["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0
    });
    json["padding"] = serde_json::json!({
        "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!"
    });
    let tokenizer = TextTokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let text = "the quick brown fox";
    let ids = tokenizer.encode(text, false).unwrap();
    assert_eq!(tokenizer.decode_all(&ids, false).unwrap(), text);
}

#[test]
fn known_prefixes_are_not_tokenized_again() {
    let json = fixtures::byte_level_json().to_string();
    let plain = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
    let cached = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
    let cached = cached.with_cache(1 << 20);
    let known = format!("<|bos|>{}<|eos|>", "the quick brown fox ".repeat(20));
    for (rest, cached_tokens) in [
        ("one", 0),
        ("two", plain.encode(&known, false).unwrap().len()),
    ] {
        let text = format!("{known}{rest}");
        let prompt = cached
            .encode_prompt(&text, false, &EncodeLimits::NONE)
            .unwrap();
        assert_eq!(prompt.ids, plain.encode(&text, false).unwrap());
        assert_eq!(prompt.cached_tokens, cached_tokens);
    }
    for max_bytes in [0, 1 << 20] {
        let tokenizer = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
        let tokenizer = tokenizer.with_cache(max_bytes);
        for _ in 0..2 {
            let prompt = tokenizer
                .encode_prompt(&known, true, &EncodeLimits::NONE)
                .unwrap();
            assert_eq!(prompt.ids, plain.encode(&known, true).unwrap());
            assert_eq!(prompt.cached_tokens, 0);
        }
    }
}

#[test]
fn malformed_files_are_errors() {
    let error = TextTokenizer::from_bytes(b"{}").unwrap_err();
    assert!(matches!(error, TokenizerError::Load { .. }), "{error:?}");
    let error = fixtures::with_decoder(serde_json::json!(
        { "type": "Strip", "content": " ", "start": 0, "stop": 1 }
    ))
    .unwrap_err();
    assert!(matches!(error, TokenizerError::UnsupportedDecoder { .. }));
    let mut sparse = fixtures::byte_level_json();
    sparse["model"]["vocab"]["far away"] = u32::MAX.into();
    let error = TextTokenizer::from_bytes(sparse.to_string().as_bytes()).unwrap_err();
    assert!(matches!(error, TokenizerError::VocabularyTooLarge { .. }));
}

/// Adds two tokens that both include the spaces beside them; one of them is a space itself.
fn with_greedy_tokens() -> serde_json::Value {
    let mut json = fixtures::byte_level_json();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (id, content, side) in [(900, "<|greedy|>", "rstrip"), (901, "\n", "lstrip")] {
        let mut token = serde_json::json!({
            "id": id, "content": content, "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        });
        token[side] = true.into();
        added.push(token);
    }
    json
}

#[test]
fn a_panic_of_the_library_is_an_error_of_the_one_text() {
    let json = with_greedy_tokens().to_string();
    for max_bytes in [0, 1 << 20] {
        let tokenizer = TextTokenizer::from_bytes(json.as_bytes()).unwrap();
        let tokenizer = tokenizer.with_cache(max_bytes);
        let error = tokenizer.encode_prompt("a<|greedy|> \n  b", false, &EncodeLimits::NONE);
        let error = error.unwrap_err();
        assert!(
            matches!(&error, TokenizerError::Panicked { task: "encode", .. }),
            "{error:?}"
        );
        assert_eq!(
            error.to_string(),
            "the model's tokenizer cannot encode this: the tokenizers library panicked: \
             AddedVocabulary bad split"
        );
        let ids = tokenizer
            .encode_prompt("the<|greedy|>  the", false, &EncodeLimits::NONE)
            .unwrap();
        let text = tokenizer.decode_all(&ids.ids, true).unwrap();
        assert_eq!(text, "thethe");
    }
}
