//! `out=scripted`: a script's output reaches a client through the parsers that flags name, in one process and in two.

use std::path::Path;

use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::fleet::Fleet;
use crate::support::{
    Ended, Server, done_events, file, finish_reason, genset, run, run_with, text_of, tiny_chat,
};

const CHAT: &str = "/v1/chat/completions";

/// A conversation with text, a call, reasoning and a failure.
const TALK: &str = r#"
[[reply]]
match = { contains = "weather", last_role = "tool" }
text = "It rains in Oslo."

[[reply]]
match.contains = "weather"
text = 'I look. <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
chunk_chars = 5

[[reply]]
match.contains = "why"
chunks = ["<thi", "nk>The sky", " scatters blue.</th", "ink>", "Because of scattering."]

[[reply]]
match.contains = "try"
times = 1
fault = { action = "refuse", kind = "overloaded", message = "all sequences are in use", retry_after_ms = 1000 }

[[reply]]
match.contains = "try"
text = "Second time lucky."

[[reply]]
match.contains = "count"
text = "one two three four five"
chunk_chars = 2

[[reply]]
text = "You said: {{last_user}}"
"#;

/// The same without matching that a prompt of tokens does not allow.
const TOKENS: &str = r#"
[[reply]]
match.contains = "weather"
text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'

[[reply]]
match.contains = "count"
text = "one two three four five"

[[reply]]
text = "You said: {{last_user}}"
"#;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A server that plays `script`; the file must outlive it.
async fn server(script: &NamedTempFile, words: &[&str]) -> Server {
    let scripted = ["out=scripted", "--script", text(script.path())];
    Server::start(&[&scripted, words].concat()).await
}

/// A request to the model `model` with one user message.
fn asking(model: &str, text: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": text}]})
}

fn tool(name: &str) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "function": {"name": name, "parameters": city}})
}

fn with(mut body: Value, fields: Value) -> Value {
    let Value::Object(fields) = fields else {
        panic!("fields are an object")
    };
    body.as_object_mut().unwrap().extend(fields);
    body
}

/// The only choice of a complete answer.
async fn choice(server: &Server, body: &Value) -> Value {
    let response = server.ask(CHAT, body).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let answer: Value = serde_json::from_str(&response.body).unwrap();
    answer["choices"][0].clone()
}

/// The events of the same answer, streamed.
async fn events(server: &Server, body: &Value) -> Vec<Value> {
    let body = with(body.clone(), json!({"stream": true}));
    let response = server.ask(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.body);
    done_events(&response.body)
}

/// The concatenated deltas of `field`.
fn joined(events: &[Value], field: &str) -> String {
    let pieces = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"][field].as_str());
    pieces.collect()
}

/// Name and arguments of the only call in a stream.
fn streamed_call(events: &[Value]) -> (String, Value) {
    let (mut name, mut arguments) = (String::new(), String::new());
    let deltas = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array());
    for delta in deltas.flatten() {
        assert_eq!(delta["index"], 0, "{delta}");
        name += delta["function"]["name"].as_str().unwrap_or_default();
        arguments += delta["function"]["arguments"].as_str().unwrap_or_default();
    }
    (name, serde_json::from_str(&arguments).unwrap())
}

#[track_caller]
fn assert_calls_weather(choice: &Value) {
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let [call] = &calls[..] else {
        panic!("not one call in {choice}")
    };
    assert_eq!(call["function"]["name"], "get_weather");
    let arguments = call["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert_eq!(arguments, json!({"city": "Oslo"}));
}

#[tokio::test]
async fn without_a_model_text_answers_text() {
    let script = file(TALK);
    let server = server(&script, &[]).await;
    let question = asking("scripted", "hello");
    let answer = choice(&server, &question).await;
    assert_eq!(answer["message"]["content"], "You said: hello");
    assert_eq!(answer["finish_reason"], "stop");
    let events = events(&server, &question).await;
    assert_eq!(text_of(&events), "You said: hello");
    assert_eq!(finish_reason(&events), Some("stop"));
    server.stop().await;
}

#[tokio::test]
async fn a_tool_is_called_and_its_result_is_answered() {
    let script = file(TALK);
    let server = server(&script, &["--tool-parser", "hermes"]).await;
    let tools = json!({"tools": [tool("get_weather")]});
    let question = with(asking("scripted", "How is the weather?"), tools.clone());

    let called = choice(&server, &question).await;
    assert_calls_weather(&called);
    assert_eq!(called["message"]["content"], "I look.");
    let streamed = events(&server, &question).await;
    assert_eq!(finish_reason(&streamed), Some("tool_calls"));
    assert_eq!(text_of(&streamed), "I look.");
    let (name, arguments) = streamed_call(&streamed);
    assert_eq!(
        (name.as_str(), arguments),
        ("get_weather", json!({"city": "Oslo"}))
    );

    let call = &called["message"]["tool_calls"][0];
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "rain"});
    let messages = json!([question["messages"][0], called["message"], result]);
    let next = with(json!({"model": "scripted", "messages": messages}), tools);
    let answered = choice(&server, &next).await;
    assert_eq!(answered["message"]["content"], "It rains in Oslo.");
    assert_eq!(answered["finish_reason"], "stop");
    server.stop().await;
}

