//! Anthropic's Messages API, from outside.

use genset_backend_common::{EngineError, ErrorKind};
use serde_json::{Value, json};

use crate::client::{Response, request};
use crate::golden;
use crate::script::Script;
use crate::support::{
    CALLS, CHAT, Site, chat, config, echo, encode, thinking_and_calling, tokenizer, with,
    with_template,
};

pub(crate) const MESSAGES: &str = "/v1/messages";

/// A header that the official client sends with every request.
pub(crate) const VERSION: &str = "anthropic-version: 2023-06-01\r\n";

fn tools() -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"name": "get_weather", "description": "Weather.", "input_schema": city}])
}

/// A user's message, with further fields.
pub(crate) fn message(text: &str, further: Value) -> Value {
    chat(text, with(json!({"max_tokens": 512}), further))
}

/// Assembles a streamed message as Anthropic's clients do.
pub(crate) fn joined(response: &Response) -> Value {
    let mut events = response.named_events().into_iter();
    let start = events.next().expect("a first event");
    assert_eq!(start["type"], "message_start");
    let mut message = start["message"].clone();
    let mut blocks: Vec<Value> = Vec::new();
    let mut input = String::new();
    let mut is_open = false;
    for event in events {
        match event["type"].as_str().expect("a type") {
            "ping" => assert!(blocks.is_empty()),
            "content_block_start" => {
                assert!(!std::mem::replace(&mut is_open, true));
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                assert!(is_open && event["index"] == blocks.len() - 1);
                let block = blocks.last_mut().expect("an open block");
                let delta = &event["delta"];
                let (kind, field) = match block["type"].as_str().expect("a type") {
                    "text" => ("text_delta", "text"),
                    "thinking" if delta["type"] == "signature_delta" => {
                        ("signature_delta", "signature")
                    }
                    "thinking" => ("thinking_delta", "thinking"),
                    _ => ("input_json_delta", "partial_json"),
                };
                assert_eq!(delta["type"], kind);
                let piece = delta[field].as_str().expect("text");
                if kind == "input_json_delta" {
                    input += piece;
                } else {
                    block[field] = (block[field].as_str().expect("text").to_owned() + piece).into();
                }
            }
            "content_block_stop" => {
                assert!(std::mem::replace(&mut is_open, false));
                let block = blocks.last_mut().expect("a block");
                if !input.is_empty() {
                    let broken = json!({"INVALID_JSON": input});
                    block["input"] = serde_json::from_str(&input).unwrap_or(broken);
                    input.clear();
                }
            }
            "message_delta" => {
                assert!(!is_open);
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => message["content"] = blocks.clone().into(),
            other => panic!("{other}: {event}"),
        }
    }
    without_ids(message)
}

pub(crate) fn without_ids(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().into_iter().flatten() {
        if block["type"] == "tool_use" {
            block["id"] = Value::Null;
        }
    }
    message
}

#[tokio::test]
async fn messages_whole_and_streamed() {
    let site = Site::start(echo()).await;
    let cases = [
        ("messages_plain", json!({})),
        ("messages_length", json!({"max_tokens": 2})),
        (
            "messages_streamed",
            json!({"stream": true, "max_tokens": 3}),
        ),
    ];
    for (name, further) in cases {
        let response = site.post(MESSAGES, &message("Hello there", further)).await;
        golden::check(name, &response);
    }
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn thoughts_text_and_calls_are_blocks() {
    let site = Site::thinking_and_calling(Script::tokens(encode(CALLS))).await;
    let thinking = json!({"type": "adaptive"});
    let body = json!({"tools": tools(), "thinking": thinking});
    golden::check(
        "messages_tools",
        &site.post(MESSAGES, &message("Weather?", body)).await,
    );
    let body = json!({"tools": tools(), "thinking": thinking, "stream": true});
    let response = site.post(MESSAGES, &message("Weather?", body)).await;
    golden::check("messages_tools_streamed", &response);
    site.close().await;
}

#[tokio::test]
async fn streamed_and_whole_messages_agree() {
    let texts = [
        CALLS,
        "Hello <b>.",
        "",
        "<think>Hm.</think> Yes. <tool_c",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a",
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> and so on",
    ];
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    for text in texts {
        let site = Site::thinking_and_calling(Script::tokens(encode(text))).await;
        for further in [
            json!({}),
            json!({"tools": tools()}),
            json!({"tools": tools(), "thinking": thinking, "max_tokens": 2000}),
            json!({"tools": tools(), "thinking": {"type": "disabled"}}),
            json!({"tools": tools(), "tool_choice": {"type": "none"}}),
            json!({"tools": tools(), "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
            json!({"tools": tools(), "stop_sequences": ["Rome"]}),
            json!({"tools": tools(), "max_tokens": 40}),
        ] {
            let body = message("Weather?", further.clone());
            let [whole, streamed] = site.whole_and_streamed(MESSAGES, body).await;
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
async fn thoughts_are_shown_only_to_those_who_ask() {
    let site = Site::thinking_and_calling(Script::tokens(encode("<think>Hm.</think>Yes."))).await;
    let kinds = async |further: Value| {
        let response = site.post(MESSAGES, &message("Well?", further)).await;
        let content = response.json()["content"].clone();
        let kinds = content.as_array().cloned().unwrap_or_default();
        kinds
            .iter()
            .map(|block| block["type"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(kinds(json!({})).await, ["text"]);
    assert_eq!(
        kinds(json!({"thinking": {"type": "disabled"}})).await,
        ["text"]
    );
    let shown = json!({"thinking": {"type": "adaptive"}});
    assert_eq!(kinds(shown).await, ["thinking", "text"]);
    let omitted = json!({"thinking": {"type": "adaptive", "display": "omitted"}});
    assert_eq!(kinds(omitted).await, ["text"]);
    site.close().await;
}

#[tokio::test]
async fn the_reason_says_why_it_ended() {
    let site = Site::thinking_and_calling(Script::tokens(encode(CALLS))).await;
    let reason = async |further: Value| {
        let response = site.post(MESSAGES, &message("Weather?", further)).await;
        response.json()["stop_reason"].clone()
    };
    assert_eq!(reason(json!({"tools": tools()})).await, "tool_use");
    assert_eq!(reason(json!({})).await, "end_turn");
    assert_eq!(reason(json!({"max_tokens": 3})).await, "max_tokens");
    let stops = json!({"tools": tools(), "stop_sequences": ["Paris", "Rome"]});
    let response = site
        .post(MESSAGES, &message("Weather?", stops))
        .await
        .json();
    assert_eq!(response["stop_reason"], "stop_sequence");
    assert_eq!(response["stop_sequence"], "Rome");
    site.close().await;
}

/// A template that prints everything that reaches it.
const SHOWS_ALL: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|\
    {{ m.tool_call_id }}|{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }};\
    {% endfor %}]{% endfor %}";

#[tokio::test]
async fn a_conversation_reaches_the_template_as_a_chat() {
    let engine = Script::tokens(encode("Hi"));
    let worker = with_template(thinking_and_calling(), SHOWS_ALL);
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let cached = json!({"type": "ephemeral"});
    let plain = json!({"type": "text", "media_type": "text/plain", "data": "And wind."});
    let messages = json!([
        {"role": "user", "content": "One."},
        {"role": "user", "content": [
            {"type": "text", "text": "Two.", "cache_control": cached},
            {
                "type": "document", "title": "Of rain", "context": "A poem.", "citations": {"enabled": false},
                "source": {"type": "content", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "rains."}]},
            },
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "", "cache_control": cached},
            {"type": "text", "text": "I look.", "citations": null},
            {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "b", "name": "get_weather", "input": {"city": "Rome"}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Rain."}, {"type": "document", "source": plain}]},
            {"type": "tool_result", "tool_use_id": "b", "content": "lost", "is_error": true},
            {"type": "text", "text": "And now?"},
        ]},
        {"role": "system", "content": [{"type": "text", "text": "Be quick.", "cache_control": cached}]},
    ]);
    let billing = "x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;";
    let system = json!([
        {"type": "text", "text": billing}, {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": cached},
    ]);
    let further = json!({
        "messages": messages, "system": system, "tools": tools(), "top_k": 3, "top_p": 0.5, "temperature": 1,
        "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": cached,
    });
    let response = site.post(MESSAGES, &message("", further)).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let request = engine.requests().remove(0);
    let prompt = tokenizer().decode_all(request.tokens().expect("tokens"), false);
    let expected = "[system|Be brief.\n\nBe kind.|||][user|One.\n\nTwo.\n\nOf rain\n\nA poem.\n\nIt\n\nrains.|||]\
        [assistant|I look.|Hm.||a get_weather Oslo;b get_weather Rome;]\
        [tool|Rain.\n\nAnd wind.||a|][tool|Error: lost||b|][user|And now?|||][system|Be quick.|||]";
    assert_eq!(prompt.expect("they decode"), expected);
    assert_eq!(request.sampling.top_k, Some(3));
    assert_eq!(request.sampling.top_p, Some(0.5));
    assert_eq!(request.stop.max_tokens, Some(512));
    site.close().await;
}

#[tokio::test]
async fn counted_tokens_are_those_a_message_pays_for() {
    let site = Site::start(echo()).await;
    // What the official client's count takes besides.
    let further =
        json!({"system": "Be brief.", "speed": "fast", "cache_control": {"type": "ephemeral"}});
    let answer = site
        .post(MESSAGES, &message("Hello there", further.clone()))
        .await
        .json();
    let chat_too = json!({"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"},
    ]});
    let chat_too = site.post(CHAT, &chat("", chat_too)).await.json();
    let mut body = message("Hello there", further);
    body.as_object_mut()
        .expect("an object")
        .remove("max_tokens");
    let counted = site.post("/v1/messages/count_tokens", &body).await.json();
    assert_eq!(counted["input_tokens"], answer["usage"]["input_tokens"]);
    assert_eq!(counted["input_tokens"], chat_too["usage"]["prompt_tokens"]);
    site.close().await;
}

/// The error's type, its message, and the status.
pub(crate) fn error(response: &Response) -> (u16, String, String) {
    let body = response.json();
    assert_eq!(body["type"], "error", "{body}");
    let text = |field: &str| body["error"][field].as_str().expect("text").to_owned();
    assert_eq!(
        body["request_id"],
        response.header("request-id").expect("an id")
    );
    (response.status, text("type"), text("message"))
}

#[tokio::test]
async fn bad_requests_name_the_field_as_this_api_calls_it() {
    let site = Site::start(echo()).await;
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let assistant = |content: Value| {
        json!({"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": content}, {"role": "user", "content": "b"},
        ]})
    };
    let tool = |further: Value| {
        let tool = json!({"name": "f", "input_schema": {"type": "object"}});
        json!({"tools": [with(tool, further)]})
    };
    let format = json!({"type": "json_schema", "schema": {}});
    let block = "messages[0].content[0]";
    let cases = [
        ("model", json!({"model": null})),
        ("max_tokens", json!({"max_tokens": null})),
        ("max_tokens", json!({"max_tokens": 0})),
        ("messages", json!({"messages": []})),
        ("messages", json!({"messages": "a"})),
        ("messages[0]", json!({"messages": ["a"]})),
        (
            "messages[0].role",
            json!({"messages": [{"role": "tool", "content": "a"}]}),
        ),
        (
            "messages[0].content",
            json!({"messages": [{"role": "system"}]}),
        ),
        (
            "messages[0].content[0].type",
            json!({"messages": [{"role": "system", "content": [{"type": "image"}]}]}),
        ),
        (
            "messages[0].name",
            json!({"messages": [{"role": "user", "content": "a", "name": "b"}]}),
        ),
        (
            "messages",
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        ),
        ("messages[0].content", user(json!(1))),
        ("messages[0].content", user(json!([]))),
        (block, user(json!(["a"]))),
        (
            &format!("{block}.source.type"),
            user(json!([{"type": "image", "source": {}}])),
        ),
        (
            &format!("{block}.type"),
            user(json!([{"type": "search_result"}])),
        ),
        (
            &format!("{block}.source.type"),
            user(json!([{"type": "document", "source": {"type": "base64"}}])),
        ),
        (
            &format!("{block}.citations"),
            user(
                json!([{"type": "document", "source": {"type": "content", "content": "a"}, "citations": {"enabled": true}}]),
            ),
        ),
        (
            &format!("{block}.type"),
            user(json!([{"type": "tool_use"}])),
        ),
        (&format!("{block}.text"), user(json!([{"type": "text"}]))),
        (
            &format!("{block}.citations"),
            user(json!([{"type": "text", "text": "a", "citations": [{}]}])),
        ),
        (
            &format!("{block}.colour"),
            user(json!([{"type": "text", "text": "a", "colour": 1}])),
        ),
        (
            &format!("{block}.tool_use_id"),
            user(json!([{"type": "tool_result"}])),
        ),
        (
            &format!("{block}.is_error"),
            user(json!([{"type": "tool_result", "tool_use_id": "a", "is_error": 1}])),
        ),
        (
            &format!("{block}.content[0].source"),
            user(
                json!([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]),
            ),
        ),
        (
            &format!("{block}.content[0].type"),
            user(
                json!([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "search_result"}]}]),
            ),
        ),
        (
            "messages[1].content[0].type",
            assistant(json!([{"type": "redacted_thinking", "data": ""}])),
        ),
        (
            "messages[1].content[0].input",
            assistant(json!([{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}])),
        ),
        ("system", json!({"system": 1})),
        ("system[0].type", json!({"system": [{"type": "image"}]})),
        ("stop_sequences", json!({"stop_sequences": "a"})),
        ("stop_sequences", json!({"stop_sequences": [""]})),
        ("stop_sequences", json!({"stop_sequences": vec!["a"; 33]})),
        ("temperature", json!({"temperature": "hot"})),
        ("top_k", json!({"top_k": -2})),
        ("stream", json!({"stream": 1})),
        ("metadata", json!({"metadata": 1})),
        ("service_tier", json!({"service_tier": 1})),
        ("container", json!({"container": "c"})),
        ("mcp_servers", json!({"mcp_servers": [{}]})),
        (
            "context_management.edits[0].type",
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        ),
        ("n", json!({"n": 2})),
        (
            "thinking.type",
            json!({"thinking": {"type": "between_tools"}}),
        ),
        (
            "thinking.budget_tokens",
            json!({"thinking": {"type": "enabled"}}),
        ),
        (
            "thinking.budget_tokens",
            json!({"thinking": {"type": "enabled", "budget_tokens": 10}}),
        ),
        (
            "thinking.budget_tokens",
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ),
        ("tools", json!({"tools": 1})),
        ("tools", tool(json!({}))),
        ("tools[0].type", tool(json!({"type": "bash_20250124"}))),
        ("tools[0].name", tool(json!({"name": null}))),
        ("tools[0].name", tool(json!({"name": "a b"}))),
        ("tools[0].input_schema", tool(json!({"input_schema": null}))),
        (
            "tools[0].defer_loading",
            tool(json!({"defer_loading": true})),
        ),
        (
            "tool_choice.type",
            json!({"tool_choice": {"type": "required"}}),
        ),
        ("tool_choice", json!({"tool_choice": {"type": "any"}})),
        (
            "tool_choice.name",
            json!({"tool_choice": {"type": "tool", "name": "f"}}),
        ),
        (
            "output_config.format.type",
            json!({"output_config": {"format": {"type": "text"}}}),
        ),
        (
            "output_config.format",
            json!({"output_config": {"format": format}}),
        ),
        ("output_config.format", json!({"output_format": format})),
        (
            "output_format",
            json!({"output_config": {"format": format}, "output_format": format}),
        ),
        (
            "output_format.schema",
            json!({"output_format": {"type": "json_schema"}}),
        ),
    ];
    for (field, further) in cases {
        let response = site
            .post(MESSAGES, &message("Hello", further.clone()))
            .await;
        let (status, kind, text) = error(&response);
        assert_eq!(
            (status, kind.as_str()),
            (400, "invalid_request_error"),
            "{further}: {text}"
        );
        assert!(
            text.contains(&format!("'{field}'")) || text.ends_with(&format!(": {field}.")),
            "{field}: {text}"
        );
    }
    for (kind, advice) in [
        ("text_editor_20250728", "a tool of your own"),
        ("web_search_20250305", "run at Anthropic's"),
    ] {
        let body = message("Hello", tool(json!({"type": kind})));
        let (_, _, text) = error(&site.post(MESSAGES, &body).await);
        assert!(text.contains(advice), "{text}");
    }
    site.is_well().await;
    site.close().await;
}

