//! Calls that are cut short, and text that is not a call.

use super::{ToolDialect, forced, run, seen, tools};
use crate::markup::testing::characters;
use crate::markup::{IdStyle, MarkupParser, Message, Splitter};

#[test]
fn a_call_without_a_name_is_content_without_its_markers() {
    for (name, text, content) in [
        ("hermes", "So: <tool_call>\n{\"nam", "So: {\"nam"),
        (
            "hermes",
            "<tool_call>{\"name\": \"f</tool_call>",
            "{\"name\": \"f",
        ),
        (
            "hermes",
            "<tool_call>{name: now}</tool_call> So.",
            "{name: now} So.",
        ),
        ("hermes", "<tool_call>{\"a\": 1}</tool_call>", "{\"a\": 1}"),
        (
            "hermes",
            "<tool_call>I do not know</tool_call>",
            "I do not know",
        ),
        ("mistral", "[TOOL_CALLS]get_wea", "get_wea"),
        ("kimi_k2", "<|tool_call_begin|>functions.no", "functions.no"),
        ("qwen3_coder", "<tool_call>\n<function=get_wea", "get_wea"),
        ("glm45", "<tool_call>get_wea", "get_wea"),
        ("gemma4", "<|tool_call>call:get_wea", "call:get_wea"),
        ("gemma4", "<|tool_call>call:now<tool_call|>", "call:now"),
        ("gemma4", "<|tool_call>a set {1}<tool_call|>.", "a set {1}."),
        ("pythonic", "[now(", "now("),
        ("pythonic", "[now(1)]", "now(1)]"),
        // Integers beyond 64 bits, which no number type here can hold.
        (
            "pythonic",
            "[now(a=18446744073709551616)]",
            "now(a=18446744073709551616)]",
        ),
        (
            "pythonic",
            "[now(a=-9223372036854775809)]",
            "now(a=-9223372036854775809)]",
        ),
        ("hermes", "Is it <tool_ca", "Is it <tool_ca"),
    ] {
        assert_eq!(
            seen(&run(name, [text])),
            (content, vec![]),
            "{name}: {text:?}"
        );
    }
}

/// Held text is looked through again with each piece.
#[test]
fn a_tag_far_behind_its_marker_is_text() {
    let tag = "<invoke name=\"now\">";
    let text = format!("]<]minimax[>[{}{tag}", " ".repeat(1100));
    for pieces in [vec![text.as_str()], characters(&text)] {
        assert_eq!(seen(&run("minimax_m3", pieces)), (tag, vec![]));
    }
}

/// Runs a dialect's parser over a text that was cut off.
fn run_cut(name: &str, text: &str) -> Message {
    parse_cut(ToolDialect::find(name).unwrap().parser(tools()), text)
}

fn parse_cut(parser: Box<dyn MarkupParser>, text: &str) -> Message {
    let mut splitter = Splitter::new(None, Some(parser), IdStyle::Call);
    let mut message = Message::default();
    splitter.push(text, |delta| message.add(delta));
    splitter.cut_short();
    splitter.finish(|delta| message.add(delta));
    message
}

#[test]
fn the_beginning_of_a_forced_call_is_no_content() {
    let call = r#"{"name": "now", "parameters": {}}"#;
    for (text, calls) in [
        (r#"[{"na"#.to_owned(), vec![]),
        (format!("[{call},\n{{\n    \"name"), vec![("now", "{}")]),
        (
            format!("[{call}, {{\"name\": \"now\","),
            vec![("now", "{}"), ("now", "")],
        ),
    ] {
        let message = parse_cut(forced::calls_parser(tools()), &text);
        assert_eq!(seen(&message), ("", calls), "{text}");
    }
}

#[test]
fn a_call_whose_end_the_model_omits_is_whole() {
    for (name, text, tool, arguments) in [
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n",
            "get_weather",
            "{\"city\": \"Oslo\"}",
        ),
        (
            "qwen3_coder",
            "<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=text>\nb\n",
            "write_file",
            "{\"path\": \"a\", \"text\": \"b\"}",
        ),
        (
            "qwen3_coder",
            "<function=get_weather><parameter=days>1",
            "get_weather",
            "{\"days\": 1}",
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n",
            "get_weather",
            "{\"city\": \"Oslo\"}",
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\nOslo\n",
            "get_weather",
            "{\"city\": \"Oslo\"}",
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>",
            "get_weather",
            "{\"city\": \"\"}",
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>ci",
            "get_weather",
            "{}",
        ),
        (
            "deepseek_v32",
            "<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string",
            "get_weather",
            "{}",
        ),
        (
            "minimax_m2",
            "<minimax:tool_call>\n<invoke name=\"now\">\n",
            "now",
            "{}",
        ),
        ("mistral", "[TOOL_CALLS]now[ARGS]", "now", "{}"),
        ("hermes", "<tool_call>{\"name\": \"now\"", "now", "{}"),
    ] {
        for pieces in [vec![text], characters(text)] {
            let message = run(name, pieces);
            assert_eq!(
                seen(&message),
                ("", vec![(tool, arguments)]),
                "{name}: {text:?}"
            );
        }
    }
}

