//! Properties of tiny-chat on which other crates' tests rely, checked against the committed files.

use clap::CommandFactory as _;
use genset_devtools::checkout::read_tokenizer;
use genset_devtools::tiny_chat::{END_OF_TEXT, MESSAGE_END, MESSAGE_START, folder};
use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::*;
use crate::tokenizer::VOCABULARY_SIZE;

fn committed_tokenizer() -> Tokenizer {
    read_tokenizer(folder()).unwrap()
}

fn committed_json(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(folder().join(name)).unwrap()).unwrap()
}

/// Renders the committed template like transformers, or returns its exception's message.
fn render(messages: &Value, add_generation_prompt: bool) -> Result<String, String> {
    render_with_tools(messages, &Value::Null, add_generation_prompt)
}

fn render_with_tools(
    messages: &Value,
    tools: &Value,
    add_generation_prompt: bool,
) -> Result<String, String> {
    let config = committed_json("tokenizer_config.json");
    let mut environment = Environment::new();
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    environment
        .add_template("chat", config["chat_template"].as_str().unwrap())
        .unwrap();
    let template = environment.get_template("chat").unwrap();
    let messages = minijinja::Value::from(minijinja::value::Serde(messages));
    let tools = minijinja::Value::from(minijinja::value::Serde(tools));
    let rendered = template.render(context! { messages, tools, add_generation_prompt });
    rendered.map_err(|error| error.detail().unwrap_or_default().to_owned())
}

fn conversation(turns: &[(&str, &str)]) -> Value {
    turns
        .iter()
        .map(|(role, content)| json!({"role": role, "content": content}))
        .collect()
}

#[test]
fn command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn committed_files_are_as_the_corpus_makes_them() {
    let files = make(&folder().join("corpus")).unwrap();
    check(folder(), &files).unwrap();
}

#[test]
fn check_names_the_files_that_differ() {
    let files = [
        ModelFile {
            name: "config.json",
            content: "{}".into(),
        },
        ModelFile {
            name: "no",
            content: "".into(),
        },
    ];
    let error = check(folder(), &files).unwrap_err().to_string();
    assert_eq!(
        error,
        "not as the corpus makes them: config.json, no; run: cargo xtask make-tiny-chat"
    );
}

#[test]
fn every_byte_is_a_token() {
    let tokenizer = committed_tokenizer();
    for byte in tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet() {
        assert!(
            tokenizer.token_to_id(&byte.to_string()).is_some(),
            "no token for {byte}"
        );
    }
}

#[test]
fn text_the_corpus_never_saw_comes_back_whole() {
    let tokenizer = committed_tokenizer();
    for text in [
        "",
        " ",
        "  two  spaces\n\n\tand a tab",
        "ẞ𝄞🏴‍☠️ zażółć gęślą jaźń",
        "\u{0}\u{7f}\u{feff}\u{10ffff}",
        "Xylophone!?",
    ] {
        let encoding = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(encoding.get_ids(), false).unwrap(), text);
    }
}

#[test]
fn special_tokens_are_single_ids_and_skipped_in_text() {
    let tokenizer = committed_tokenizer();
    for (id, token) in [(0, END_OF_TEXT), (1, MESSAGE_START), (2, MESSAGE_END)] {
        assert_eq!(tokenizer.token_to_id(token), Some(id));
        assert_eq!(
            tokenizer
                .encode(format!("a{token}b"), false)
                .unwrap()
                .get_ids()
                .len(),
            3
        );
    }
    let ids = tokenizer
        .encode(format!("{MESSAGE_START}user\nHello{MESSAGE_END}"), false)
        .unwrap();
    assert_eq!(
        tokenizer.decode(ids.get_ids(), true).unwrap(),
        "user\nHello"
    );
}

#[test]
fn ordinary_words_are_few_tokens() {
    let tokenizer = committed_tokenizer();
    let text = "What is the capital of France?";
    assert!(tokenizer.encode(text, false).unwrap().get_ids().len() <= 8);
}