#[tokio::test]
async fn the_script_that_the_guide_shows_does_what_the_guide_says() {
    let guide = include_str!("../../../docs/guide/application-developers.md");
    let (_, rest) = guide.split_once("```toml\n").unwrap();
    let (shown, _) = rest.split_once("```").unwrap();
    let script = file(shown);
    let server = server(&script, &["--tool-parser", "hermes"]).await;
    let tools = json!({"tools": [tool("get_weather")]});
    let question = with(asking("scripted", "How is the weather in Oslo?"), tools);
    assert_calls_weather(&choice(&server, &question).await);
    let hello = asking("scripted", "hello");
    assert_eq!(server.ask(CHAT, &hello).await.status, 429);
    let answer = choice(&server, &hello).await;
    assert_eq!(answer["message"]["content"], "You said: hello");
    server.stop().await;
}

#[tokio::test]
async fn reasoning_comes_apart_from_the_answer() {
    let script = file(TALK);
    let server = server(&script, &["--reasoning-parser", "qwen3"]).await;
    let question = asking("scripted", "why is the sky blue");
    let message = choice(&server, &question).await["message"].clone();
    assert_eq!(message["reasoning_content"], "The sky scatters blue.");
    assert_eq!(message["content"], "Because of scattering.");
    let events = events(&server, &question).await;
    let reasoning = joined(&events, "reasoning_content");
    assert_eq!(reasoning, "The sky scatters blue.");
    assert_eq!(text_of(&events), "Because of scattering.");
    server.stop().await;
}

#[tokio::test]
async fn a_scripted_failure_is_over_after_its_times() {
    let script = file(TALK);
    let server = server(&script, &[]).await;
    let question = asking("scripted", "try");
    let refused = server.ask(CHAT, &question).await;
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.head.contains("retry-after: 1\r\n"), "{refused:?}");
    assert!(refused.body.contains("all sequences are in use"));
    let answer = choice(&server, &question).await;
    assert_eq!(answer["message"]["content"], "Second time lucky.");
    server.stop().await;
}

#[tokio::test]
async fn a_stop_string_over_chunk_borders_is_found() {
    let (of_text, of_tokens) = (file(TALK), file(TOKENS));
    let folder = tiny_chat();
    for (script, words, model) in [
        (&of_text, vec![], "scripted"),
        (&of_tokens, vec![text(&folder)], "tiny-chat"),
    ] {
        let server = server(script, &words).await;
        let question = with(asking(model, "count"), json!({"stop": "three f"}));
        let answer = choice(&server, &question).await;
        assert_eq!(answer["message"]["content"], "one two ");
        assert_eq!(answer["finish_reason"], "stop");
        assert_eq!(text_of(&events(&server, &question).await), "one two ");
        server.stop().await;
    }
}

#[tokio::test]
async fn with_a_model_its_template_and_its_tokens_are_on_the_road() {
    let script = file(TOKENS);
    let folder = tiny_chat();
    let server = server(&script, &[text(&folder)]).await;
    let response = server.ask(CHAT, &asking("tiny-chat", "the capital")).await;
    let answer: Value = serde_json::from_str(&response.body).unwrap();
    let content = &answer["choices"][0]["message"]["content"];
    assert_eq!(content, "You said: the capital", "{}", response.body);
    // The count includes the template's marks, which are not words.
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt_tokens > 5, "{}", response.body);

    let tools = json!({"tools": [tool("get_weather")]});
    let question = with(asking("tiny-chat", "the weather"), tools);
    assert_calls_weather(&choice(&server, &question).await);
    let (name, _) = streamed_call(&events(&server, &question).await);
    assert_eq!(name, "get_weather");
    server.stop().await;
}

#[tokio::test]
async fn a_chat_template_of_ones_own_takes_the_place_of_the_models() {
    // Without the model's marks, the whole prompt is the user's message, and the answer shows it.
    let script = file(TOKENS);
    let template = file("Q: {{ messages[0].content }}{% if add_generation_prompt %} A:{% endif %}");
    let folder = tiny_chat();
    let words = [text(&folder), "--chat-template", text(template.path())];
    let server = server(&script, &words).await;
    let answer = choice(&server, &asking("tiny-chat", "hello")).await;
    assert_eq!(answer["message"]["content"], "You said: Q: hello A:");
    server.stop().await;
}

#[tokio::test]
async fn more_tools_than_max_tools_are_refused() {
    let script = file(TALK);
    let server = server(&script, &["--tool-parser=hermes", "--max-tools=1"]).await;
    let tools = json!({"tools": [tool("a"), tool("b")]});
    let refused = server
        .ask(CHAT, &with(asking("scripted", "hello"), tools))
        .await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    let error: Value = serde_json::from_str(&refused.body).unwrap();
    assert_eq!(error["error"]["param"], "tools", "{error}");
    server.stop().await;
}

