use std::sync::Arc;

use proptest::prelude::{Just, ProptestConfig, any, prop_assert_eq, proptest};
use proptest::strategy::{Strategy, Union};
use serde_json::{Value, json};

use super::{ToolDialect, ToolSchemas, forced};
use crate::markup::testing::{characters, cut, parse, soup};
use crate::markup::{Delta, Deltas, Message};

mod broken;
mod required;
mod transcripts;

use transcripts::transcripts;

/// The tools of every test.
fn tools() -> Arc<ToolSchemas> {
    let tool = |name: &str, properties: Value| {
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    Arc::new(ToolSchemas::new(&[
        tool(
            "get_weather",
            json!({"city": {"type": "string"}, "days": {"type": "integer"}}),
        ),
        tool(
            "write_file",
            json!({
                "path": {"type": "string"},
                "text": {"type": "string"},
                "options": {"type": "object"},
                "is_new": {"type": ["boolean", "null"]},
            }),
        ),
        tool("now", json!({})),
    ]))
}

fn run<'a>(name: &str, pieces: impl IntoIterator<Item = &'a str>) -> Message {
    let dialect = ToolDialect::find(name).unwrap_or_else(|| panic!("no dialect {name}"));
    parse(dialect.parser(tools()), pieces)
}

/// Content, and name and arguments of each call.
fn seen(message: &Message) -> (&str, Vec<(&str, &str)>) {
    let calls = message.tool_calls.iter();
    let calls = calls.map(|call| (call.name.as_str(), call.arguments.as_str()));
    (&message.content, calls.collect())
}

/// The first call whose arguments are interrupted by another delta, if any.
fn parted_call(name: &str, pieces: &[&str]) -> Option<u32> {
    let mut parser = ToolDialect::find(name).unwrap().parser(tools());
    let mut out = Deltas::default();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    let mut open = None;
    out.iter().find_map(|delta| {
        match delta {
            Delta::ToolCall { index, .. } => open = Some(index),
            Delta::Arguments { index, .. } if open != Some(index) => return Some(index),
            Delta::Arguments { .. } => {}
            Delta::Content(_) | Delta::Reasoning(_) => open = None,
        }
        None
    })
}

#[test]
fn transcripts_are_read_whole_and_by_the_character() {
    for (name, text, content, calls) in transcripts() {
        for pieces in [vec![*text], characters(text)] {
            assert_eq!(parted_call(name, &pieces), None, "{name}: {text:?}");
            let message = run(name, pieces);
            assert_eq!(
                seen(&message),
                (*content, calls.to_vec()),
                "{name}: {text:?}"
            );
        }
    }
}

#[test]
fn every_dialect_has_a_transcript_with_two_calls() {
    for dialect in ToolDialect::all() {
        let name = dialect.name();
        let mut own = transcripts().filter(|(known, ..)| *known == name);
        assert!(own.any(|(.., calls)| calls.len() == 2), "{name}");
        assert_eq!(ToolDialect::find(name), Some(*dialect));
    }
}

/// The contract for markers, which allows the scanner to find them however the text is cut.
#[test]
fn no_marker_begins_another() {
    for dialect in ToolDialect::all() {
        let markers = dialect.markers();
        for marker in &markers {
            let others = markers.iter().filter(|other| *other != marker);
            for other in others {
                let is_prefix = other.starts_with(marker) && marker.len() > 1;
                assert!(!is_prefix, "{}: {marker:?} {other:?}", dialect.name());
            }
        }
    }
}

#[test]
fn ids_are_the_models_where_it_gives_them() {
    let text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3\
        <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    let message = run("kimi_k2", [text]);
    assert_eq!(message.tool_calls[0].id, "functions.now:3");
    let message = run("mistral", ["[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"]);
    assert_eq!(message.tool_calls[0].id, "abcdefghi");
}