#[tokio::test]
async fn errors_have_anthropics_shape_and_types() {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::thinking_and_calling(engine.clone()).await;
    let missing = message("Hello", json!({"model": "claude"}));
    golden::check("messages_no_model", &site.post(MESSAGES, &missing).await);
    let long = "many words ".repeat(3000);
    let (status, kind, text) = error(&site.post(MESSAGES, &message(&long, json!({}))).await);
    assert_eq!((status, kind.as_str()), (400, "invalid_request_error"));
    assert!(text.contains("2048"), "{text}");
    let refusal = EngineError::new(ErrorKind::Overloaded, "full");
    for (refusal, status, kind) in [
        (refusal, 429, "rate_limit_error"),
        (EngineError::internal("broken"), 500, "api_error"),
        (
            EngineError::new(ErrorKind::DeadlineExceeded, "late"),
            504,
            "timeout_error",
        ),
    ] {
        engine.refuse(Some(refusal));
        for stream in [false, true] {
            let body = message("Hello", json!({"stream": stream}));
            let response = site.post(MESSAGES, &body).await;
            let (got, got_kind, _) = error(&response);
            assert_eq!((got, got_kind.as_str()), (status, kind));
            let retried = response.header("x-should-retry");
            assert_eq!(retried, (status == 504).then_some("false"));
        }
    }
    engine.refuse(None);
    let headers = "x-api-key: k\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: a\r\nx-request-id: mine\r\n";
    let body = message("Hello", json!({})).to_string();
    let response = site.send(request("POST", MESSAGES, headers, body)).await;
    assert_eq!(
        (response.status, response.header("request-id")),
        (200, Some("mine"))
    );
    site.close().await;
}

