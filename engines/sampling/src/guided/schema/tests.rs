use std::thread;

use serde_json::{Value, json};

use super::super::limits::GuideLimits;
use super::super::tests::chain;
use super::check_lark;

/// Checks on a stack like the compiler's.
fn check(schema: &Value) -> Result<(), String> {
    thread::scope(|scope| {
        let checked = thread::Builder::new()
            .stack_size(256 << 20)
            .spawn_scoped(scope, || super::check(&GuideLimits::default(), schema));
        checked.unwrap().join().unwrap()
    })
}

fn refusal(schema: &Value) -> String {
    check(schema).expect_err("over a limit")
}

#[test]
fn what_references_make_deep_is_counted() {
    let deep = |next| (0..30).fold(next, |inner, _| json!({"anyOf": [inner]}));
    assert!(refusal(&chain(622, deep)).contains("8192 objects"));
    assert!(refusal(&chain(1500, |next| next)).contains("1024 different references"));
}

/// Comparing all pairs, or all names with each other, would take seconds and hours within the limit of bytes.
#[test]
fn properties_and_patterns_of_an_object_are_counted() {
    let named = |count: usize, keyword: &str| {
        let schemas: serde_json::Map<String, Value> = (0..count)
            .map(|at| (format!("^{at}$"), json!({})))
            .collect();
        json!({"type": "object", keyword: schemas})
    };
    assert_eq!(check(&named(2048, "properties")), Ok(()));
    assert_eq!(check(&named(32, "patternProperties")), Ok(()));
    assert!(refusal(&named(2049, "properties")).contains("2048 properties"));
    assert!(refusal(&named(33, "patternProperties")).contains("32 patternProperties"));
    // The same with names that are only required, and with constant values.
    let names = |count: usize| (0..count).map(|at| format!("p{at}")).collect::<Vec<_>>();
    let required = |count: usize| json!({"properties": {"p": {}}, "required": names(count)});
    let value = |count: usize| {
        let entries: serde_json::Map<String, Value> = (names(count).into_iter())
            .map(|name| (name, json!(1)))
            .collect();
        json!([entries])
    };
    assert_eq!(check(&required(2047)), Ok(()));
    assert!(refusal(&required(2048)).contains("2048 properties"));
    assert_eq!(check(&json!({"const": value(2048)})), Ok(()));
    assert!(refusal(&json!({"const": value(2049)})).contains("2048 properties"));
    assert!(refusal(&json!({"enum": [1, value(2049)]})).contains("2048 properties"));
    // All together, and again for each option.
    let other = json!({"patternProperties": {"^a$": {}}});
    let both = json!({"allOf": [named(32, "patternProperties"), other]});
    assert!(refusal(&both).contains("32 patternProperties"));
    let options = vec![json!({"type": "object"}); 100];
    let again = json!({"allOf": [named(32, "patternProperties"), {"anyOf": options}]});
    assert!(refusal(&again).contains("multiply"));
    let lark = |schema: &Value| {
        let text = format!("start: a b\na: %json {schema}\nb: %json {schema}\n");
        check_lark(&GuideLimits::default(), &text)
    };
    assert_eq!(lark(&named(32, "patternProperties")), Ok(()));
    assert!(lark(&named(33, "patternProperties")).is_err());
    let options = vec![json!({"type": "object"}); 20];
    let half = json!({"allOf": [named(32, "patternProperties"), {"anyOf": options}]});
    assert_eq!(check(&half), Ok(()));
    assert!(lark(&half).is_err());
    assert_eq!(
        check_lark(&GuideLimits::default(), "start: \"%json\" // %json {"),
        Ok(())
    );
}

