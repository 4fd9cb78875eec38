//! Guided decoding end to end: random walks through masks always spell a text of the language.

mod dead_ends;
mod limits;

use genset_backend_common::{ErrorKind, GenerateRequest, GuidedDecoding, TokenId};
use proptest::prelude::*;
use regex::Regex;
use serde_json::{Value, json};

use super::{Guide, GuideError, GuideFactory, VocabularyError};
use crate::{Sampler, TokenMask};

const TINY_CHAT: &[u8] = include_bytes!("../../../../models/tiny-chat/tokenizer.json");
/// `<|im_end|>`.
const TINY_EOS: TokenId = 2;
const TINY_VOCAB: usize = 2048;

fn tiny_chat() -> GuideFactory {
    // More rows than tokens, as padded embeddings have.
    GuideFactory::try_new(TINY_CHAT, TINY_VOCAB + 16, &[TINY_EOS]).unwrap()
}

const PIECES_EOS: TokenId = 1;

/// Like Llama 2's: control tokens, 256 bytes, then pieces.
fn pieces() -> GuideFactory {
    let mut vocab = vec![json!(["<unk>", 0.0]), json!(["</s>", 0.0])];
    vocab.extend((0..=255).map(|byte| json!([format!("<0x{byte:02X}>"), 0.0])));
    let words = [
        "▁", "▁▁", "a", "b", "yes", "▁yes", "no", "{\"", "\":", "▁\"", "true", "12", "▁3", "é",
        "}", "\"}", "[",
    ];
    vocab.extend(words.iter().map(|word| json!([word, -1.0])));
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    let added = json!([{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "</s>", "special": true}]);
    let size = vocab.len();
    let file = json!({"model": {"type": "Unigram", "vocab": vocab}, "decoder": decoder, "added_tokens": added});
    GuideFactory::try_new(file.to_string().as_bytes(), size, &[PIECES_EOS]).unwrap()
}

