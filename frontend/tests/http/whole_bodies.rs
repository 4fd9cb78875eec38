//! Models whose engines parse the bodies of chats and completions themselves.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::Finish;
use genset_backend_common::{Capabilities, Input};
use serde_json::{Value, json};

use crate::client::{Response, post};
use crate::messages::{self, MESSAGES, message};
use crate::responses::{self, RESPONSES, asked};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, encode, eventually, worker_config,
};

/// An engine that parses bodies itself, and answers each with its own object.
pub(crate) fn reader() -> Arc<Script> {
    reading(Script::new(|_, out| async move {
        out.text(json!({"object": "its own"}).to_string(), 1)
            .await?;
        Ok(Finish::stop())
    }))
}

/// Turns the engine into one that parses bodies itself.
pub(crate) fn reading(engine: Arc<Script>) -> Arc<Script> {
    engine.declaring(|can| {
        *can = Capabilities {
            whole_bodies: true,
            ..Capabilities::text()
        };
    })
}

/// An engine that reads bodies itself and answers each with these choices, one per chunk.
fn writing(choices: Vec<Value>) -> Arc<Script> {
    reading(Script::new(move |_, out| {
        let choices = choices.clone();
        async move {
            for choice in choices {
                let chunk = json!({"object": "chat.completion.chunk", "choices": [choice]});
                out.text(chunk.to_string(), 1).await?;
            }
            let details = json!({"reasoning_tokens": 1});
            let usage = json!({"completion_tokens_details": details});
            let last = json!({"choices": [], "usage": usage});
            out.text(last.to_string(), 0).await?;
            Ok(Finish::stop())
        }
    }))
}

/// The latest body that the engine read.
fn latest_body(engine: &Script) -> Value {
    let requests = engine.requests();
    let request = requests.last().expect("a request");
    let Input::Text(body) = &request.input else {
        panic!("no body: {request:?}")
    };
    serde_json::from_str(body).expect("a body is JSON")
}

/// A site that waits long for its model, whose last worker is away.
async fn site_without_worker(engine: Arc<Script>) -> Site {
    let mut waits_long = config();
    waits_long.router.migration.wait = Duration::from_secs(60);
    let site = Site::with(waits_long, engine).await;
    site.worker.stop_once();
    site.serves(MODEL, false).await;
    site
}

/// Returns the answers to requests sent while the model's last worker was away; the next worker's engine is `back`.
async fn asked_while_away(
    first: Arc<Script>,
    back: Arc<Script>,
    requests: &[(&str, Value)],
) -> Vec<Response> {
    let mut site = site_without_worker(first).await;
    let mut waiting = Vec::new();
    for (path, body) in requests {
        waiting.push(site.begin(path, body).await);
    }
    let in_flight = || site.metric("genset_http_requests_in_flight");
    let all = requests.iter().map(|_| 1.0).sum::<f64>();
    eventually("all wait", || in_flight() >= all).await;
    site.replace_worker(2, back, worker_config()).await;
    let mut answers = Vec::new();
    for mut client in waiting {
        answers.push(client.response().await);
    }
    site.close().await;
    answers
}

#[tokio::test]
async fn a_body_waits_for_the_engine_that_reads_it() {
    let its_own = json!({"a_field_of_its_own": 1});
    let requests = [
        (CHAT, chat("Hello", json!({}))),
        (CHAT, chat("Hello", its_own.clone())),
        (COMPLETIONS, completion("Hello", json!({}))),
        (COMPLETIONS, completion("Hello", its_own)),
    ];
    for answer in asked_while_away(reader(), reader(), &requests).await {
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json(), json!({"object": "its own"}));
    }
}

#[tokio::test]
async fn a_body_that_waited_is_read_here_where_its_engine_does_not() {
    let requests = [
        (CHAT, chat("Hello", json!({}))),
        (CHAT, chat("Hello", json!({"a_field_of_its_own": 1}))),
    ];
    let engine = || Script::tokens(encode("one"));
    let answers = asked_while_away(engine(), engine(), &requests).await;
    let [good, unknown] = &answers[..] else {
        panic!("{answers:?}")
    };
    assert_eq!(good.content(), "one");
    unknown.blames("a_field_of_its_own");
}

