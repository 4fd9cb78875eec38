//! Grammars that no token can continue.

use genset_backend_common::error::At;
use genset_backend_common::{EngineError, ErrorKind, GuidedDecoding, RequestField};
use serde_json::json;

use super::{GuideError, GuideFactory, tiny_chat};

fn assert_grammar_at_fault(error: &EngineError) {
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.at(), Some(&At::Request(RequestField::Guided)));
}

/// No token of the vocabulary spells the text.
#[test]
fn a_dead_end_is_an_error_of_the_request() {
    let tokenizer = json!({"decoder": {"type": "ByteLevel"}, "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}});
    let factory = GuideFactory::try_new(tokenizer.to_string().as_bytes(), 2, &[]).unwrap();
    let mut guide = factory
        .compile(&GuidedDecoding::Choice(vec!["ac".into()]))
        .unwrap();
    guide.accept(0).unwrap();
    let error = guide.mask().unwrap_err();
    assert_eq!(error, GuideError::DeadEnd);
    assert_grammar_at_fault(&EngineError::from(error));
}

#[test]
fn a_grammar_without_a_first_token_is_refused_before_anything_is_generated() {
    let factory = tiny_chat();
    let nowhere = [
        GuidedDecoding::JsonSchema(json!({"$ref": "#"})),
        GuidedDecoding::Grammar("start: start".into()),
    ];
    for guided in nowhere {
        assert_grammar_at_fault(&factory.compile(&guided).unwrap_err());
    }
}
