//! Logprobs, from the engine to the client.

use serde_json::{Value, json};

use crate::client::Response;
use crate::golden::check;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, Site, chat, completion, echo, echo_text, encode, tokenizer,
};

#[tokio::test]
async fn every_shape() {
    let site = Site::start(Script::rated(encode("é, one two"))).await;
    let asked = json!({"logprobs": true, "top_logprobs": 2});
    let plain = site.post(CHAT, &chat("Hello", asked.clone())).await;
    check("logprobs_chat", &plain);
    let mut streamed = asked;
    streamed["stream"] = true.into();
    let streamed = site.post(CHAT, &chat("Hello", streamed)).await;
    check("logprobs_chat_streamed", &streamed);

    let asked = json!({"logprobs": 2});
    let plain = site.post(COMPLETIONS, &completion("Hello", asked)).await;
    check("logprobs_completion", &plain);
    let asked = json!({"logprobs": 2, "stream": true});
    let streamed = site.post(COMPLETIONS, &completion("Hello", asked)).await;
    check("logprobs_completion_streamed", &streamed);
    site.close().await;
}

/// The `logprobs.content` of each choice of an answer, streamed or whole.
fn contents(response: &Response, choices: usize) -> Vec<Vec<Value>> {
    let whole: Vec<Value> = match response.header("content-type") {
        Some("application/json") => vec![response.json()],
        _ => response.chunks(),
    };
    let mut contents = vec![Vec::new(); choices];
    for part in whole {
        for choice in part["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().expect("an index");
            let content = contents.get_mut(usize::try_from(index).expect("small"));
            let tokens = choice["logprobs"]["content"]
                .as_array()
                .into_iter()
                .flatten();
            content
                .expect("an index of a choice")
                .extend(tokens.cloned());
        }
    }
    contents
}

fn texts(tokens: &[Value]) -> Vec<&str> {
    let text = |token: &Value| token["token"].as_str().map(str::len);
    assert!(tokens.iter().all(|token| text(token).is_some()));
    tokens
        .iter()
        .filter_map(|token| token["token"].as_str())
        .collect()
}

/// The tokens of `text` that end by `until`.
fn tokens_until(text: &str, until: usize) -> Vec<String> {
    let mut end = 0;
    let tokens = encode(text)
        .into_iter()
        .map(|token| tokenizer().token_text(token));
    tokens
        .take_while(|token| {
            end += token.len();
            end <= until
        })
        .collect()
}

#[tokio::test]
async fn what_a_stop_string_cuts_does_not_leak() {
    let text = "Hello wonderful world, hello again";
    let site = Site::start(Script::rated(encode(text))).await;
    for stop in [
        "wonderful",
        "ful wo",
        "nderful",
        " world",
        "o",
        "H",
        "world, hello a",
        "none such",
    ] {
        let cut = text.find(stop).unwrap_or(text.len());
        let expected = tokens_until(text, cut);
        let body = chat("Hi", json!({"stop": stop, "logprobs": true, "n": 2}));
        let [whole, streamed] = site.whole_and_streamed(CHAT, body).await;
        assert_eq!(whole.content(), text.get(..cut).expect("a boundary"));
        for response in [&whole, &streamed] {
            for content in contents(response, 2) {
                assert_eq!(texts(&content), expected, "{stop}");
            }
        }
    }
    site.close().await;
}

/// Their concatenated bytes are the text, also if a character spans several tokens.
#[tokio::test]
async fn the_bytes_are_the_text() {
    let text = "naïve 🦀🎉 日本語";
    let site = Site::start(Script::rated(encode(text))).await;
    for stream in [false, true] {
        let further = json!({"logprobs": true, "stream": stream});
        let response = site.post(CHAT, &chat("Hi", further)).await;
        let tokens = contents(&response, 1).remove(0);
        let bytes = tokens.iter().flat_map(|token| {
            let bytes = token["bytes"].as_array().expect("bytes").iter();
            bytes.map(|byte| u8::try_from(byte.as_u64().expect("a byte")).expect("a byte"))
        });
        assert_eq!(String::from_utf8(bytes.collect()).expect("text"), text);
        assert!(
            tokens
                .iter()
                .all(|token| token["top_logprobs"] == json!([]))
        );
    }
    site.close().await;
}

/// Reasoning and calls are tokens of the answer too.
#[tokio::test]
async fn they_come_along_where_the_answer_is_taken_apart() {
    let text = "<think>\nhm\n</think>\n\nYes.<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let engine = Script::rated(encode(text));
    let site = Site::thinking_and_calling(engine).await;
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for stream in [false, true] {
        let further = json!({"tools": tools, "logprobs": true, "stream": stream});
        let response = site.post(CHAT, &chat("Hi", further)).await;
        let tokens = contents(&response, 1).remove(0);
        assert_eq!(texts(&tokens).concat(), text);
    }
    site.close().await;
}

#[tokio::test]
async fn an_engine_without_them_or_with_fewer_refuses() {
    for engine in [echo(), echo_text()] {
        let site = Site::start(engine).await;
        let asked = json!({"logprobs": true});
        let response = site.post(CHAT, &chat("Hi", asked)).await;
        response.does_not_support("logprobs");
        site.close().await;
    }
    let site = Site::start(Script::rated(encode("Hi"))).await;
    let asked = json!({"logprobs": true, "top_logprobs": 6});
    let response = site.post(CHAT, &chat("Hi", asked)).await;
    let message = response.blames("top_logprobs");
    assert!(message.contains("at most 5"), "{message}");
    let asked = completion("Hi", json!({"logprobs": 6}));
    site.post(COMPLETIONS, &asked).await.blames("logprobs");
    let asked = completion("Hi", json!({"logprobs": 1, "echo": true}));
    site.post(COMPLETIONS, &asked).await.blames("echo");
    site.close().await;
}

#[tokio::test]
async fn they_are_null_where_they_were_not_asked_for() {
    let engine = Script::rated(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    let response = site.post(CHAT, &chat("Hi", json!({}))).await;
    assert!(response.json()["choices"][0]["logprobs"].is_null());
    let asked = json!({"logprobs": true, "top_logprobs": 3});
    site.post(CHAT, &chat("Hi", asked)).await;
    let asked: Vec<_> = engine
        .requests()
        .iter()
        .map(|request| request.output.logprobs)
        .collect();
    assert_eq!(asked, [None, Some(3)]);
    site.close().await;
}