#[test]
fn a_call_that_is_cut_short_keeps_the_arguments_that_came() {
    for (name, text, tool, arguments) in [
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"b",
            "now",
            "{\"a\": \"b",
        ),
        (
            "hermes",
            r#"<tool_call>{"name": "now", "arguments": "{\"a\": 1}""#,
            "now",
            r#"{"a": 1}"#,
        ),
        (
            "hermes",
            r#"<tool_call>{"name": "now", "arguments": "{\"a"#,
            "now",
            r#"{"a"#,
        ),
        ("mistral", "[TOOL_CALLS]now[ARGS]{\"a", "now", "{\"a"),
        (
            "deepseek_v31",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{\"a\": [1",
            "now",
            "{\"a\": [1",
        ),
        (
            "qwen3_coder",
            "<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=text>\nb \"c",
            "write_file",
            "{\"path\": \"a\", \"text\": \"b \\\"c",
        ),
        (
            "qwen3_coder",
            "<function=get_weather><parameter=days>1",
            "get_weather",
            "{\"days\": 1",
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>ci",
            "get_weather",
            "{\"ci\"",
        ),
        (
            "gemma4",
            "<|tool_call>call:write_file{path:<|\"|>a<|\"|>,text:<|\"|>b \"c<|\"",
            "write_file",
            "{\"path\": \"a\", \"text\": \"b \\\"c<|\\\"",
        ),
        (
            "gemma4",
            "<|tool_call>call:get_weather{days:1,ci",
            "get_weather",
            "{\"days\": 1, \"ci\"",
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.now<|message|>{\"a\"",
            "now",
            "{\"a\"",
        ),
    ] {
        assert_eq!(
            seen(&run_cut(name, text)),
            ("", vec![(tool, arguments)]),
            "{name}: {text:?}"
        );
    }
    // One that the model leaves open by itself.
    let text = r#"<tool_call>{"name": "now", "arguments": "{\"a\": 1}</tool_call>"#;
    let arguments = r#"{"a": 1}</tool_call>"#;
    assert_eq!(seen(&run("hermes", [text])), ("", vec![("now", arguments)]));
}

#[test]
fn a_call_that_is_cut_before_its_arguments_has_none() {
    for (name, text) in [
        ("hermes", "<tool_call>{\"name\": \"now\", \"argum"),
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>"),
        ("qwen3_coder", "<function=now>"),
        (
            "harmony",
            "<|channel|>commentary to=functions.now<|message|>",
        ),
    ] {
        let message = run_cut(name, text);
        assert_eq!(seen(&message), ("", vec![("now", "")]), "{name}");
    }
}

#[test]
fn arguments_that_are_not_json_come_as_they_were_written() {
    for (name, text, arguments) in [
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {'a': 1}}</tool_call>",
            "{'a': 1}",
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}}</tool_call>",
            "{\"a\": 1}",
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}</tool_call>",
            "{\"a\": 1}",
        ),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>a=1<|tool_call_end|>",
            "a=1",
        ),
    ] {
        assert_eq!(
            seen(&run(name, [text])),
            ("", vec![("now", arguments)]),
            "{name}: {text:?}"
        );
    }
}

#[test]
fn text_between_parameters_is_content_behind_the_call_within_bounds() {
    let long = "é".repeat(50_000);
    let text = format!(
        "<function=now><parameter=a>b</parameter>x{long}<parameter=c>d</parameter>{long}</function> Done."
    );
    let message = run("qwen3_coder", [text.as_str()]);
    let content = format!("x{} Done.", "é".repeat(32 << 10));
    assert_eq!(message.content.len(), content.len() - "é".len());
    assert!(message.content.starts_with("xé") && message.content.ends_with("é Done."));
    assert_eq!(message.tool_calls[0].arguments, r#"{"a": "b", "c": "d"}"#);
    assert!(message == run("qwen3_coder", characters(&text)));
    // A call that ends behind a key emits it too.
    let text = "<function=now><parameter=a>b</parameter> so <parameter=c";
    assert_eq!(
        seen(&run("qwen3_coder", [text])),
        ("so", vec![("now", r#"{"a": "b"}"#)])
    );
}

#[test]
fn text_behind_a_broken_call_is_content() {
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {}, oops}</tool_call>\nAnd on.";
    assert_eq!(
        seen(&run("hermes", [text])),
        ("oops}\nAnd on.", vec![("now", "{}")])
    );
}

#[test]
fn nesting_without_end_is_read_in_bounded_depth() {
    let deep = "[".repeat(100_000);
    let text = format!("[now(a={deep}");
    assert_eq!(run("pythonic", [text.as_str()]).tool_calls, []);
    let text = format!("[now(a={deep}{})]", "]".repeat(100_000));
    assert_eq!(run("pythonic", [text.as_str()]).tool_calls, []);
    let text = format!("<tool_call>{{\"name\": \"now\", \"arguments\": {{\"a\": {deep}");
    assert!(
        run("hermes", [text.as_str()]).tool_calls[0]
            .arguments
            .ends_with(&deep)
    );
}

#[test]
fn a_name_or_a_call_without_end_is_content() {
    let long = "a".repeat(5_000);
    for text in [format!("<function={long}>"), format!("<function={long}")] {
        let message = run("qwen3_coder", characters(&text));
        assert_eq!(message, run("qwen3_coder", [text.as_str()]));
        assert!(message.tool_calls.is_empty() && message.content.starts_with(&long));
    }
    let text = format!("[now(a='{}')]", "b".repeat(1 << 20));
    let message = run("pythonic", [text.as_str()]);
    assert!(message.tool_calls.is_empty());
    assert!(message == run("pythonic", [&text[..100_000], &text[100_000..]]));
}
