use serde_json::{Value, json};

use super::super::limits::GuideLimits;
use super::check;

fn refusal(schema: &Value) -> String {
    check(&GuideLimits::default(), schema).expect_err("over a limit")
}

/// `count` definitions, each of which `definition` makes of the reference to the next.
fn chain(count: usize, definition: impl Fn(Value) -> Value) -> Value {
    let name = |at: usize| format!("d{at}");
    let next = |at: usize| json!({"$ref": format!("#/$defs/d{}", at + 1)});
    let mut definitions: serde_json::Map<String, Value> = (0..count)
        .map(|at| (name(at), definition(next(at))))
        .collect();
    definitions.insert(name(count), json!({"type": "null"}));
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

#[test]
fn what_references_make_deep_is_counted() {
    let deep = |next| (0..30).fold(next, |inner, _| json!({"anyOf": [inner]}));
    assert!(refusal(&chain(622, deep)).contains("8192 objects"));
    assert!(refusal(&chain(1500, |next| next)).contains("1024 different references"));
}

#[test]
fn schemas_of_practice_are_within() {
    let property = |at: usize| json!({"type": "string", "description": format!("the {at}th")});
    let properties: serde_json::Map<String, Value> = (0..1000)
        .map(|at| (format!("p{at}"), property(at)))
        .collect();
    let names: Vec<&String> = properties.keys().collect();
    let schema = json!({"type": "object", "required": names, "properties": properties, "additionalProperties": false});
    assert_eq!(check(&GuideLimits::default(), &schema), Ok(()));
    let small = chain(
        500,
        |next| json!({"type": "object", "properties": {"next": next}}),
    );
    assert_eq!(check(&GuideLimits::default(), &small), Ok(()));
}