#[test]
fn configurations_agree_with_the_tokenizer() {
    let tokenizer = committed_tokenizer();
    let (model, generation) = (
        committed_json("config.json"),
        committed_json("generation_config.json"),
    );
    assert_eq!(tokenizer.get_vocab_size(true), VOCABULARY_SIZE);
    assert_eq!(model["vocab_size"], json!(VOCABULARY_SIZE));
    assert_eq!(
        model["eos_token_id"],
        json!(tokenizer.token_to_id(MESSAGE_END))
    );
    assert_eq!(generation["eos_token_id"][0], model["eos_token_id"]);
    assert_eq!(
        committed_json("tokenizer_config.json")["model_max_length"],
        model["max_position_embeddings"]
    );
}

#[test]
fn template_writes_chatml() {
    let messages = conversation(&[
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Bye"),
    ]);
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
        <|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(&messages, true).unwrap(), expected);
}

#[test]
fn template_has_no_default_system_message_and_keeps_spaces() {
    let messages = conversation(&[("user", "  two  \n")]);
    assert_eq!(
        render(&messages, false).unwrap(),
        "<|im_start|>user\n  two  \n<|im_end|>\n"
    );
}

#[test]
fn template_takes_tool_results_and_empty_assistant_messages() {
    let messages = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "wind"},
        {"role": "assistant", "content": "Wet."},
    ]);
    let rendered = render(&messages, false).unwrap();
    assert!(
        rendered.contains("<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n"),
        "{rendered}"
    );
}

#[test]
fn template_takes_system_messages_anywhere() {
    let messages = conversation(&[
        ("user", "Hi"),
        ("system", "Be brief."),
        ("assistant", "Hello"),
        ("system", "Be kind."),
        ("user", "Bye"),
    ]);
    let rendered = render(&messages, false).unwrap();
    let end = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n";
    assert!(rendered.ends_with(end), "{rendered}");
}

#[test]
fn template_lists_tools_behind_the_last_question() {
    let tools = json!([
        {"type": "function", "function": {
            "name": "get_weather",
            "description": "Get the weather\nof a city.",
            "parameters": {"properties": {"city": {"type": "string"}, "day": {"anyOf": []}}},
        }},
        {"type": "function", "function": {"name": "roll"}},
    ]);
    let list = r#"<|im_start|>system
<tools>
Get the weather of a city. {"name": "get_weather", "arguments": {"city": string, "day": any}}
{"name": "roll", "arguments": {}}
</tools><|im_end|>
"#;
    let rendered =
        |turns: &[(&str, &str)]| render_with_tools(&conversation(turns), &tools, false).unwrap();
    let message = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let turns = [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Roll."),
        ("assistant", "4"),
    ];
    let [before @ .., after] = turns.map(|(role, text)| message(role, text));
    assert_eq!(rendered(&turns), before.concat() + list + &after);
    let kind = message("system", "Be kind.");
    assert_eq!(rendered(&[("system", "Be kind.")]), list.to_owned() + &kind);
}

#[test]
fn template_writes_calls_as_hermes_does() {
    let call = |arguments: &str| json!({"type": "function", "function": {"name": "add", "arguments": arguments}});
    let messages = json!([
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": null, "tool_calls": [call(r#"{"a": 1, "b": 2}"#)]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "And", "tool_calls": [call("{}"), call("{}")]},
    ]);
    let expected = r#"<|im_start|>user
1 + 2?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call><|im_end|>
<|im_start|>tool
3<|im_end|>
<|im_start|>assistant
And
<tool_call>
{"name": "add", "arguments": {}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {}}
</tool_call><|im_end|>
"#;
    assert_eq!(render(&messages, false).unwrap(), expected);
}

#[test]
fn template_refuses_messages_out_of_order() {
    let refused = |turns: &[(&str, &str)]| render(&conversation(turns), true).unwrap_err();
    let alternate = "user and assistant messages must alternate: ";
    assert_eq!(
        refused(&[("user", ""), ("user", "")]),
        alternate.to_owned() + "a user message follows a user message"
    );
    assert_eq!(
        refused(&[("system", ""), ("assistant", "")]),
        alternate.to_owned() + "an assistant message must follow a user or tool message"
    );
    assert_eq!(
        refused(&[("user", ""), ("tool", "")]),
        "a tool message must follow an assistant or tool message"
    );
    assert_eq!(
        refused(&[("narrator", "")]),
        "unknown role narrator: expected system, user, assistant or tool"
    );
}
