//! Values that a schema of the document allows, and values with one thing wrong.
//!
//! Allowed values are drawn by kind and unevenly: bounds and odd texts are frequent. A validator, not this file, decides whether
//! a spoiled value is really forbidden.

use proptest::collection::vec;
use proptest::prelude::{BoxedStrategy, Just, Strategy, any, prop_oneof};
use proptest::sample::{Index, select};
use proptest::strategy::Union;
use serde_json::{Map, Value, json};

use super::document::Document;

/// Texts that often break programs.
const TEXTS: &[&str] = &[
    "Hello there",
    "a",
    " ",
    "\u{0}",
    "\u{feff}",
    "\u{202e}שלום",
    "e\u{301}\u{301}\u{301}",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "\u{10ffff}\u{fffd}",
    "<|im_end|>",
    "<tool_call>{",
    "{{ 1 / 0 }}",
    "../../etc/passwd",
    "data: [DONE]\n\n",
    "\r\n\r\n",
    "\\ud800",
    "null",
];

/// Any JSON at all, small.
pub(super) fn anything() -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text().prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::from),
            vec((text(), inner), 0..3).prop_map(|fields| fields.into_iter().collect()),
        ]
    });
    value.boxed()
}

fn text() -> BoxedStrategy<String> {
    prop_oneof![
        select(TEXTS).prop_map(str::to_owned),
        ".{0,12}",
        Just("long ".repeat(300)),
    ]
    .boxed()
}