#[tokio::test]
async fn a_body_is_read_before_its_model_is_looked_for_where_no_engine_reads_bodies() {
    let refused_beside = async |engine: Arc<Script>| {
        let site = Site::with(config(), engine).await;
        let nobodys = json!({"model": "nobody", "a_field_of_its_own": 1});
        let asked = chat("Hello", nobodys).to_string();
        let (status, ..) = site.send(post(CHAT, asked)).await.refusal();
        site.close().await;
        status
    };
    assert_eq!(refused_beside(Script::tokens(encode("one"))).await, 400);
    assert_eq!(refused_beside(reader()).await, 404);
}

#[tokio::test]
async fn a_body_that_waited_is_counted_until_it_is_read() {
    let mut site = site_without_worker(Script::tokens(encode("one"))).await;
    let asked = chat("Hello", json!({})).to_string() + &" ".repeat(1 << 20);
    let mut client = site.connect().await;
    client.send(post(CHAT, asked)).await;
    let is_counted = || site.metric("genset_http_memory_used_bytes") >= 1_048_576.0;
    eventually("it is counted", is_counted).await;
    site.replace_worker(2, Script::silent(5), worker_config())
        .await;
    let is_counted = || site.metric("genset_http_memory_used_bytes") >= 1_048_576.0;
    eventually("it is read", || !is_counted()).await;
    let in_flight = || site.metric("genset_http_requests_in_flight");
    assert_eq!(in_flight(), 1.0);
    drop(client);
    eventually("it is given up", || in_flight() == 0.0).await;
    site.close().await;
}

/// The choices of an answer with reasoning, content and a tool call.
fn thinking_and_calling() -> Vec<Value> {
    let function = json!({"name": "get_weather", "arguments": "{\"city\":"});
    let call = json!({"index": 0, "id": "call_1", "type": "function", "function": function});
    let rest = json!({"index": 0, "function": {"arguments": "\"Oslo\"}"}});
    let deltas = [
        json!({"role": "assistant", "content": null, "reasoning_content": "Hm."}),
        json!({"content": "I look."}),
        json!({"tool_calls": [call]}),
        json!({"tool_calls": [rest]}),
    ];
    let deltas = deltas.map(|delta| json!({"index": 0, "delta": delta, "finish_reason": null}));
    let end = json!({"index": 0, "delta": {}, "finish_reason": "tool_calls"});
    deltas.into_iter().chain([end]).collect()
}

#[tokio::test]
async fn a_response_is_asked_for_as_a_chat_and_read_from_its_chunks() {
    let engine = writing(thinking_and_calling());
    let site = Site::with(config(), engine.clone()).await;
    let function = json!({"name": "get_weather", "parameters": {"type": "object"}});
    let mut tool = function.clone();
    tool["type"] = "function".into();
    let format = json!({"type": "json_schema", "name": "output", "schema": {"type": "object"}});
    let body = asked(
        "Weather?",
        json!({
            "instructions": "Be brief.",
            "tools": [tool],
            "temperature": 0.7,
            "text": {"format": format},
            "reasoning": {"effort": "low"},
        }),
    );
    let [whole, streamed] = site.whole_and_streamed(RESPONSES, body).await;
    let schema = json!({"name": "output", "schema": {"type": "object"}, "strict": true});
    let expected = json!({
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
        ],
        "stream": true,
        "stream_options": {"include_usage": true},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "temperature": 0.7,
        "max_tokens": 512,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low",
    });
    assert_eq!(latest_body(&engine), expected);
    let whole = whole.json();
    let [reasoning, said, call] = [0_usize, 1, 2].map(|index| &whole["output"][index]);
    assert_eq!(reasoning["content"][0]["text"], "Hm.", "{whole}");
    assert_eq!(said["content"][0]["text"], "I look.", "{whole}");
    let call = [&call["call_id"], &call["name"], &call["arguments"]];
    assert_eq!(call, ["call_1", "get_weather", "{\"city\":\"Oslo\"}"]);
    let counted = &whole["usage"]["output_tokens_details"]["reasoning_tokens"];
    assert_eq!(*counted, 1, "{whole}");
    assert_eq!(
        responses::joined(&streamed),
        responses::without_ids(whole.clone())
    );
    site.close().await;
}