#[tokio::test]
async fn what_no_route_answers_is_refused_as_the_client_reads_it() {
    let site = Site::start(echo()).await;
    for (method, path, headers, status, kind) in [
        ("GET", MESSAGES, "", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", "", 404, "not_found_error"),
        ("POST", "/v1/complete", VERSION, 404, "not_found_error"),
        ("GET", CHAT, VERSION, 405, "invalid_request_error"),
    ] {
        let response = site.send(request(method, path, headers, "")).await;
        let (got, got_kind, text) = error(&response);
        assert_eq!((got, got_kind.as_str()), (status, kind), "{method} {path}");
        assert!(text.contains(path), "{text}");
        let allow = (status == 405).then_some("POST");
        assert_eq!(response.header("allow"), allow, "{method} {path}");
    }
    site.close().await;
}

#[tokio::test]
async fn an_error_after_the_first_token_is_an_event_and_the_end() {
    let error = EngineError::internal("the device fell off the bus");
    let engine = Script::failing(encode("so far so good"), error);
    let site = Site::start(engine.clone()).await;
    let body = message("Hello", json!({"stream": true}));
    golden::check("messages_error_streamed", &site.post(MESSAGES, &body).await);
    site.idle().await;
    assert_eq!(engine.active(), 0);
    site.close().await;
}

/// The client closes; the engine's request ends.
#[tokio::test]
async fn a_client_that_leaves_cancels_its_message() {
    let engine = Script::silent(encode("Hi").first().copied().expect("a token"));
    let site = Site::start(engine.clone()).await;
    let body = message("Hello", json!({"stream": true}));
    let mut client = site.begin(MESSAGES, &body).await;
    let head = client.head("POST").await.expect("a head");
    assert_eq!(head.status, 200);
    assert!(client.piece().await.is_some());
    drop(client);
    site.idle().await;
    assert_eq!(engine.active(), 0);
    site.close().await;
}
