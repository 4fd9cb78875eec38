//! OpenAI's Responses API, from outside.

mod held;
mod long;
mod namespaces;
mod references;

use genset_backend_common::{EngineError, ErrorKind};
use serde_json::{Map, Value, json};

use crate::client::{Response, request};
use crate::golden;
use crate::script::Script;
use crate::support::{
    CALLS, CHAT, MODEL, Site, chat, config, echo, echo_text, encode, thinking_and_calling,
    tokenizer, with, with_template,
};

pub(crate) const RESPONSES: &str = "/v1/responses";

fn tools() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "name": "get_weather", "description": "Weather.", "parameters": city}])
}

/// A request with further fields.
pub(crate) fn asked(input: impl Into<Value>, further: Value) -> Value {
    let body = json!({"model": MODEL, "input": input.into(), "max_output_tokens": 512});
    with(body, further)
}

/// The events of a streamed response, which are numbered.
fn events(response: &Response) -> Vec<Value> {
    let events = response.named_events();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    events
}

/// Assembles a streamed response as clients do, and checks that every event comes where it may.
pub(crate) fn joined(response: &Response) -> Value {
    let mut output: Vec<Value> = Vec::new();
    let mut deltas = String::new();
    let mut is_open = false;
    let events = events(response);
    let (last, events) = events.split_last().expect("events");
    for (number, event) in events.iter().enumerate() {
        let kind = event["type"].as_str().expect("a type");
        if kind.starts_with("response.output_")
            || kind.contains("content_part")
            || kind.contains("arguments")
        {
            assert!(number >= 2, "{event}");
        }
        match kind {
            "response.created" => assert_eq!(number, 0),
            "response.in_progress" => assert_eq!(number, 1),
            "response.output_item.added" => {
                assert!(!std::mem::replace(&mut is_open, true));
                assert_eq!(event["output_index"], output.len());
                assert_eq!(event["item"]["status"], "in_progress");
                output.push(event["item"].clone());
                deltas.clear();
            }
            "response.content_part.added" => {
                assert_eq!(event["item_id"], output.last().expect("an item")["id"]);
                assert_eq!(event["part"]["text"], "");
            }
            "response.output_text.delta"
            | "response.reasoning_text.delta"
            | "response.function_call_arguments.delta"
            | "response.custom_tool_call_input.delta" => {
                assert!(is_open && event["output_index"] == output.len() - 1);
                assert_eq!(event["item_id"], output.last().expect("an item")["id"]);
                deltas += event["delta"].as_str().expect("text");
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], deltas.as_str());
            }
            "response.function_call_arguments.done" => {
                assert_eq!(event["arguments"], deltas.as_str())
            }
            "response.custom_tool_call_input.done" => assert_eq!(event["input"], deltas.as_str()),
            "response.content_part.done" => assert_eq!(event["part"]["text"], deltas.as_str()),
            "response.output_item.done" => {
                assert!(std::mem::replace(&mut is_open, false));
                assert_eq!(event["output_index"], output.len() - 1);
                *output.last_mut().expect("an item") = event["item"].clone();
            }
            other => panic!("{other}: {event}"),
        }
    }
    assert!(!is_open);
    assert_eq!(last["response"]["output"], Value::Array(output));
    let status = last["response"]["status"].as_str().expect("a status");
    assert_eq!(last["type"], format!("response.{status}"));
    without_ids(last["response"].clone())
}

pub(crate) fn without_ids(mut response: Value) -> Value {
    for name in ["id", "created_at"] {
        response[name] = Value::Null;
    }
    response["completed_at"] = response["completed_at"].is_number().into();
    for item in response["output"].as_array_mut().into_iter().flatten() {
        for name in ["id", "call_id"] {
            if !item[name].is_null() {
                item[name] = Value::Null;
            }
        }
    }
    response
}

