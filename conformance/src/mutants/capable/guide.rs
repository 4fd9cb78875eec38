//! Guided decoding by derivatives: the rest of a language after a byte.
//!
//! # Source
//! Brzozowski, "Derivatives of Regular Expressions", 1964.

use std::sync::Arc;

use genset_backend_common::{EngineError, GuidedDecoding, RequestField};
use serde_json::Value;

/// A language over bytes. Built only by the functions below, so that `Never` is never part of another language.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Guide {
    Never,
    End,
    OneOf(Vec<u8>),
    Then(Arc<Guide>, Arc<Guide>),
    Either(Arc<Guide>, Arc<Guide>),
    Many(Arc<Guide>),
}

use Guide::{Either, End, Many, Never, OneOf, Then};

impl Guide {
    /// The language that a request asks for.
    pub(super) fn of(guided: &GuidedDecoding) -> Result<Self, EngineError> {
        let compiled = match guided {
            GuidedDecoding::JsonObject => any_object(),
            GuidedDecoding::JsonSchema(schema) => json(schema),
            GuidedDecoding::Regex(pattern) => regex(pattern),
            GuidedDecoding::Choice(texts) if texts.is_empty() => {
                Err("must hold at least one text".into())
            }
            GuidedDecoding::Choice(texts) => Ok(any(texts.iter().map(|text| literal(text)))),
            GuidedDecoding::Grammar(rules) => grammar(rules),
        };
        compiled.map_err(|problem| EngineError::invalid_argument(RequestField::Guided, problem))
    }

    /// Whether the text may end here.
    pub(super) fn may_end(&self) -> bool {
        match self {
            End | Many(_) => true,
            Never | OneOf(_) => false,
            Then(first, rest) => first.may_end() && rest.may_end(),
            Either(a, b) => a.may_end() || b.may_end(),
        }
    }

    /// The bytes that may come next.
    pub(super) fn next_bytes(&self) -> Vec<u8> {
        match self {
            Never | End => Vec::new(),
            OneOf(bytes) => bytes.clone(),
            Then(first, rest) if first.may_end() => {
                [first.next_bytes(), rest.next_bytes()].concat()
            }
            Then(first, _) => first.next_bytes(),
            Either(a, b) => [a.next_bytes(), b.next_bytes()].concat(),
            Many(inner) => inner.next_bytes(),
        }
    }

    /// The language of what may follow `byte`.
    pub(super) fn after(&self, byte: u8) -> Self {
        match self {
            Never | End => Never,
            OneOf(bytes) if bytes.contains(&byte) => End,
            OneOf(_) => Never,
            Then(first, rest) => {
                let through = then(first.after(byte), (**rest).clone());
                if first.may_end() {
                    either(through, rest.after(byte))
                } else {
                    through
                }
            }
            Either(a, b) => either(a.after(byte), b.after(byte)),
            Many(inner) => then(inner.after(byte), self.clone()),
        }
    }
}

fn then(first: Guide, rest: Guide) -> Guide {
    match (first, rest) {
        (Never, _) | (_, Never) => Never,
        (End, other) | (other, End) => other,
        (first, rest) => Then(first.into(), rest.into()),
    }
}

fn either(a: Guide, b: Guide) -> Guide {
    match (a, b) {
        (Never, other) | (other, Never) => other,
        (a, b) if a == b => a,
        (a, b) => Either(a.into(), b.into()),
    }
}

fn all(parts: impl IntoIterator<Item = Guide>) -> Guide {
    parts.into_iter().fold(End, then)
}

fn any(parts: impl IntoIterator<Item = Guide>) -> Guide {
    parts.into_iter().fold(Never, either)
}

fn literal(text: &str) -> Guide {
    all(text.bytes().map(|byte| OneOf(vec![byte])))
}

fn repeat(part: &Guide, least: usize, most: usize) -> Guide {
    let more = (least..most).fold(End, |more, _| either(End, then(part.clone(), more)));
    then(all(std::iter::repeat_n(part.clone(), least)), more)
}

type Compiled = Result<Guide, String>;

/// Literals, `.`, `\d`, classes, groups, `|`, `*`, `+`, `?`, `{m}` and `{m,n}`.
fn regex(pattern: &str) -> Compiled {
    let mut rest = pattern.as_bytes();
    let guide = alternatives(&mut rest)?;
    if rest.is_empty() {
        Ok(guide)
    } else {
        Err("has a parenthesis too many".into())
    }
}

/// One rule of literals: `root ::= "a" | "b"`.
fn grammar(rules: &str) -> Compiled {
    let texts = rules
        .strip_prefix("root ::= ")
        .ok_or("has no rule for root")?;
    let literals = texts.split(" | ").map(|text| {
        let inner = text
            .strip_prefix('"')
            .and_then(|text| text.strip_suffix('"'));
        inner.map(literal).ok_or("has something else than literals")
    });
    Ok(any(literals.collect::<Result<Vec<_>, _>>()?))
}

fn take(rest: &mut &[u8]) -> Option<u8> {
    let (first, others) = rest.split_first()?;
    *rest = others;
    Some(*first)
}

fn alternatives(rest: &mut &[u8]) -> Compiled {
    let mut guide = sequence(rest)?;
    while rest.first() == Some(&b'|') {
        take(rest);
        guide = either(guide, sequence(rest)?);
    }
    Ok(guide)
}