/// The schemas are small, but llguidance would expand them to gigabytes.
#[test]
fn what_merged_parts_become_is_counted() {
    let names = |count: usize| (0..count).map(|at| format!("p{at}")).collect::<Vec<_>>();
    let properties: serde_json::Map<String, Value> = names(2000)
        .into_iter()
        .map(|name| (name, json!(true)))
        .collect();
    let options = vec![json!({"type": "object"}); 6900];
    let twice = |next: Value| {
        let mut typed = next;
        typed["type"] = json!("object");
        json!({"properties": {"a": typed, "b": typed}})
    };
    // The same if the merged parts are properties of the same name.
    let twice_within = |next: Value| {
        let both = json!({"properties": {"a": next, "b": next}});
        let object = json!({"type": "object"});
        json!({"allOf": [both, {"properties": {"a": object, "b": object}}]})
    };
    let nested = |inner: Value| json!({"properties": {"a": inner}});
    let mut again = vec![json!({}); 1000];
    again[0] = json!({"oneOf": vec![json!({"type": "object"}); 250]});
    let cases = [
        json!({"allOf": [{"type": "object", "required": names(2000)}, {"anyOf": options}]}),
        json!({"allOf": [nested(json!({"required": names(2000)})), nested(json!({"anyOf": options}))]}),
        json!({"enum": names(4000), "pattern": "a".repeat(30_000)}),
        json!({"allOf": [{"properties": properties}, {"additionalProperties": {"enum": names(4000)}}]}),
        json!({"oneOf": vec![json!({"type": "object"}); 4000]}),
        // Each pair is compared by each name, and again with its neighbours.
        json!({"allOf": [{"type": "object", "required": names(2000)}, {"oneOf": vec![json!({"type": "object"}); 60]}]}),
        json!({"allOf": again}),
        chain(30, twice),
        chain(30, twice_within),
        chain(
            1000,
            |next| json!({"items": {"$ref": next["$ref"], "type": "array"}}),
        ),
    ];
    for schema in &cases {
        let refusal = refusal(schema);
        let start: String = schema.to_string().chars().take(200).collect();
        assert!(refusal.contains("multiply"), "{start}: {refusal}");
    }
    let counted = |keyword: &str| {
        let object = json!({"properties": properties, "additionalProperties": false});
        json!({"allOf": [object, {keyword: 1}]})
    };
    assert!(refusal(&counted("minProperties")).contains("optional properties"));
    assert!(refusal(&counted("maxProperties")).contains("optional properties"));
    assert!(refusal(&json!({"$ref": "#/$defs/none"})).contains("nothing"));
    let typed = |types: Vec<&str>| json!({"type": types, "properties": properties});
    assert!(refusal(&typed(vec!["object"; 4000])).contains("more than once"));
    assert!(refusal(&json!({"items": typed(vec!["null", "null"])})).contains("more than once"));
    let every = "null boolean number integer string array object";
    assert_eq!(check(&typed(every.split(' ').collect())), Ok(()));
}

#[test]
fn schemas_of_practice_are_within() {
    let property = |at: usize| json!({"type": "string", "description": format!("the {at}th")});
    let properties: serde_json::Map<String, Value> = (0..1000)
        .map(|at| (format!("p{at}"), property(at)))
        .collect();
    let names: Vec<&String> = properties.keys().collect();
    let schema = json!({"type": "object", "required": names, "properties": properties, "additionalProperties": false});
    assert_eq!(check(&schema), Ok(()));
    let small = chain(
        500,
        |next| json!({"type": "object", "properties": {"next": next}}),
    );
    let address = json!({"type": "object", "properties": {"street": {"type": "string"}, "next": {"$ref": "#/$defs/person"}}});
    let person = json!({"allOf": [
        {"$ref": "#/$defs/address"},
        {"type": "object", "properties": {
            "name": {"type": ["string", "null"]},
            "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}},
        }, "required": ["name"], "minProperties": 1},
    ]});
    let recursive =
        json!({"$ref": "#/$defs/person", "$defs": {"address": address, "person": person}});
    let names: Vec<String> = (0..4000).map(|at| format!("value {at}")).collect();
    let values = json!({"type": "string", "enum": names, "description": "one of many"});
    let tools: Vec<Value> = (0..128)
        .map(|at| {
            let named = json!({"type": "object", "properties": {"name": {"const": format!("tool {at}")}, "arguments": recursive["$defs"]["address"]}});
            json!({"anyOf": [named, {"type": "null"}], "title": "a tool"})
        })
        .collect();
    let calls = json!({"type": "array", "items": {"anyOf": tools}, "$defs": recursive["$defs"]});
    let shapes: Vec<Value> = (0..100)
        .map(|at| json!({"type": "object", "properties": {"kind": {"const": at}, "of": {"type": "array"}}, "required": ["kind", "of", "name"]}))
        .collect();
    let one_of =
        json!({"type": "object", "properties": {"name": {"type": "string"}}, "oneOf": shapes});
    let nullable = json!({"type": ["string", "null"], "oneOf": [values, {"type": "null"}]});
    for schema in [&small, &recursive, &values, &calls, &one_of, &nullable] {
        assert_eq!(check(schema), Ok(()));
    }
}
