use super::testing::{characters, split};
use super::*;
use crate::reasoning::ReasoningDialect;
use crate::tools::{ToolDialect, ToolSchemas, forced};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;

fn tools() -> Arc<ToolSchemas> {
    let tool = json!({"type": "function", "function": {"name": "get_weather"}});
    Arc::new(ToolSchemas::new(&[tool]))
}

fn both(reasoning: &str, tool: &str) -> Splitter {
    let reasoning = ReasoningDialect::find(reasoning).unwrap();
    let tool = ToolDialect::find(tool).unwrap();
    let reasoning = reasoning.parser(None, true);
    Splitter::new(reasoning, Some(tool.parser(tools())), tool.id_style())
}

const TWO_CALLS: &str = "<think>\nHm.\n</think>\n\nI look.\n\
    <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn thoughts_and_calls_are_told_apart() {
    for pieces in [vec![TWO_CALLS], characters(TWO_CALLS)] {
        let message = split(both("qwen3", "hermes"), pieces);
        assert_eq!(message.reasoning, "Hm.");
        assert_eq!(message.content, "I look.");
        let arguments = message
            .tool_calls
            .iter()
            .map(|call| call.arguments.as_str());
        let arguments: Vec<&str> = arguments.collect();
        assert_eq!(arguments, [r#"{"city": "Oslo"}"#, r#"{"city": "Rome"}"#]);
    }
}

#[test]
fn the_input_of_a_custom_tool_is_the_text_in_its_arguments() {
    let names = Arc::new(BTreeSet::from(["run".to_owned()]));
    for (arguments, input) in [
        (r#"{"input": "a \"b\"\n"}"#, "a \"b\"\n"),
        (r#"{"input": "a b"#, "a b"),
        (r#"{"input": "a b""#, "a b"),
        (r#"{"input": "a b\"#, "a b"),
        (r#"{"input": "a b\ud83d\ude0"#, "a b"),
        (r#"{"text": "a"}"#, r#"{"text": "a"}"#),
        (r#"{"input": ""}"#, ""),
    ] {
        let parser = forced::arguments_parser("run".into());
        let splitter = Splitter::new(None, Some(parser), IdStyle::Call);
        let splitter = splitter.with_custom(Some(Arc::clone(&names)));
        let call = split(splitter, characters(arguments)).tool_calls.remove(0);
        assert_eq!((call.arguments.as_str(), call.is_custom), (input, true));
    }
}

#[test]
fn a_frame_around_the_content_ends_before_a_call() {
    let text = "Hm.\n</think>\n\n<response>\nI will look.\n</response>\n\n<tool_call>\n\
        {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";
    for pieces in [vec![text], characters(text)] {
        let message = split(both("ernie45", "hermes"), pieces);
        assert_eq!(message.reasoning, "Hm.");
        assert_eq!(message.content, "I will look.");
        assert_eq!(message.tool_calls[0].arguments, r#"{"city": "Oslo"}"#);
    }
}

#[test]
fn a_call_in_the_thoughts_ends_them() {
    let text = "<think>I call.<tool_call>get_weather<arg_key>city</arg_key>\
        <arg_value>Oslo</arg_value></tool_call>";
    for pieces in [vec![text], characters(text)] {
        let message = split(both("glm45", "glm45"), pieces);
        assert_eq!(
            (message.reasoning.as_str(), message.content.as_str()),
            ("I call.", "")
        );
        assert_eq!(message.tool_calls[0].arguments, r#"{"city": "Oslo"}"#);
    }
}

#[test]
fn a_call_of_gemma_or_kimi_ends_the_thoughts() {
    let kimi = "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Oslo\"}<|tool_call_end|>";
    for (name, text) in [
        (
            "gemma4",
            "<|channel>thought\nI call.<|tool_call>call:get_weather{city:<|\"|>Oslo<|\"|>}<tool_call|>"
                .to_owned(),
        ),
        (
            "kimi_k2",
            format!(
                "<think>I call.<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>"
            ),
        ),
        ("kimi_k2", format!("<think>I call.{kimi}")),
    ] {
        for pieces in [vec![text.as_str()], characters(&text)] {
            let message = split(both(name, name), pieces);
            assert_eq!(
                (message.reasoning.as_str(), message.content.as_str()),
                ("I call.", ""),
                "{text}"
            );
            let arguments = &message.tool_calls[0].arguments;
            assert_eq!(arguments, r#"{"city": "Oslo"}"#, "{text}");
        }
    }
}

#[test]
fn a_call_in_each_format_of_deepseek_ends_the_thoughts() {
    let invoke = "<｜DSML｜invoke name=\"get_weather\">\n\
        <｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>";
    for (tool, call) in [
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Oslo\"}\
             <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
                .to_owned(),
        ),
        (
            "deepseek_v32",
            format!("<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"),
        ),
        (
            "deepseek_v4",
            format!("<｜DSML｜tool_calls>\n{invoke}\n</｜DSML｜tool_calls>"),
        ),
    ] {
        let text = format!("<think>I call.{call}");
        for pieces in [vec![text.as_str()], characters(&text)] {
            let message = split(both("deepseek_v31", tool), pieces);
            assert_eq!(
                (message.reasoning.as_str(), message.content.as_str()),
                ("I call.", ""),
                "{tool}"
            );
            let calls = message.tool_calls.iter();
            let arguments: Vec<&str> = calls.map(|call| call.arguments.as_str()).collect();
            assert_eq!(arguments, [r#"{"city": "Oslo"}"#], "{tool}");
        }
    }
}

#[test]
fn markers_of_thoughts_in_a_calls_arguments_are_text() {
    for (reasoning, tool, begin, end) in [
        (
            "qwen3",
            "hermes",
            "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"",
            "\"}}</tool_call>",
        ),
        (
            "deepseek_r1",
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>",
            "</arg_value>\n</tool_call>",
        ),
        (
            "qwen3",
            "mistral",
            "[TOOL_CALLS]get_weather[ARGS]{\"city\": \"",
            "\"}",
        ),
        (
            "qwen3",
            "gemma4",
            "<|tool_call>call:get_weather{city:<|\"|>",
            "<|\"|>}<tool_call|>",
        ),
        (
            "qwen3",
            "lfm2",
            "<|tool_call_start|>[get_weather(city=\"",
            "\")]<|tool_call_end|>",
        ),
    ] {
        for city in [
            "re.sub('<think>.*?</think>', '', s)",
            "a </think> b",
            "a <think> b",
        ] {
            let call = format!("{begin}{city}{end}");
            let text = format!("<think>Hm.\n</think>{call}{call}<think>So.</think>");
            for pieces in [vec![text.as_str()], characters(&text)] {
                let message = split(both(reasoning, tool), pieces);
                assert_eq!(message.reasoning, "Hm.\nSo.", "{tool}: {city}");
                assert_eq!(message.content, "", "{tool}: {city}");
                let calls = message.tool_calls.iter();
                let arguments: Vec<serde_json::Value> = calls
                    .map(|call| serde_json::from_str(&call.arguments).unwrap())
                    .collect();
                let expected = json!({"city": city});
                assert_eq!(arguments, [expected.clone(), expected], "{tool}: {city}");
            }
        }
    }
}

#[test]
fn calls_beyond_the_most_are_left_out() {
    let message = split(both("qwen3", "hermes").with_max_calls(1), [TWO_CALLS]);
    assert_eq!(message.tool_calls.len(), 1);
    assert_eq!(message.tool_calls[0].arguments, r#"{"city": "Oslo"}"#);
    assert_eq!(message.content, "I look.");
}

#[test]
fn every_call_has_an_id_of_its_own() {
    for (style, prefix, len) in [(IdStyle::Call, "call_", 29), (IdStyle::Nine, "", 9)] {
        let parser = ToolDialect::find("hermes").unwrap().parser(tools());
        let mut splitter = Splitter::new(None, Some(parser), style);
        let mut ids = Vec::new();
        splitter.push(TWO_CALLS, |delta| {
            if let Delta::ToolCall { id, .. } = delta {
                ids.push(id.to_owned());
            }
        });
        assert!(splitter.has_calls());
        assert_eq!(ids.len(), 2);
        assert_ne!(ids[0], ids[1]);
        for id in ids {
            assert!(id.starts_with(prefix) && id.len() == len, "{id}");
            assert!(id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
        }
    }
}

#[test]
fn an_id_that_the_model_gives_twice_is_one_calls_alone() {
    for (tool, call, given, prefix) in [
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "functions.get_weather:0",
            "call_",
        ),
        (
            "mistral",
            "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}",
            "abcdefghi",
            "",
        ),
    ] {
        let text = call.repeat(3);
        for pieces in [vec![text.as_str()], characters(&text)] {
            let tool = ToolDialect::find(tool).unwrap();
            let mut splitter = Splitter::new(None, Some(tool.parser(tools())), tool.id_style());
            let mut message = Message::default();
            for piece in pieces {
                splitter.push(piece, |delta| message.add(delta));
            }
            splitter.finish(|delta| message.add(delta));
            let ids: Vec<&str> = message.tool_calls.iter().map(|call| &*call.id).collect();
            let [first, second, third] = ids[..] else {
                panic!("three calls: {message:?}");
            };
            assert_eq!(first, given);
            assert!(second != given && second.starts_with(prefix), "{second}");
            assert!(third != given && third != second, "{third}");
        }
    }
}