#[tokio::test]
async fn a_question_on_standard_input_is_answered() {
    let script = file(TALK);
    let words = ["run", "in=stdin", "out=scripted"];
    let mut command = genset(&words);
    command.env("GENSET_SCRIPT", script.path());
    let ended = run_with(command, b"hello").await;
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(0), "You said: hello\n"),
        "{}",
        ended.stderr
    );
}

#[track_caller]
fn assert_refused(ended: &Ended, expected: &[&str]) {
    assert_eq!(ended.code, Some(2), "{ended:?}");
    for part in expected {
        assert!(ended.stderr.contains(part), "{part} in {ended:?}");
    }
}

#[tokio::test]
async fn a_script_that_cannot_be_played_is_named() {
    let missing = run(&["run", "in=stdin", "out=scripted"]).await;
    assert_refused(&missing, &["error: --script", "TOML file"]);
    let words = ["run", "in=stdin", "out=scripted", "--script=/no/such/file"];
    assert_refused(&run(&words).await, &["error: --script", "/no/such/file"]);
    let playing = ["run", "in=stdin", "out=scripted", "--script"];
    let bad = file("[[reply]]\ntext = 'x'\nfinish_reason = 'bored'\n");
    let words = [&playing[..], &[text(bad.path())]].concat();
    let place = [text(bad.path()), "finish_reason"];
    assert_refused(&run(&words).await, &place);

    // The engine's start detects matching that tokens do not allow.
    let of_text = file(TALK);
    let folder = tiny_chat();
    let words = [&playing[..], &[text(of_text.path()), text(&folder)]].concat();
    let ended = run(&words).await;
    ended.fails(2, "script: line 2: reply 1: match.last_role");
}

#[tokio::test]
async fn parsers_and_templates_that_there_are_not_are_named() {
    let parser = run(&["run", "in=http", "--tool-parser=hermse"]).await;
    assert_refused(&parser, &["--tool-parser", "hermse", "hermes", "none"]);
    let parser = run(&["run", "in=dyn", "out=sample", "--reasoning-parser=x"]).await;
    assert_refused(&parser, &["--reasoning-parser", "\"x\"", "qwen3"]);

    let broken = file("{% for message in messages %}\n{{ message.content }");
    let flag = format!("--chat-template={}", text(broken.path()));
    assert_refused(
        &run(&["run", "in=stdin", &flag]).await,
        &["error: --chat-template", "line 2"],
    );
    let words = ["run", "in=stdin", "--chat-template=/no/such/file"];
    assert_refused(&run(&words).await, &["--chat-template", "/no/such/file"]);
    for engine in ["out=echo_full", "out=dyn"] {
        let words = ["run", "in=http", engine, &flag];
        assert_refused(&run(&words).await, &["--chat-template"]);
    }
}

#[tokio::test]
async fn the_kit_tests_it_with_the_built_in_models_tokens() {
    let script = file("[[reply]]\ntoken_ms = 1\ntext = 'The capital of France is Paris.'\n");
    let path = text(script.path());
    let conform = ["conform", "run", "--engine", "scripted"];
    let words = [&conform[..], &["--script", path, "--only", "ST,US,CN,ER"]].concat();
    let ended = run(&words).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stdout);
    assert!(ended.stdout.contains("\nPASSED, with "), "{}", ended.stdout);
    assert_refused(&run(&conform).await, &["error: --script"]);
}

#[tokio::test]
async fn a_frontend_uses_the_parsers_that_a_worker_publishes_unless_it_is_told_others() {
    let fleet = Fleet::new();
    let script = file(TALK);
    let words = [
        "in=dyn://mock",
        "out=scripted",
        "--script",
        text(script.path()),
    ];
    let parsers = ["--tool-parser=hermes", "--reasoning-parser=qwen3"];
    let worker = fleet.worker_of(&[&words[..], &parsers].concat(), &[]).await;
    let server = fleet.frontend(&[]).await;
    let tools = json!({"tools": [tool("get_weather")]});
    let weather = with(asking("scripted", "the weather"), tools);
    assert_calls_weather(&choice(&server, &weather).await);
    assert_eq!(
        streamed_call(&events(&server, &weather).await).0,
        "get_weather"
    );
    let why = asking("scripted", "why");
    let message = choice(&server, &why).await["message"].clone();
    assert_eq!(message["reasoning_content"], "The sky scatters blue.");
    server.stop().await;

    let without = [
        ("GENSET_TOOL_PARSER", "none"),
        ("GENSET_REASONING_PARSER", "none"),
    ];
    let server = fleet.frontend(&without).await;
    assert_eq!(server.ask(CHAT, &weather).await.status, 400);
    let message = choice(&server, &why).await["message"].clone();
    let whole = "<think>The sky scatters blue.</think>Because of scattering.";
    assert_eq!(message["content"], whole);
    server.stop().await;
    worker.stop().await;
}