#[tokio::test]
async fn responses_whole_and_streamed() {
    let site = Site::start(echo()).await;
    let cases = [
        ("responses_plain", json!({})),
        ("responses_length", json!({"max_output_tokens": 2})),
        (
            "responses_streamed",
            json!({"stream": true, "max_output_tokens": 3, "metadata": {"a": "b"}, "user": "u"}),
        ),
    ];
    for (name, further) in cases {
        golden::check(
            name,
            &site.post(RESPONSES, &asked("Hello there", further)).await,
        );
    }
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn thoughts_text_and_calls_are_items() {
    let site = Site::thinking_and_calling(Script::tokens(encode(CALLS))).await;
    let body = asked("Weather?", json!({"tools": tools()}));
    golden::check("responses_tools", &site.post(RESPONSES, &body).await);
    let body = asked("Weather?", json!({"tools": tools(), "stream": true}));
    golden::check(
        "responses_tools_streamed",
        &site.post(RESPONSES, &body).await,
    );
    site.close().await;
}

#[tokio::test]
async fn streamed_and_whole_responses_agree() {
    let texts = [
        CALLS,
        "Hello <b>.",
        "",
        "<think>Hm.</think> Yes. <tool_c",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> and so on",
    ];
    for text in texts {
        let site = Site::thinking_and_calling(Script::tokens(encode(text))).await;
        for further in [
            json!({}),
            json!({"tools": tools()}),
            json!({"tools": tools(), "tool_choice": "none"}),
            json!({"tools": tools(), "parallel_tool_calls": false, "instructions": "Be brief."}),
            json!({"tools": tools(), "max_output_tokens": 40}),
        ] {
            let body = asked("Weather?", further.clone());
            let [whole, streamed] = site.whole_and_streamed(RESPONSES, body).await;
            assert_eq!(
                joined(&streamed),
                without_ids(whole.json()),
                "{text} {further}"
            );
        }
        site.close().await;
    }
}

#[tokio::test]
async fn log_probabilities_come_with_the_text() {
    let site = Site::start(Script::rated(encode("Hello there"))).await;
    for further in [
        json!({"top_logprobs": 2}),
        json!({"top_logprobs": 2, "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}),
    ] {
        let body = asked("Hi", further);
        let [whole, streamed] = site.whole_and_streamed(RESPONSES, body).await;
        let whole = whole.json();
        let part = &whole["output"][0]["content"][0];
        let rated = part["logprobs"].as_array().expect("a list");
        assert_eq!(rated.len(), encode("Hello there").len());
        assert_eq!(rated[0]["top_logprobs"].as_array().map(Vec::len), Some(2));
        assert_eq!(joined(&streamed)["output"][0]["content"][0], *part);
    }
    site.close().await;
}

#[tokio::test]
async fn a_conversation_goes_on_from_a_response() {
    let engine = Script::tokens(encode("Paris."));
    let site = Site::start(engine.clone()).await;
    let first = asked(
        "What is the capital of France?",
        json!({"instructions": "Be brief."}),
    );
    let first = site.post(RESPONSES, &first).await.json();
    let id = first["id"].as_str().expect("an id").to_owned();
    let second = asked("And of Spain?", json!({"previous_response_id": id}));
    let second = site.post(RESPONSES, &second).await.json();
    assert_eq!(second["previous_response_id"], id.as_str());
    let third = asked(
        "And of Italy?",
        json!({"previous_response_id": second["id"]}),
    );
    assert_eq!(site.post(RESPONSES, &third).await.status, 200);

    // The engine sees what a chat of the same messages shows it. Instructions apply only to their own request.
    let messages = json!([
        {"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Spain?"}, {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]);
    site.post(CHAT, &chat("", json!({"messages": messages})))
        .await;
    let requests = engine.requests();
    let prompt = |index: usize| {
        let tokens = requests[index].tokens().expect("tokens");
        tokenizer().decode_all(tokens, false).expect("they decode")
    };
    assert!(prompt(0).contains("Be brief."));
    assert!(!prompt(1).contains("Be brief."));
    assert_eq!(prompt(2), prompt(3));

    // A stored response can be retrieved, listed and deleted.
    let path = format!("{RESPONSES}/{id}");
    assert_eq!(site.get(&path).await.json(), first);
    let path_of_second = format!("{RESPONSES}/{}", second["id"].as_str().expect("an id"));
    let listed = |query: &str| {
        let path = format!("{path_of_second}/input_items{query}");
        let site = &site;
        async move { site.get(&path).await.json() }
    };
    let ascending = listed("?order=asc").await;
    let texts: Vec<&Value> = ascending["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|item| &item["content"][0]["text"])
        .collect();
    assert_eq!(
        texts,
        ["What is the capital of France?", "Paris.", "And of Spain?"]
    );
    assert_eq!(ascending["has_more"], false);
    let newest = listed("?limit=1").await;
    assert_eq!(newest["data"][0]["content"][0]["text"], "And of Spain?");
    assert_eq!(newest["has_more"], true);
    let after = listed(&format!(
        "?after={}",
        newest["last_id"].as_str().expect("an id")
    ))
    .await;
    assert_eq!(after["data"][0]["content"][0]["text"], "Paris.");
    for (query, param) in [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_0", "after"),
        ("includefoo=1", "includefoo"),
        ("tpyo=1", "tpyo"),
    ] {
        let path = format!("{path_of_second}/input_items?{query}");
        site.get(&path).await.blames(param);
    }
    assert_eq!(listed("?include[]=a").await["data"][0], newest["data"][0]);
    for (query, param) in [
        ("stream=true", "stream"),
        ("includefoo=1", "includefoo"),
        ("tpyo=1", "tpyo"),
    ] {
        site.get(&format!("{path}?{query}")).await.blames(param);
    }
    let query = "stream=false&include%5B%5D=a&include_obfuscation=true&starting_after=0";
    assert_eq!(site.get(&format!("{path}?{query}")).await.status, 200);
    let cancel = site.post(&format!("{path}/cancel"), &json!({})).await;
    assert_eq!(cancel.status, 400);
    let delete = || request("DELETE", &path, "", "");
    assert_eq!(site.send(delete()).await.json()["deleted"], true);
    assert_eq!(site.send(delete()).await.status, 404);
    assert_eq!(site.get(&path).await.status, 404);
    assert_eq!(site.get(&format!("{path}/input_items")).await.status, 404);
    let gone = site.post(&format!("{path}/cancel"), &json!({})).await;
    assert_eq!(gone.status, 404);
    let late = asked("And?", json!({"previous_response_id": id}));
    let late = site.post(RESPONSES, &late).await;
    assert_eq!(late.status, 400);
    assert_eq!(late.json()["error"]["code"], "previous_response_not_found");
    // The second stores the whole conversation itself.
    let further = asked("And?", json!({"previous_response_id": second["id"]}));
    assert_eq!(site.post(RESPONSES, &further).await.status, 200);
    site.close().await;
}

/// A template that prints everything that reaches it.
const SHOWS_ALL: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|\
    {% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments.city }};{% endfor %}]{% endfor %}";

#[tokio::test]
async fn calls_and_what_they_came_to_reach_the_template() {
    let engine = Script::tokens(encode(CALLS));
    let worker = with_template(thinking_and_calling(), SHOWS_ALL);
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let first = asked("Weather?", json!({"tools": tools(), "stream": true}));
    let first = site.post(RESPONSES, &first).await;
    let first = events(&first).pop().expect("events")["response"].clone();
    let calls: Vec<&Value> = first["output"]
        .as_array()
        .expect("items")
        .iter()
        .filter(|item| item["type"] == "function_call")
        .collect();
    assert_eq!(calls.len(), 2);
    let output = |call: &Value, text: &str| json!({"type": "function_call_output", "call_id": call["call_id"], "output": text});
    let parts = json!([{"type": "input_text", "text": "Sun."}]);
    let results = json!([
        output(calls[0], "Rain."),
        {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": parts},
        {"role": "user", "content": [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "now?"}]},
    ]);
    let second = asked(
        results,
        json!({"previous_response_id": first["id"], "tools": tools()}),
    );
    let response = site.post(RESPONSES, &second).await;
    assert_eq!(response.status, 200, "{}", response.text());
    // The same conversation, sent whole.
    let mut items = vec![
        json!({"type": "message", "role": "user", "content": "Weather?",
            "internal_chat_message_metadata_passthrough": {"turn_id": "t"}}),
    ];
    items.extend(first["output"].as_array().cloned().unwrap_or_default());
    items.extend(second["input"].as_array().cloned().unwrap_or_default());
    let whole = asked(items, json!({"tools": tools(), "store": false}));
    let response = site.post(RESPONSES, &whole).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let requests = engine.requests();
    assert_eq!(requests[1].input, requests[2].input);
    let prompt = tokenizer().decode_all(requests[1].tokens().expect("tokens"), false);
    let expected = "[user|Weather?||][assistant|I look.|I need the weather.|get_weather Oslo;get_weather Rome;]\
        [tool|Rain.||][tool|Sun.||][user|And now?||]";
    assert_eq!(prompt.expect("they decode"), expected);
    site.close().await;
}

#[tokio::test]
async fn an_error_after_the_first_byte_is_the_last_event() {
    let error = EngineError::new(ErrorKind::Disconnected, "the worker is gone");
    let site = Site::start(Script::failing(encode("Hel"), error)).await;
    let response = site
        .post(RESPONSES, &asked("Hi", json!({"stream": true})))
        .await;
    let response = joined(&response);
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"]["code"], "server_error");
    let told = response["error"]["message"].as_str().expect("a message");
    assert!(told.contains("worker was lost"), "{told}");
    assert_eq!(response["output"][0]["status"], "incomplete");
    site.close().await;
}

#[tokio::test]
async fn an_engine_of_text_answers_too() {
    let site = Site::start(echo_text()).await;
    let model = site.get("/v1/models").await.json()["data"][0]["id"].clone();
    let body = json!({"model": model, "input": "Hello", "instructions": "Be brief."});
    let response = site.post(RESPONSES, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.json()["status"], "completed");
    site.close().await;
}

#[tokio::test]
async fn what_is_wrong_is_named_in_the_words_of_this_api() {
    let site = Site::start(echo()).await;
    let item = |item: Value| json!({"input": [item]});
    let many: Map<String, Value> = (0..17).map(|at| (at.to_string(), json!("x"))).collect();
    let cases = [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 3}), "input"),
        (item(json!("x")), "input[0]"),
        (
            item(json!({"role": "poet", "content": "x"})),
            "input[0].role",
        ),
        (item(json!({"role": "user"})), "input[0].content"),
        (
            item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "input[0].content[0].image_url",
        ),
        (
            item(json!({"role": "user", "content": [{"type": "input_text"}]})),
            "input[0].content[0].text",
        ),
        (
            item(json!({"role": "user", "content": "x", "tpyo": 1})),
            "input[0].tpyo",
        ),
        (
            item(json!({"type": "web_search_call", "id": "x"})),
            "input[0].type",
        ),
        (
            item(json!({"type": "item_reference", "id": "x"})),
            "input[0].id",
        ),
        (
            item(json!({"type": "function_call", "name": "f", "arguments": "{}"})),
            "input[0].call_id",
        ),
        (
            item(json!({"type": "function_call_output", "call_id": "c"})),
            "input[0].output",
        ),
        (
            item(json!({"type": "reasoning", "content": "x"})),
            "input[0].content",
        ),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": 9}), "temperature"),
        (json!({"top_p": 2}), "top_p"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (
            json!({"include": ["file_search_call.results"]}),
            "include[0]",
        ),
        (json!({"include": [1]}), "include[0]"),
        (json!({"background": true}), "background"),
        (json!({"conversation": "x"}), "conversation"),
        (json!({"truncation": "some"}), "truncation"),
        (json!({"prompt": {"id": "x"}}), "prompt"),
        (json!({"metadata": {"a": 1}}), "metadata"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata"),
        (json!({"metadata": {"x".repeat(65): "a"}}), "metadata"),
        (json!({"metadata": many}), "metadata"),
        (json!({"user": ["u"]}), "user"),
        (json!({"prompt_cache_key": {}}), "prompt_cache_key"),
        (json!({"safety_identifier": 1}), "safety_identifier"),
        (
            json!({"safety_identifier": "x".repeat(65)}),
            "safety_identifier",
        ),
        (
            json!({"prompt_cache_options": {"mode": "x".repeat(1024)}}),
            "prompt_cache_options",
        ),
        (
            json!({"prompt_cache_retention": []}),
            "prompt_cache_retention",
        ),
        (json!({"max_tool_calls": "3"}), "max_tool_calls"),
        (
            json!({"previous_response_id": "resp_0"}),
            "previous_response_id",
        ),
        (json!({"reasoning": {"effort": 1}}), "reasoning.effort"),
        (json!({"text": {"verbosity": 1}}), "text.verbosity"),
        (
            json!({"text": {"format": {"type": "poem"}}}),
            "text.format.type",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "a"}}}),
            "text.format.schema",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "schema": {}}}}),
            "text.format.name",
        ),
        (
            json!({"text": {"format": {"type": "json_object"}}}),
            "text.format",
        ),
        (json!({"tools": [{"type": "file_search"}]}), "tools[0].type"),
        (
            json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}),
            "tool_choice",
        ),
        (
            json!({"tool_choice": {"type": "web_search"}}),
            "tool_choice.type",
        ),
        (
            json!({"tools": [{"type": "function", "name": "a b"}]}),
            "tools[0].name",
        ),
        (
            json!({"tools": [{"type": "function", "name": "a", "parameters": 1}]}),
            "tools[0].parameters",
        ),
        (
            json!({"tool_choice": {"type": "function", "name": "f"}}),
            "tool_choice.name",
        ),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice.type"),
        (json!({"stream_options": {}}), "stream_options"),
        (json!({"store": "yes"}), "store"),
        (json!({"tpyo": 1}), "tpyo"),
    ];
    for (further, param) in cases {
        site.post(RESPONSES, &asked("Hi", further))
            .await
            .blames(param);
    }
    let unknown = json!({"model": "nope"});
    assert_eq!(
        site.post(RESPONSES, &asked("Hi", unknown)).await.status,
        404
    );
    site.close().await;
}