#[test]
fn arguments_stream_as_they_come() {
    for (name, begin, next) in [
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b",
            "b",
        ),
        ("mistral", "[TOOL_CALLS]now[ARGS]{\"a\": \"b", "b"),
        (
            "qwen3_coder",
            "<function=write_file>\n<parameter=text>\nb",
            "b",
        ),
        ("gemma4", "<|tool_call>call:now{a:<|\"|>b", "b"),
        (
            "harmony",
            "<|channel|>commentary to=functions.now<|message|>{\"a\": \"b",
            "b",
        ),
    ] {
        let mut out = Deltas::default();
        let mut parser = ToolDialect::find(name).unwrap().parser(tools());
        parser.push(begin, &mut out);
        assert_eq!(out.calls(), 1, "{name}");
        out.clear();
        parser.push(next, &mut out);
        let deltas: Vec<_> = out.iter().collect();
        let expected = Delta::Arguments {
            index: 0,
            text: next,
            is_custom: false,
        };
        assert_eq!(deltas, [expected], "{name}");
    }
}

#[test]
fn a_value_is_of_a_type_that_any_part_of_its_schema_names() {
    let [any_of, one_of, all_of] = [
        json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
        json!({"oneOf": [{"type": "string"}, {"$ref": "#/$defs/Count"}]}),
        json!({"allOf": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/Text"}]}),
    ];
    let circle = json!({"$ref": "#/$defs/Circle"});
    let defs = json!({
        "Text": {"type": "string"},
        "Count": {"type": "integer"},
        "Circle": {"anyOf": [circle, circle]},
    });
    for (schema, text, expected) in [
        (&any_of, "{\"a\": 1}", json!("{\"a\": 1}")),
        (&any_of, "12", json!("12")),
        (&any_of, "null", json!(null)),
        (&one_of, "12", json!(12)),
        (&one_of, "[1]", json!("[1]")),
        (&all_of, "12", json!("12")),
        (&json!({"$ref": "#/$defs/Text"}), "true", json!("true")),
        (&json!({"$ref": "#/$defs/None"}), "true", json!(true)),
        (&json!({"enum": ["1", "2"]}), "1", json!("1")),
        (&json!({"const": 1}), "1", json!(1)),
        (&circle, "1", json!(1)),
        (
            &json!({"type": "object"}),
            r#"{'a': True, 'b': [None, 1, "it's"]}"#,
            json!({"a": true, "b": [null, 1, "it's"]}),
        ),
        (
            &json!({"type": "array"}),
            "('a', -1_000)",
            json!(["a", -1000]),
        ),
        (&json!({"type": "array"}), "{'a': 1}", json!("{'a': 1}")),
        (&json!({"type": "object"}), "{'a': b}", json!("{'a': b}")),
        (&any_of, "{'a': 1}", json!("{'a': 1}")),
        (&json!({}), "{'a': 1}", json!("{'a': 1}")),
    ] {
        let parameters = json!({"type": "object", "properties": {"a": schema}, "$defs": defs});
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        let tools = Arc::new(ToolSchemas::new(&[tool]));
        for (name, call) in [
            (
                "qwen3_coder",
                format!("<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"),
            ),
            (
                "glm45",
                format!(
                    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
                ),
            ),
        ] {
            let parser = ToolDialect::find(name).unwrap().parser(Arc::clone(&tools));
            let message = parse(parser, [call.as_str()]);
            let arguments: Value = serde_json::from_str(&message.tool_calls[0].arguments).unwrap();
            assert_eq!(arguments, json!({"a": expected}), "{name} {schema} {text}");
        }
    }
}

#[test]
fn forced_calls_are_read_from_plain_json() {
    let text = r#"[{"name": "get_weather", "parameters": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]"#;
    for pieces in [vec![text], characters(text)] {
        let message = parse(forced::calls_parser(tools()), pieces);
        let calls = vec![("get_weather", r#"{"city": "Oslo"}"#), ("now", "{}")];
        assert_eq!(seen(&message), ("", calls));
    }
    let text = r#"{"city": "Oslo", "note": "<tool_call>"}"#;
    for pieces in [vec![text], characters(text)] {
        let message = parse(forced::arguments_parser("get_weather".into()), pieces);
        assert_eq!(seen(&message), ("", vec![("get_weather", text)]));
    }
}

#[test]
fn a_fence_of_calls_ends_them_and_other_fences_are_text() {
    for content in [
        "max(a=1) is\n```python\nmax(a=1)\n```",
        "```python\nmax(a=1)",
        "`max`",
    ] {
        let text = format!("```tool_code\nnow()\n```\n{content}");
        for pieces in [vec![text.as_str()], characters(&text)] {
            let message = run("gemma3", pieces);
            assert_eq!(seen(&message), (content, vec![("now", "{}")]));
        }
    }
}

#[test]
fn lists_of_one_name_are_a_list_of_lists() {
    let text = "<invoke name=now><a><l><item>1</item></l><l><item>2</item></l></a></invoke>";
    let text = text.replace('<', "]<]minimax[>[<");
    let message = run("minimax_m3", [text.as_str()]);
    let arguments = r#"{"a": {"l":[[1],[2]]}}"#;
    assert_eq!(seen(&message), ("", vec![("now", arguments)]));
}

#[test]
fn xlam_may_write_its_list_in_tags() {
    let list = r#"[{"name": "now", "arguments": {}}]"#;
    for text in [
        format!("<tool_call>{list}</tool_call>"),
        format!("{list}\n[1]: So."),
    ] {
        let content = if text.ends_with('.') { "[1]: So." } else { "" };
        for pieces in [vec![text.as_str()], characters(&text)] {
            assert_eq!(
                seen(&run("xlam", pieces)),
                (content, vec![("now", "{}")]),
                "{text}"
            );
        }
    }
}

/// Text besides markers: signs, and what is found between markers.
const SIGNS: &[&str] = &[
    " ", "\n", "a", "<", "é", "</", "[", "]", "{", "}", "\"", ",", ":", "=", "(", ")", "now",
];
const INSIDE: &[&str] = &[
    "\"name\"",
    "{\"name\": \"now\", \"arguments\": {",
    "{\"a\": \"b\"}",
    "now(a=1)",
    "commentary to=functions.now",
];

fn dialects() -> impl Strategy<Value = ToolDialect> {
    Union::new(ToolDialect::all().iter().copied().map(Just))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However any dialect's transcripts are cut, and wherever they break off, the result is that of the whole text, and no
    /// marker is content.
    #[test]
    fn any_cutting_is_read_alike(end: usize, cuts in proptest::collection::vec(any::<usize>(), 0..12)) {
        for (name, text, ..) in transcripts() {
            let text = cut(text, &[end])[0];
            let whole = run(name, [text]);
            prop_assert_eq!(&run(name, cut(text, &cuts)), &whole);
            prop_assert_eq!(&run(name, characters(text)), &whole);
            let is_markup = |marker: &&str| marker.len() > 2 && whole.content.contains(*marker);
            let markers = ToolDialect::find(name).unwrap().markers();
            prop_assert_eq!(markers.into_iter().find(is_markup), None, "{}", name);
        }
    }
}

proptest! {
    /// The same for text that no model would write.
    #[test]
    fn any_soup_is_read_alike(
        (name, text) in dialects().prop_flat_map(|dialect| {
            (Just(dialect.name()), soup([SIGNS, INSIDE].concat(), dialect.markers()))
        }),
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let whole = run(name, [text.as_str()]);
        prop_assert_eq!(&run(name, cut(&text, &cuts)), &whole);
        prop_assert_eq!(&run(name, characters(&text)), &whole);
        prop_assert_eq!(parted_call(name, &cut(&text, &cuts)), None);
    }

    /// Text without markers passes unchanged, even if it looks like the beginning of one.
    #[test]
    fn plain_text_is_content(
        dialect in dialects(), text in "[<|>/a-z \\n\\[\\]{}\"=TOL_]{0,60}",
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let is_marked = dialect.markers().iter().any(|marker| text.contains(marker));
        if !is_marked && !text.trim_start().starts_with("to=") {
            let message = run(dialect.name(), cut(&text, &cuts));
            prop_assert_eq!(seen(&message), (text.as_str(), vec![]));
        }
    }
}

/// The model families that applications name have a parser.
#[test]
fn the_families_of_the_field_have_parsers() {
    for name in [
        "hermes",
        "llama3_json",
        "mistral",
        "pythonic",
        "qwen3_coder",
        "deepseek",
        "harmony",
        "phi4",
        "glm",
        "kimi",
        "minimax",
        "nemotron_deci",
        "poolside_v1",
    ] {
        assert!(ToolDialect::find(name).is_some(), "{name}");
    }
}