/// Values that `schema` allows.
pub(super) fn allowed(document: &Document, schema: &Value) -> BoxedStrategy<Value> {
    let schema = document.resolve(schema);
    for choice in ["anyOf", "oneOf"] {
        if let Some(branches) = schema[choice].as_array() {
            let branches = branches.iter().map(|branch| allowed(document, branch));
            return Union::new(branches.collect::<Vec<_>>()).boxed();
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        return select(values.clone()).boxed();
    }
    if let Some(value) = schema.get("const") {
        return Just(value.clone()).boxed();
    }
    match &schema["type"] {
        Value::String(kind) => of_kind(document, schema, kind),
        Value::Array(kinds) => {
            let kinds = kinds.iter().filter_map(Value::as_str);
            let kinds = kinds.map(|kind| {
                let weight = if kind == "null" { 1 } else { 8 };
                (weight, of_kind(document, schema, kind))
            });
            Union::new_weighted(kinds.collect()).boxed()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => anything(),
    }
}

fn of_kind(document: &Document, schema: &Value, kind: &str) -> BoxedStrategy<Value> {
    match kind {
        "null" => Just(Value::Null).boxed(),
        "boolean" => any::<bool>().prop_map(Value::from).boxed(),
        "integer" => integer(schema),
        "number" => number(schema),
        "string" => string(schema),
        "array" => {
            let least = size(schema, "minItems").unwrap_or(0);
            let most = size(schema, "maxItems").unwrap_or(usize::MAX);
            let items = allowed(document, &schema["items"]);
            let sizes = least..=most.min(least + 3);
            vec(items, sizes).prop_map(Value::from).boxed()
        }
        "object" => object(document, schema),
        other => panic!("a type without values: {other}"),
    }
}

fn size(schema: &Value, bound: &str) -> Option<usize> {
    let size = schema[bound].as_u64()?;
    Some(usize::try_from(size).expect("a small bound"))
}

fn integer(schema: &Value) -> BoxedStrategy<Value> {
    let least = schema["minimum"].as_i64().unwrap_or(i64::MIN);
    let most = schema["maximum"].as_i64().unwrap_or(i64::MAX);
    let small = least.max(0)..=most.min(least.max(0).saturating_add(20));
    prop_oneof![
        6 => small,
        1 => Just(least),
        1 => Just(most),
        1 => least..=most,
    ]
    .prop_map(Value::from)
    .boxed()
}

/// In quarters, so that no bound is reached by rounding alone.
fn number(schema: &Value) -> BoxedStrategy<Value> {
    let bound = |name: &str| schema[name].as_f64();
    let least = bound("minimum").or(bound("exclusiveMinimum").map(|least| least + 0.25));
    let least = least.unwrap_or(-1000.0);
    let most = bound("maximum").unwrap_or(1000.0).min(1000.0);
    let between = (0..=8_u8).prop_map(move |part| least + (most - least) * f64::from(part) / 8.0);
    prop_oneof![between, Just(least), Just(most)]
        .prop_map(Value::from)
        .boxed()
}

fn string(schema: &Value) -> BoxedStrategy<Value> {
    if let Some(pattern) = schema["pattern"].as_str() {
        let inner = pattern.trim_start_matches('^').trim_end_matches('$');
        let strings = proptest::string::string_regex(inner).expect("a pattern");
        return strings.prop_map(Value::from).boxed();
    }
    let least = size(schema, "minLength").unwrap_or(0);
    let most = size(schema, "maxLength").unwrap_or(usize::MAX);
    // No odd text equals a forbidden value.
    text()
        .prop_map(move |text| {
            let cut: String = text.chars().take(most).collect();
            let missing = least.saturating_sub(cut.chars().count());
            Value::from(cut + &"x".repeat(missing))
        })
        .boxed()
}

fn object(document: &Document, schema: &Value) -> BoxedStrategy<Value> {
    let required: Vec<&str> = schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let no_fields = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&no_fields);
    // Sets only a few of many fields at once, so that one refusal does not hide all others.
    let chance = (4.0 / (properties.len() as f64)).clamp(0.05, 0.5);
    let mut names = Vec::new();
    let mut fields: Vec<BoxedStrategy<Option<Value>>> = Vec::new();
    for (name, schema) in properties {
        let value = allowed(document, schema);
        names.push(name.clone());
        fields.push(if required.contains(&name.as_str()) {
            value.prop_map(Some).boxed()
        } else {
            proptest::option::weighted(chance, value).boxed()
        });
    }
    let further = further(document, schema);
    (fields, further)
        .prop_map(move |(values, further)| {
            let fields = names.iter().cloned().zip(values);
            let mut object: Map<String, Value> = fields
                .filter_map(|(name, value)| Some((name, value?)))
                .collect();
            for (name, value) in further {
                object.entry(name).or_insert(value);
            }
            Value::Object(object)
        })
        .boxed()
}

/// Unlisted fields, as far as they are allowed.
fn further(document: &Document, schema: &Value) -> BoxedStrategy<Vec<(String, Value)>> {
    let names = if schema.get("propertyNames").is_some() {
        (0_u32..2048).prop_map(|id| id.to_string()).boxed()
    } else {
        text().prop_map(|text| format!("x{text}")).boxed()
    };
    let values = match schema.get("additionalProperties") {
        None => anything(),
        Some(values) => allowed(document, values),
    };
    vec((names, values), 0..2).boxed()
}

/// A place in a value: the names and indices that lead there, and the schema that applies there.
#[derive(Debug, Clone)]
struct Spot {
    path: Vec<String>,
    schema: Value,
}

fn spots(
    document: &Document,
    schema: &Value,
    value: &Value,
    path: &[String],
    found: &mut Vec<Spot>,
) {
    let schema = document.resolve(schema);
    found.push(Spot {
        path: path.to_vec(),
        schema: schema.clone(),
    });
    let branches = ["anyOf", "oneOf"].map(|choice| schema[choice].as_array());
    for branch in branches.into_iter().flatten().flatten() {
        let branch = document.resolve(branch);
        if fits(branch, value) {
            spots(document, branch, value, path, found);
        }
    }
    let below = |name: String| [path, &[name]].concat();
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if let Some(schema) = schema["properties"].get(name) {
                    spots(document, schema, value, &below(name.clone()), found);
                }
            }
        }
        Value::Array(items) if schema.get("items").is_some() => {
            for (index, item) in items.iter().enumerate() {
                let path = below(index.to_string());
                spots(document, &schema["items"], item, &path, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {}
    }
}

/// Whether a value may have been made for this branch.
fn fits(branch: &Value, value: &Value) -> bool {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_kind = match &branch["type"] {
        Value::String(one) => one == kind,
        Value::Array(kinds) => kinds.contains(&kind.into()),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => true,
    };
    let tags = ["type", "role"].iter().all(|tag| {
        let allowed = branch["properties"][tag]["enum"].as_array();
        allowed.is_none_or(|allowed| allowed.contains(&value[tag]))
    });
    is_kind && tags
}

/// Returns a value with one thing changed, and the place. The result is mostly forbidden.
pub(super) fn spoil(
    document: &Document,
    schema: &Value,
    value: &Value,
    (place, change): (Index, Index),
) -> (Vec<String>, Value) {
    let mut found = Vec::new();
    spots(document, schema, value, &[], &mut found);
    let spot = place.get(&found).clone();
    let pointer: String = spot.path.iter().map(|name| format!("/{name}")).collect();
    // A name may contain a slash; those values are left unchanged.
    let Some(there) = value.pointer(&pointer) else {
        return (Vec::new(), Value::Null);
    };
    let (further, replacement) = change.get(&changes(&spot.schema, there)).clone();
    let mut spoiled = value.clone();
    if let Some(there) = spoiled.pointer_mut(&pointer) {
        *there = replacement;
    }
    let path = spot.path.into_iter().chain(further).collect();
    (path, spoiled)
}

/// Replacements for a value, each with the name of its field at fault, if it is a field.
fn changes(schema: &Value, value: &Value) -> Vec<(Option<String>, Value)> {
    let deep = (0..90).fold(json!(1), |inner, _| json!([inner]));
    let mut changes: Vec<(Option<String>, Value)> = [
        Value::Null,
        json!(true),
        json!(-1),
        json!(0),
        json!(1.5),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1e300),
        json!(""),
        json!("🦀"),
        json!("x".repeat(5000)),
        json!([]),
        json!({}),
        json!([[]]),
        json!({"a": {"b": []}}),
        json!({"type": "unheard-of"}),
        deep,
    ]
    .map(|value| (None, value))
    .into();
    for (bound, beyond) in [("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)] {
        if let Some(bound) = schema[bound].as_f64() {
            changes.push((None, json!(bound + f64::from(beyond))));
        }
        if let Some(bound) = schema[bound].as_i64() {
            changes.push((None, json!(bound.saturating_add(i64::from(beyond)))));
        }
    }
    if let (Some(most), Some(first)) = (size(schema, "maxItems"), value.get(0)) {
        changes.push((None, vec![first.clone(); most + 1].into()));
    }
    if let Some(most) = size(schema, "maxLength") {
        changes.push((None, "x".repeat(most + 1).into()));
    }
    if let Value::Object(fields) = value {
        for name in fields.keys() {
            let mut less = fields.clone();
            less.remove(name);
            changes.push((Some(name.clone()), less.into()));
        }
        for value in [json!(1), json!("x"), json!({})] {
            let mut more = fields.clone();
            more.insert("unheard_of".into(), value);
            changes.push((Some("unheard_of".into()), more.into()));
        }
    }
    changes
}