#[tokio::test]
async fn a_message_is_asked_for_as_a_chat_and_read_from_its_chunks() {
    let engine = writing(thinking_and_calling());
    let site = Site::with(config(), engine.clone()).await;
    let url = "https://example.org/a.png";
    let image = json!({"type": "image", "source": {"type": "url", "url": url}});
    let question = json!({"type": "text", "text": "Weather here?"});
    let tool = json!({"name": "get_weather", "input_schema": {"type": "object"}});
    let mut body = message(
        "",
        json!({"tools": [tool], "tool_choice": {"type": "any"}, "stop_sequences": ["END"]}),
    );
    body["messages"][0]["content"] = json!([question, image]);
    let [whole, streamed] = site.whole_and_streamed(MESSAGES, body).await;
    let function = json!({"name": "get_weather", "parameters": {"type": "object"}});
    let shown = json!({"type": "image_url", "image_url": {"url": url}});
    let expected = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": [question, shown]}],
        "stream": true,
        "stream_options": {"include_usage": true},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "max_tokens": 512,
        "stop": ["END"],
    });
    assert_eq!(latest_body(&engine), expected);
    let whole = whole.json();
    let [said, call] = [0_usize, 1].map(|index| &whole["content"][index]);
    assert_eq!(said["text"], "I look.", "{whole}");
    assert_eq!(call["id"], "call_1", "{whole}");
    assert_eq!(call["input"], json!({"city": "Oslo"}), "{whole}");
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    assert_eq!(messages::joined(&streamed), messages::without_ids(whole));
    site.close().await;
}

#[tokio::test]
async fn an_answer_is_cut_where_its_chunks_say_so() {
    let cut = json!({"delta": {"content": "I"}, "finish_reason": "length"});
    let site = Site::with(config(), writing(vec![cut])).await;
    let response = site.post(RESPONSES, &asked("Hi", json!({}))).await.json();
    assert_eq!(response["status"], "incomplete", "{response}");
    let answer = site.post(MESSAGES, &message("Hi", json!({}))).await.json();
    assert_eq!(answer["stop_reason"], "max_tokens", "{answer}");
    site.close().await;
}

#[tokio::test]
async fn what_is_no_object_of_the_api_ends_its_request() {
    let plain = Script::new(|_, out| async move {
        out.text("plain", 1).await?;
        Ok(Finish::stop())
    });
    let site = Site::with(config(), reading(plain)).await;
    let answer = site.post(MESSAGES, &message("Hi", json!({}))).await;
    assert_eq!(answer.status, 500, "{}", answer.text());
    site.close().await;
}

#[tokio::test]
async fn an_error_object_ends_its_request_with_that_error() {
    let failing = Script::new(|_, out| async move {
        let chunk = json!({"choices": [{"delta": {"content": "I"}}]});
        out.text(chunk.to_string(), 1).await?;
        let error = json!({"message": "Too many images.", "type": "invalid_request_error"});
        out.text(json!({"error": error}).to_string(), 0).await?;
        Ok(Finish::stop())
    });
    let site = Site::with(config(), reading(failing)).await;
    for (path, mut body) in [
        (RESPONSES, asked("Hi", json!({}))),
        (MESSAGES, message("Hi", json!({}))),
    ] {
        let answer = site.post(path, &body).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert_eq!(answer.json()["error"]["message"], "Too many images.");
        body["stream"] = true.into();
        let told = site.post(path, &body).await.text();
        assert!(told.contains("Too many images."), "{told}");
    }
    site.close().await;
}

#[tokio::test]
async fn what_takes_tokens_of_ours_is_refused() {
    let site = Site::with(config(), reader()).await;
    let rated = asked("Hi", json!({"top_logprobs": 1}));
    site.post(RESPONSES, &rated).await.blames("top_logprobs");
    let counted = chat("Hi", json!({}));
    let refused = site.post("/v1/messages/count_tokens", &counted).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(refused.text().contains("tokenizes by itself"));
    site.close().await;
}
