//! Limits on the cost of a guide: before compilation, during it, and during generation.

use genset_backend_common::{ErrorKind, GuidedDecoding};
use serde_json::{Value, json};

use super::{chain, pieces, refusal, tiny_chat, token_of};
use crate::guided::{Guide, GuideError, GuideFactory, GuideLimits};

/// Masks do not explore every token that they allow, so an accepted token may reach a limit. That is the grammar's fault.
#[test]
fn a_limit_that_is_reached_within_a_token_is_the_grammars() {
    let guided = GuidedDecoding::Regex(r#"[^"\\\x00-\x1F\x7F]{0,50000}"#.into());
    let mut reached = 0;
    for lexer_states in 3..60 {
        let factory = pieces().with_limits(GuideLimits {
            lexer_states,
            ..GuideLimits::default()
        });
        let Ok(mut guide) = factory.compile(&guided) else {
            continue;
        };
        let token = token_of(&factory, "yes");
        while let Ok(mask) = guide.mask() {
            assert!(mask.allows(token), "{lexer_states} states");
            let Err(error) = guide.accept(token) else {
                continue;
            };
            assert!(matches!(error, GuideError::TooComplex { .. }), "{error:?}");
            assert_eq!(guide.mask(), Err(error));
            reached += 1;
        }
    }
    assert!(reached > 0, "every limit was reached by a mask");
}

fn deep(levels: usize, filler: &str) -> Value {
    (0..levels).fold(
        json!({"type": "null"}),
        |inner, _| json!({"type": "object", "description": filler, "properties": {"a": inner}}),
    )
}

/// They are rejected by counting, before any recursive or costly step.
#[test]
fn large_and_deep_grammars_are_refused() {
    let factory = pieces();
    let limits = factory.limits().clone();
    let schema = |value| refusal(&factory, &GuidedDecoding::JsonSchema(value));
    // A megabyte: too long and too deep; either error may come first.
    let megabyte = schema(deep(1000, &"x".repeat(1000)));
    assert!(
        megabyte.contains("longer") || megabyte.contains("deeper"),
        "{megabyte}"
    );
    assert!(schema(deep(200, "")).contains("deeper"));
    assert!(schema(deep(2, &"x".repeat(limits.source_bytes))).contains("longer"));
    let other = |guided: GuidedDecoding| refusal(&factory, &guided);
    let pattern = "a".repeat(limits.expression_bytes + 1);
    assert!(schema(json!({"type": "string", "pattern": pattern})).contains("patterns"));
    assert!(schema(json!({"patternProperties": {pattern.clone(): true}})).contains("patterns"));
    assert!(other(GuidedDecoding::Regex(pattern.clone())).contains("longer"));
    assert!(other(GuidedDecoding::Grammar(pattern)).contains("longer"));
    let long = "a".repeat(limits.source_bytes + 1);
    assert!(other(GuidedDecoding::Choice(vec![long])).contains("longer"));
    assert!(other(GuidedDecoding::Regex("(".repeat(1000))).contains("brackets"));
    assert!(
        other(GuidedDecoding::Grammar(format!(
            "start: {}",
            "(".repeat(1000)
        )))
        .contains("brackets")
    );
    assert!(other(GuidedDecoding::Grammar("a: a\n".repeat(5000))).contains("rules"));
    assert!(other(GuidedDecoding::Choice(vec!["a".into(); 5000])).contains("texts"));
}

/// Within the size limits, but with too much work: an error while compiling or generating, or a normal sequence. The test
/// must return in any case.
#[test]
fn exploding_grammars_are_bounded() {
    let factory = tiny_chat();
    let doubling = |next: Value| json!({"allOf": [next, next]});
    // 18,660 schemas deep, though none is nested deeper than 62 levels.
    let deep = |next| (0..30).fold(next, |inner, _| json!({"anyOf": [inner]}));
    let rules: String = (0..1900)
        .map(|at| format!("r{at}: r{}\n", at + 1))
        .collect();
    let cases = [
        GuidedDecoding::Regex("(a{1,1000}){1,1000}".into()),
        GuidedDecoding::Regex("((a{0,100}){0,100}){0,100}b".into()),
        GuidedDecoding::Regex("(a|b)*a(a|b){60}".into()),
        GuidedDecoding::Regex(r"(.*a.*b.*c.*d.*e.*f){9}(\w{50,999}|\d{40,998}){5,500}".into()),
        GuidedDecoding::JsonSchema(chain(5000, |next| next)),
        GuidedDecoding::JsonSchema(chain(40, doubling)),
        GuidedDecoding::JsonSchema(chain(622, deep)),
        GuidedDecoding::JsonSchema(
            json!({"type": "array", "minItems": 4_000_000, "items": {"type": "array", "minItems": 4_000_000}}),
        ),
        GuidedDecoding::JsonSchema(
            json!({"type": "string", "minLength": 100_000, "maxLength": 90_000_000}),
        ),
        GuidedDecoding::Grammar(format!("start: r0\n{rules}r1900: \"x\"\n")),
        GuidedDecoding::Grammar(
            "start: a{1,100000}\na: b{1,100000}\nb: \"x\" | \"y\" start".into(),
        ),
        GuidedDecoding::Grammar("start: start start | \"a\" |".into()),
    ];
    let mut outcomes = Vec::new();
    for guided in &cases {
        let outcome = match factory.compile(guided) {
            Err(error) => {
                assert_eq!(
                    error.kind(),
                    ErrorKind::InvalidArgument,
                    "{guided:?}: {error}"
                );
                format!("refused: {error}")
            }
            Ok(guide) => run_on(&factory, guide),
        };
        outcomes.push(outcome);
    }
    assert!(
        outcomes.iter().all(|outcome| !outcome.contains("failed")),
        "{outcomes:#?}"
    );
}

/// Each limit alone, so low that a small grammar exceeds it.
#[test]
fn every_limit_is_kept() {
    let refused = |limits: GuideLimits, guided: GuidedDecoding| {
        let factory = pieces().with_limits(limits);
        let mut guide = match factory.compile(&guided) {
            Err(error) => return error.to_string(),
            Ok(guide) => guide,
        };
        for _ in 0..100 {
            match guide.mask() {
                Ok(mask) => guide.accept(mask.iter().last().unwrap()).unwrap(),
                Err(error) => {
                    assert!(matches!(error, GuideError::TooComplex { .. }), "{error:?}");
                    return error.to_string();
                }
            }
        }
        "nothing".to_owned()
    };
    let regex = |pattern: &str| GuidedDecoding::Regex(pattern.into());
    let default = GuideLimits::default();
    let grammar = GuidedDecoding::Grammar("start: a b a b\na: \"x\"\nb: \"y\"".into());
    let expression = || regex("[a-z]*(ab|yes|no){3,9}");
    let cases = [
        (
            GuideLimits {
                lexer_fuel: 5,
                ..default.clone()
            },
            expression(),
            "guided: ",
        ),
        (
            GuideLimits {
                grammar_symbols: 3,
                ..default.clone()
            },
            grammar.clone(),
            "guided: ",
        ),
        (
            GuideLimits {
                token_lexer_fuel: 5,
                ..default.clone()
            },
            expression(),
            "too complex",
        ),
        (
            GuideLimits {
                lexer_states: 3,
                ..default.clone()
            },
            expression(),
            "too complex",
        ),
        (
            GuideLimits {
                token_parser_items: 0,
                ..default
            },
            grammar,
            "too complex",
        ),
    ];
    let outcomes = cases.map(|(limits, guided, part)| (refused(limits, guided), part));
    let all_refused = outcomes
        .iter()
        .all(|(outcome, part)| outcome.contains(part));
    assert!(all_refused, "{outcomes:#?}");
}

/// Generates up to 40 tokens, always the lowest id.
fn run_on(factory: &GuideFactory, mut guide: Guide) -> String {
    let mut text = Vec::new();
    for _ in 0..40 {
        if guide.is_finished() {
            break;
        }
        let mask = match guide.mask() {
            Ok(mask) => mask,
            Err(error) => return format!("stopped: {error}"),
        };
        let token = mask.iter().last().unwrap();
        if let Err(error) = guide.accept(token) {
            return format!("stopped: {error}");
        }
        text.extend_from_slice(factory.vocabulary().bytes(token));
    }
    format!("went on: {}", String::from_utf8_lossy(&text))
}