fn sequence(rest: &mut &[u8]) -> Compiled {
    let mut parts = Vec::new();
    while !matches!(rest.first(), None | Some(b'|' | b')')) {
        let atom = atom(rest)?;
        parts.push(repeated(atom, rest)?);
    }
    Ok(all(parts))
}

fn repeated(atom: Guide, rest: &mut &[u8]) -> Compiled {
    let guide = match rest.first() {
        Some(b'*') => Many(atom.into()),
        Some(b'+') => then(atom.clone(), Many(atom.into())),
        Some(b'?') => either(End, atom),
        Some(b'{') => {
            let end = rest.iter().position(|byte| *byte == b'}');
            let end = end.ok_or("has a brace that is never closed")?;
            let counts = String::from_utf8_lossy(&rest[1..end]).into_owned();
            let (least, most) = counts.split_once(',').unwrap_or((&counts, &counts));
            let number = |text: &str| text.parse::<usize>().map_err(|error| error.to_string());
            *rest = &rest[end..];
            repeat(&atom, number(least)?, number(most)?)
        }
        _ => return Ok(atom),
    };
    take(rest);
    Ok(guide)
}

fn atom(rest: &mut &[u8]) -> Compiled {
    match take(rest) {
        Some(b'(') => {
            let inner = alternatives(rest)?;
            match take(rest) {
                Some(b')') => Ok(inner),
                _ => Err("has a parenthesis that is never closed".into()),
            }
        }
        Some(b'[') => class(rest),
        Some(b'.') => Ok(OneOf((b' '..=b'~').collect())),
        Some(b'\\') => match take(rest) {
            Some(b'd') => Ok(OneOf((b'0'..=b'9').collect())),
            Some(byte) if byte.is_ascii_punctuation() => Ok(OneOf(vec![byte])),
            _ => Err("has an escape that is not known".into()),
        },
        Some(b'*' | b'+' | b'?' | b'{') | None => Err("repeats nothing".into()),
        Some(byte) => Ok(OneOf(vec![byte])),
    }
}

fn class(rest: &mut &[u8]) -> Compiled {
    let mut bytes = Vec::new();
    loop {
        match take(rest) {
            Some(b']') if !bytes.is_empty() => return Ok(OneOf(bytes)),
            Some(first) if rest.first() == Some(&b'-') && rest.get(1) != Some(&b']') => {
                take(rest);
                let last = take(rest).ok_or("has a class that is never closed")?;
                bytes.extend(first..=last);
            }
            Some(byte) => bytes.push(byte),
            None => return Err("has a class that is never closed".into()),
        }
    }
}

/// An object of up to three short entries.
fn any_object() -> Compiled {
    regex(r#"\{("[a-z]{1,4}":([0-9]{1,3}|true|null)(,"[a-z]{1,4}":"[a-z]{0,4}"){0,2})?\}"#)
}

fn json(schema: &Value) -> Compiled {
    let number = |key: &str| schema.get(key).and_then(Value::as_i64);
    let size = |key: &str, default: usize| {
        let given = schema.get(key).and_then(Value::as_u64);
        given.map_or(default, |size| usize::try_from(size).unwrap_or(default))
    };
    if let Some(value) = schema.get("const") {
        return Ok(literal(&value.to_string()));
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return Ok(any(values.iter().map(|value| literal(&value.to_string()))));
    }
    if let Some(schemas) = schema.get("anyOf").and_then(Value::as_array) {
        return Ok(any(schemas
            .iter()
            .map(json)
            .collect::<Result<Vec<_>, _>>()?));
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("null") => Ok(literal("null")),
        Some("boolean") => Ok(either(literal("true"), literal("false"))),
        Some("integer") => match (number("minimum"), number("maximum")) {
            (Some(least), Some(most)) => {
                Ok(any((least..=most).map(|value| literal(&value.to_string()))))
            }
            (None, None) => regex("-?(0|[1-9][0-9]{0,4})"),
            _ => Err("an integer needs both bounds or none".into()),
        },
        Some("number") => regex(r"-?(0|[1-9][0-9]{0,2})(\.[0-9]{1,2})?"),
        Some("string") => {
            let letters = OneOf((b'a'..=b'z').collect());
            let least = size("minLength", 0);
            let text = repeat(&letters, least, size("maxLength", least + 8));
            Ok(all([literal("\""), text, literal("\"")]))
        }
        Some("array") => {
            let item = json(schema.get("items").ok_or("an array needs items")?)?;
            let least = size("minItems", 0);
            let most = size("maxItems", least + 3);
            let rest = then(literal(","), item.clone());
            let full = then(
                item,
                repeat(&rest, least.saturating_sub(1), most.saturating_sub(1)),
            );
            let items = match (least, most) {
                (_, 0) => End,
                (0, _) => either(End, full),
                _ => full,
            };
            Ok(all([literal("["), items, literal("]")]))
        }
        Some("object") => {
            let none = serde_json::Map::new();
            let properties = schema.get("properties").and_then(Value::as_object);
            let mut parts = vec![literal("{")];
            for (place, (name, property)) in properties.unwrap_or(&none).iter().enumerate() {
                parts.push(literal(if place == 0 { "" } else { "," }));
                parts.push(literal(&format!("{}:", Value::from(name.as_str()))));
                parts.push(json(property)?);
            }
            parts.push(literal("}"));
            Ok(all(parts))
        }
        _ => Err("names a type that is not known".into()),
    }
}
