//! The schema that constrains the engine if the request must call a tool.

use genset_backend_common::{GuidedDecoding, TokenId};
use genset_sampling::guided::{GuideFactory, Vocabulary};
use serde_json::{Value, json};

use crate::tools::forced;

/// The end of a sequence; the tokens before it are one for each byte.
const END: TokenId = 256;

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

/// Whether an engine that is constrained to calls of these tools may write the text.
fn may_write(tools: &[Value], text: &str) -> bool {
    let mut vocabulary = Vocabulary::unused(257);
    for byte in 0..=u8::MAX {
        vocabulary.set_text(byte.into(), vec![byte]);
    }
    vocabulary.set_special(END, "<end>".into());
    let factory = GuideFactory::of_vocabulary(vocabulary, &[END]).unwrap();
    let guided = GuidedDecoding::JsonSchema(forced::calls_schema(tools, true));
    let mut guide = factory.compile(&guided).unwrap();
    text.bytes().all(|byte| guide.accept(byte.into()).is_ok()) && guide.accept(END).is_ok()
}

#[test]
fn the_schema_joins_those_of_the_tools() {
    let unit = json!({"$ref": "#/$defs/Unit"});
    let with = |unit_schema: Value| json!({"type": "object", "properties": {"unit": unit}, "$defs": {"Unit": unit_schema}});
    let tools = [
        tool("a", with(json!({"enum": ["C"]}))),
        tool("b", with(json!({"enum": ["F"]}))),
        tool("c", Value::Null),
    ];
    let schema = forced::calls_schema(&tools, false);
    assert_eq!(
        (&schema["minItems"], &schema["maxItems"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(forced::calls_schema(&tools, true).get("maxItems"), None);
    let first = &schema["items"]["anyOf"][0]["properties"];
    let expected = json!({"name": {"const": "a"}, "parameters": {"$ref": "#/$defs/tool_0"}});
    assert_eq!(*first, expected);
    let expected = json!({
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/tool_1/$defs/Unit"}},
        "$defs": {"Unit": {"enum": ["F"]}},
    });
    assert_eq!(schema["$defs"]["tool_1"], expected);
    let expected = json!({"type": "object", "properties": {}});
    assert_eq!(schema["$defs"]["tool_2"], expected);
    for (call, may) in [
        (r#"{"name":"a","parameters":{"unit":"C"}}"#, true),
        (r#"{"name":"b","parameters":{"unit":"F"}}"#, true),
        (r#"{"name":"b","parameters":{"unit":"C"}}"#, false),
        (r#"{"name":"c","parameters":{}}"#, true),
    ] {
        assert_eq!(may_write(&tools, &format!("[{call}]")), may, "{call}");
    }
}

#[test]
fn a_tool_that_refers_to_its_root_is_a_tree_of_its_own() {
    let tree = json!({
        "type": "object",
        "properties": {
            "value": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["value", "children"],
        "additionalProperties": false,
    });
    let tools = [tool("t", tree)];
    let child = |child: &str| {
        format!(r#"[{{"name":"t","parameters":{{"value":"a","children":[{child}]}}}}]"#)
    };
    assert!(may_write(&tools, &child(r#"{"value":"b","children":[]}"#)));
    assert!(!may_write(
        &tools,
        &child(r#"[{"name":"t","parameters":{"value":"b","children":[]}}]"#)
    ));
}

#[test]
fn references_to_any_place_in_a_tools_schema_are_followed() {
    for (reference, place) in [
        ("#/definitions/Unit", "definitions"),
        ("#/$defs/Unit", "$defs"),
        ("#/properties/Unit", "properties"),
    ] {
        let mut schema = json!({
            "$id": "https://example.com/unit",
            "type": "object",
            "properties": {"to": {"$ref": reference}},
            "required": ["to"],
            "additionalProperties": false,
        });
        schema[place]["Unit"] = json!({"enum": ["C", "F"]});
        let tools = [tool("now", json!({})), tool("convert", schema)];
        let call = |unit: &str| format!(r#"[{{"name":"convert","parameters":{{"to":"{unit}"}}}}]"#);
        assert!(may_write(&tools, &call("F")), "{reference}");
        assert!(!may_write(&tools, &call("K")), "{reference}");
    }
}

#[test]
fn only_references_of_schemas_are_led_elsewhere() {
    let data = json!({"$ref": "#"});
    let inner = |reference: &str| {
        json!({
            "properties": {
                "$ref": {"$ref": reference},
                "const": {"$ref": reference},
                "properties": {"allOf": [{"$ref": reference}, {"default": data}]},
            },
            "dependencies": {"$ref": ["const"]},
            "required": ["$ref"],
            "const": data,
            "enum": [data, [data]],
            "default": data,
            "examples": [data],
        })
    };
    let moved = |from: &str| {
        let schema = forced::calls_schema(&[tool("t", inner(from))], true);
        schema["$defs"]["tool_0"].clone()
    };
    let root = "#/$defs/tool_0";
    for (from, to) in [
        ("#", root),
        ("#/", root),
        ("#/properties/$ref", "#/$defs/tool_0/properties/$ref"),
        ("#anchor", "#anchor"),
        ("https://example.com/a#/b", "https://example.com/a#/b"),
    ] {
        assert_eq!(moved(from), inner(to), "{from}");
    }
    let named = forced::arguments_schema(&tool("t", inner("#")));
    assert_eq!(named, inner("#"));
}