/// `count` definitions. `definition` builds each from the reference to the next.
pub(super) fn chain(count: usize, definition: impl Fn(Value) -> Value) -> Value {
    let name = |at: usize| format!("d{at}");
    let next = |at: usize| json!({"$ref": format!("#/$defs/d{}", at + 1)});
    let mut definitions: serde_json::Map<String, Value> = (0..count)
        .map(|at| (name(at), definition(next(at))))
        .collect();
    definitions.insert(name(count), json!({"type": "null"}));
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

/// The result of a walk.
struct Walk {
    text: String,
    tokens: Vec<TokenId>,
    is_finished: bool,
}

/// A random model: samples from noise under the mask, up to `room` tokens.
fn walk(factory: &GuideFactory, guided: &GuidedDecoding, seed: u64, room: usize) -> Walk {
    let mut guide = factory.compile(guided).unwrap();
    let vocab_size = factory.vocabulary().len();
    let mut request = GenerateRequest::from_tokens("m", vec![3]);
    (request.sampling.temperature, request.sampling.seed) = (Some(1.0), Some(seed));
    let mut sampler = Sampler::try_new(&request, vocab_size, 0).unwrap();
    let (mut bytes, mut tokens) = (Vec::new(), Vec::new());
    while !guide.is_finished() && tokens.len() < room {
        let mask = guide.mask().unwrap();
        assert_eq!(mask.len(), vocab_size);
        let token = sampler
            .sample(&mut vec![0.0; vocab_size], Some(&mask))
            .unwrap()
            .token;
        sampler.accept(token);
        guide.accept(token).unwrap();
        bytes.extend_from_slice(factory.vocabulary().bytes(token));
        tokens.push(token);
    }
    Walk {
        text: String::from_utf8_lossy(&bytes).into_owned(),
        tokens,
        is_finished: guide.is_finished(),
    }
}

/// Walks with both tokenizers. At least `least` texts must be complete, and `holds` must be true of each of them.
fn walks(guided: &GuidedDecoding, least: usize, holds: impl Fn(&str) -> bool) {
    for factory in [tiny_chat(), pieces()] {
        let mut finished = 0;
        for seed in 0..30 {
            let walk = walk(&factory, guided, seed, 300);
            if walk.is_finished {
                finished += 1;
                assert!(holds(&walk.text), "{guided:?} gave {:?}", walk.text);
            }
        }
        assert!(
            finished >= least,
            "{guided:?} came to an end {finished} times of 30"
        );
    }
}

#[test]
fn regexes_match_from_end_to_end() {
    for pattern in [
        "[0-9]{4}-[0-9]{2}-[0-9]{2}",
        "^(red|green|blue)$",
        "(a|b)*c",
        r"\d{3}/\d{2}\\x",
        "[é-ü]{3} .{2}",
        "yes|no",
    ] {
        let whole = Regex::new(&format!("^(?:{pattern})$")).unwrap();
        walks(&GuidedDecoding::Regex(pattern.into()), 30, |text| {
            whole.is_match(text)
        });
    }
}

#[test]
fn choices_are_taken_byte_for_byte() {
    let texts = [
        "yes",
        "yes and no",
        "a.b*c",
        "x\ny\t\"z\"\\",
        "(?:[",
        "/*$^",
        "é {1} <|im_end|>",
        "-&~#",
    ];
    let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
    let mut seen = std::collections::BTreeSet::new();
    let factory = tiny_chat();
    for seed in 0..60 {
        let walk = walk(&factory, &GuidedDecoding::Choice(texts.clone()), seed, 300);
        assert!(
            walk.is_finished && texts.contains(&walk.text),
            "{:?}",
            walk.text
        );
        seen.insert(walk.text);
    }
    assert!(seen.len() > 4, "{seen:?}");
    walks(&GuidedDecoding::Choice(texts.clone()), 30, |text| {
        texts.iter().any(|choice| choice == text)
    });
}

#[test]
fn json_parses_and_validates() {
    let parse = |text: &str| serde_json::from_str::<Value>(text).ok();
    let schema = json!({
        "type": "object", "required": ["name", "tags"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        },
        "$defs": {"tag": {"enum": ["x", "y"]}},
    });
    walks(&GuidedDecoding::JsonSchema(schema), 25, |text| {
        let Some(value) = parse(text) else {
            return false;
        };
        let tags = value["tags"].as_array().unwrap();
        value["name"]
            .as_str()
            .is_some_and(|name| name.chars().count() <= 5)
            && value
                .get("age")
                .is_none_or(|age| age.as_u64().is_some_and(|age| age <= 120))
            && tags.len() <= 2
            && tags.iter().all(|tag| tag == "x" || tag == "y")
    });
    walks(
        &GuidedDecoding::JsonSchema(json!({"type": "boolean"})),
        30,
        |text| parse(text).is_some_and(|value| value.is_boolean()),
    );
    // A number of many digits is JSON, though no f64.
    let is_json = |text: &str| match serde_json::from_str::<Value>(text) {
        Ok(_) => true,
        Err(error) => error.to_string().contains("number out of range"),
    };
    walks(&GuidedDecoding::JsonSchema(json!(true)), 1, is_json);
    walks(&GuidedDecoding::JsonObject, 1, |text| {
        parse(text).is_none_or(|value| value.is_object()) && is_json(text)
    });
}

/// llguidance makes 64-bit integers of bounds, and negates them.
#[test]
fn numbers_of_64_bits_are_within_their_bounds() {
    let within = |bounds: Value| {
        // The definition's name is no keyword.
        let definitions = json!({"minimum": bounds});
        GuidedDecoding::JsonSchema(json!({"$ref": "#/$defs/minimum", "$defs": definitions}))
    };
    let is_i64 = |text: &str| text.trim().parse::<i64>().is_ok();
    let any = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    walks(&within(any), 25, is_i64);
    let negative = json!({"type": "integer", "minimum": -1e30, "maximum": -1});
    walks(&within(negative), 25, |text| {
        is_i64(text) && text.trim().starts_with('-')
    });
    let largest = json!({"type": "integer", "minimum": i64::MAX});
    walks(&within(largest), 25, |text| {
        text.trim().parse::<i64>().is_ok_and(|it| it == i64::MAX)
    });
    let many = json!({"type": "integer", "minimum": 1e18});
    walks(&within(many), 25, |text| {
        is_i64(text) && text.trim().len() == 19
    });
    let few = json!({"type": "number", "maximum": -1e18});
    walks(&within(few), 25, |text| {
        text.trim().parse::<f64>().is_ok_and(|it| it <= -1e18)
    });
    let wide = json!({"type": "number", "minimum": -1e30, "maximum": 1e30});
    tiny_chat().compile(&within(wide)).unwrap();
    for beyond in [
        json!({"type": "integer", "minimum": 1e30, "maximum": 1e31}),
        json!({"type": "number", "minimum": i64::MAX}),
        json!({"type": "integer", "exclusiveMaximum": i64::MIN}),
    ] {
        let problem = refusal(&tiny_chat(), &within(beyond));
        assert!(problem.contains("lie between -2^63 and 2^63"), "{problem}");
    }
    let of_text = json!({"type": "number", "minimum": 1e18, "maximum": "x"});
    let problem = refusal(&tiny_chat(), &GuidedDecoding::JsonSchema(of_text));
    assert!(problem.contains("'maximum'"), "{problem}");
    // A value is no schema.
    let mut constant = json!({"const": {"minimum": -1e30, "maximum": -1e30}});
    let before = constant.clone();
    assert_eq!(super::bounds::fit(&mut constant), Ok(()));
    assert_eq!(constant, before);
}

/// llguidance computes remainders in 32 bits.
#[test]
fn a_step_has_32_bits() {
    let of = |step: Value| json!({"type": "number", "minimum": 1, "multipleOf": step});
    let schema = GuidedDecoding::JsonSchema;
    for step in [json!(2_147_483_648_u32), json!(1e-9)] {
        let grammar = format!("start: %json {}", of(step.clone()));
        for guided in [schema(of(step)), GuidedDecoding::Grammar(grammar)] {
            let problem = refusal(&tiny_chat(), &guided);
            assert!(problem.contains("do not fit 32 bits"), "{problem}");
        }
    }
    for step in [json!(5), json!(0.125)] {
        tiny_chat().compile(&schema(of(step))).unwrap();
    }
    let problem = refusal(&tiny_chat(), &schema(of(json!(0.07))));
    assert!(
        problem.contains("0.07, whose digits as an f64"),
        "{problem}"
    );
    let of_both = [65_521, 65_519].map(|step| json!({"type": "integer", "multipleOf": step}));
    let problem = refusal(&tiny_chat(), &schema(json!({"allOf": of_both})));
    assert!(problem.contains("least common multiple"), "{problem}");
    let apart = json!({"type": "object", "properties": {"a": of_both[0], "b": of_both[1]}});
    tiny_chat().compile(&schema(apart)).unwrap();
}

/// llguidance makes an f64 of each number.
#[test]
fn an_integer_that_no_f64_holds_is_no_constant() {
    let exact = 1_i64 << 53;
    let constant = GuidedDecoding::JsonSchema(json!({"enum": [exact, -exact]}));
    walks(&constant, 30, |text| {
        let number = text.trim().parse::<i64>();
        number.is_ok_and(|number| number.abs() == exact)
    });
    for changed in [
        json!({"const": exact + 1}),
        json!({"properties": {"id": {"enum": [1, [-exact - 1]]}}}),
        json!({"const": i64::MIN}),
        json!({"const": u64::MAX}),
    ] {
        let problem = refusal(&tiny_chat(), &GuidedDecoding::JsonSchema(changed));
        assert!(
            problem.contains("no integer that an f64 holds"),
            "{problem}"
        );
    }
    let mut kept = json!({"const": 10_u64.pow(19)});
    assert_eq!(super::bounds::fit(&mut kept), Ok(()));
}

#[test]
fn grammars_are_followed() {
    let grammar = r#"
        start: greeting ("," name)+ "!"
        greeting: "hello" | "hi"
        name: /[a-z]{1,4}/
    "#;
    let whole = Regex::new("^(hello|hi)(,[a-z]{1,4})+!$").unwrap();
    walks(&GuidedDecoding::Grammar(grammar.into()), 25, |text| {
        whole.is_match(text)
    });
    // Nesting, which no regular expression can express.
    let nested = r#"start: "(" start ")" | "x""#;
    walks(&GuidedDecoding::Grammar(nested.into()), 20, |text| {
        let depth = text.find('x').unwrap();
        text == format!("{}x{}", "(".repeat(depth), ")".repeat(depth))
    });
}

#[test]
fn the_end_is_allowed_where_the_text_may_end_and_only_there() {
    let factory = pieces();
    let mut guide = factory
        .compile(&GuidedDecoding::Regex("a+".into()))
        .unwrap();
    let token = |text: &str| token_of(&factory, text);
    assert!(!guide.mask().unwrap().allows(PIECES_EOS));
    guide.accept(token("a")).unwrap();
    let mask = guide.mask().unwrap();
    assert!(mask.allows(PIECES_EOS) && mask.allows(token("a")) && !mask.allows(token("b")));
    assert!(!guide.is_finished());
    guide.accept(PIECES_EOS).unwrap();
    assert!(guide.is_finished());
    assert_eq!(
        guide.mask().unwrap().iter().collect::<Vec<_>>(),
        [PIECES_EOS]
    );
    guide.accept(PIECES_EOS).unwrap();
    assert_eq!(
        guide.accept(token("a")),
        Err(GuideError::NotAllowed { token: token("a") })
    );
}

/// Some files do not mark end tokens as special. Such a token is no text either, however its name would fit.
#[test]
fn an_end_token_that_is_not_special_is_no_text() {
    let tokenizer = json!({"decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 2, "content": "<end>", "special": false}],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}});
    let factory = GuideFactory::try_new(tokenizer.to_string().as_bytes(), 3, &[2]).unwrap();
    let mut guide = factory
        .compile(&GuidedDecoding::Regex("[^b]{2,9}".into()))
        .unwrap();
    let masks: [&[TokenId]; 3] = [&[0], &[0], &[0, 2]];
    for expected in masks {
        let allowed: Vec<TokenId> = guide.mask().unwrap().iter().collect();
        assert_eq!(allowed, expected);
        guide.accept(0).unwrap();
    }
}

/// `min_tokens` lengthens a text that may continue; the guide ends one that cannot.
#[test]
fn min_tokens_lengthens_what_can_be_longer() {
    let factory = pieces();
    let mut request = GenerateRequest::from_tokens("m", vec![3]);
    request.stop.min_tokens = 3;
    let lengths = |request: &GenerateRequest| {
        ["b{1,9}", "b{1,2}"].map(|pattern| {
            let mut guide = factory
                .compile(&GuidedDecoding::Regex(pattern.into()))
                .unwrap();
            let sampler = Sampler::try_new(request, factory.vocabulary().len(), 0).unwrap();
            let mut sampler = sampler.with_ends(guide.ends());
            let mut length = 0;
            while !guide.is_finished() {
                // A model that tries to end at once.
                let mut logits = vec![0.0; factory.vocabulary().len()];
                logits[usize::try_from(PIECES_EOS).unwrap()] = 9.0;
                let mask = guide.mask().unwrap();
                let token = sampler.sample(&mut logits, Some(&mask)).unwrap().token;
                sampler.accept(token);
                guide.accept(token).unwrap();
                length += usize::from(!guide.is_end(token));
            }
            length
        })
    };
    // The guide's end tokens count even if the request does not list them, or ignores them.
    assert_eq!(lengths(&request), [3, 2]);
    request.stop.eos_token_ids = [PIECES_EOS].into();
    assert_eq!(lengths(&request), [3, 2]);
    request.stop.ignore_eos = true;
    assert_eq!(lengths(&request), [3, 2]);
}

fn token_of(factory: &GuideFactory, text: &str) -> TokenId {
    let len = TokenId::try_from(factory.vocabulary().len()).unwrap();
    (0..len)
        .find(|token| factory.vocabulary().bytes(*token) == text.as_bytes())
        .unwrap()
}

#[test]
fn what_does_not_follow_the_grammar_ends_the_guide() {
    let factory = pieces();
    let choice = GuidedDecoding::Choice(vec!["yes".into()]);
    let mut guide = factory.compile(&choice).unwrap();
    let wrong = token_of(&factory, "no");
    assert_eq!(
        guide.accept(wrong),
        Err(GuideError::NotAllowed { token: wrong })
    );
    assert_eq!(guide.mask(), Err(GuideError::NotAllowed { token: wrong }));
    let mut guide = factory.compile(&choice).unwrap();
    assert_eq!(
        guide.accept(PIECES_EOS),
        Err(GuideError::NotAllowed { token: PIECES_EOS })
    );
    let mut guide = factory.compile(&choice).unwrap();
    let outside = TokenId::MAX - 1;
    assert!(guide.accept(outside).is_err());
}

#[test]
fn without_end_tokens_a_complete_text_ends_the_sequence() {
    let tokenizer = json!({"decoder": {"type": "ByteLevel"}, "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}});
    let factory = GuideFactory::try_new(tokenizer.to_string().as_bytes(), 2, &[]).unwrap();
    let mut guide = factory
        .compile(&GuidedDecoding::Regex("ab".into()))
        .unwrap();
    guide.accept(0).unwrap();
    assert!(!guide.is_finished());
    guide.accept(1).unwrap();
    assert!(guide.is_finished());
    assert_eq!(guide.mask().unwrap(), TokenMask::none(2));
}

#[test]
fn end_tokens_outside_the_vocabulary_are_refused() {
    let error = GuideFactory::try_new(TINY_CHAT, TINY_VOCAB, &[2, 5000]).unwrap_err();
    assert!(
        matches!(error, VocabularyError::EosOutside { token: 5000, .. }),
        "{error}"
    );
}

/// Why a request is refused.
fn refusal(factory: &GuideFactory, guided: &GuidedDecoding) -> String {
    let error = factory.compile(guided).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.at().unwrap().name(), "guided", "{error}");
    error.message().to_owned()
}

#[test]
fn bad_grammars_are_refused_by_field_and_reason() {
    let factory = pieces();
    let regex = |pattern: &str| GuidedDecoding::Regex(pattern.into());
    let grammar = |text: &str| GuidedDecoding::Grammar(text.into());
    let choice =
        |texts: &[&str]| GuidedDecoding::Choice(texts.iter().map(|text| (*text).into()).collect());
    let schema = GuidedDecoding::JsonSchema;
    let cases = [
        (regex("(a"), "unclosed group"),
        (regex("[a"), "unclosed"),
        (regex("a\\"), "escape"),
        (regex(r"a(?=b)"), "look-around"),
        (choice(&[]), "at least one"),
        (choice(&["a", ""]), "must not be empty"),
        (schema(json!({"type": "no-such-type"})), "no-such-type"),
        (
            schema(json!({"type": "object", "unevaluatedItems": false})),
            "unevaluatedItems",
        ),
        (schema(json!({"$ref": "#/$defs/missing"})), "missing"),
        (schema(json!({"$ref": "http://localhost/x"})), "$ref"),
        (schema(json!(false)), "false"),
        (schema(json!("object")), "a schema is an object"),
        (
            schema(json!({"x-guidance": {"lenient": true}})),
            "x-guidance",
        ),
        (grammar(""), "empty"),
        (grammar("start: missing"), "missing"),
        (grammar("begin: \"a\""), "start"),
        (grammar("start: /(/"), ""),
        (grammar("start: \"a"), ""),
    ];
    for (guided, part) in cases {
        let message = refusal(&factory, &guided);
        let checked = factory.check(&guided).unwrap_err();
        assert_eq!(checked.message(), message, "{guided:?}");
        assert!(message.contains(part), "{guided:?}: {message}");
        assert!(message.len() < 600, "{message}");
    }
}

/// A guide that accepts the tokens so far again reaches the same position.
#[test]
fn a_guide_goes_on_from_resumed_tokens() {
    let factory = tiny_chat();
    let guided = GuidedDecoding::JsonSchema(
        json!({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9}),
    );
    let whole = walk(&factory, &guided, 4, 60);
    let mut ahead = factory.compile(&guided).unwrap();
    for cut in 0..whole.tokens.len() {
        let mut resumed = factory.compile(&guided).unwrap();
        for token in &whole.tokens[..cut] {
            resumed.accept(*token).unwrap();
        }
        assert_eq!(resumed.mask().unwrap(), ahead.mask().unwrap());
        ahead.accept(whole.tokens[cut]).unwrap();
    }
}

#[test]
fn guides_may_be_made_and_asked_on_any_thread() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    is_send::<Guide>();
    is_shared::<GuideFactory>();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any expression from a client is an error or a guide.
    #[test]
    fn arbitrary_sources_never_crash(text in "[a-c(){}\\[\\]|*+?.^$\\\\/:\"0-9,\n -]{0,24}") {
        let factory = pieces();
        for guided in [
            GuidedDecoding::Regex(text.clone()),
            GuidedDecoding::Grammar(format!("start: {text}")),
            GuidedDecoding::Choice(vec![text.clone()]),
        ] {
            if let Ok(mut guide) = factory.compile(&guided)
                && let Ok(mask) = guide.mask()
                && let Some(token) = mask.iter().next()
            {
                prop_assert!(guide.accept(token).is_ok(), "{:?}", guided);
            }
        }
    }
}
