//! Tools and reasoning, from the request's fields to the model's template, and from its markup to the answer's fields.

use genset_backend_common::GuidedDecoding;
use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::worker::WorkerConfig;
use genset_frontend::{FrontendConfig, FrontendServer, ParserNames};
use genset_runtime::Runtime;
use serde_json::{Value, json};

use crate::client::Response;
use crate::golden::check;
use crate::script::Script;
use crate::support::{
    CALLS, CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, encode, parsing, tokenizer,
    with, with_template, worker_config,
};

fn tools() -> Value {
    let city =
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([{"type": "function", "function": {"name": "get_weather", "parameters": city, "strict": true}}])
}

/// Assembles the message of a streamed answer's first choice as clients do. Returns it with its finish reason.
fn joined(response: &Response) -> (Value, Value) {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    let mut reason = Value::Null;
    for chunk in response.chunks() {
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            let arguments = function["arguments"]
                .as_str()
                .expect("arguments are a string");
            if call["index"] == calls.len() {
                assert_eq!(call["type"], "function");
                assert!(
                    call["id"]
                        .as_str()
                        .is_some_and(|id| id.starts_with("call_"))
                );
                calls.push((function["name"].clone(), String::new()));
            } else {
                assert!(
                    call.get("id").is_none() && function.get("name").is_none(),
                    "{call}"
                );
            }
            calls.last_mut().expect("a call").1 += arguments;
        }
        reason = choice["finish_reason"].clone();
    }
    (json!([content, reasoning, calls]), reason)
}

/// The same for a whole answer.
fn whole(response: &Response) -> (Value, Value) {
    let choice = response.json()["choices"][0].clone();
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let calls: Vec<_> = calls
        .map(|call| {
            (
                call["function"]["name"].clone(),
                call["function"]["arguments"].clone(),
            )
        })
        .collect();
    let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
    let shown = json!([text("content"), text("reasoning_content"), calls]);
    (shown, choice["finish_reason"].clone())
}

#[tokio::test]
async fn calls_and_thoughts_have_fields_of_their_own() {
    let site = Site::thinking_and_calling(Script::tokens(encode(CALLS))).await;
    let body = chat("Weather?", json!({"tools": tools()}));
    check("tools_plain", &site.post(CHAT, &body).await);
    let body = chat("Weather?", json!({"tools": tools(), "stream": true}));
    check("tools_streamed", &site.post(CHAT, &body).await);
    site.close().await;
}

#[tokio::test]
async fn streamed_and_whole_answers_agree() {
    let texts = [
        CALLS,
        "Hello <b>.",
        "<think>Hm.</think> Yes. <tool_c",
        "<tool_call>{\"name\": \"f\", \"arg",
    ];
    for text in texts {
        let site = Site::thinking_and_calling(Script::tokens(encode(text))).await;
        for further in [
            json!({"tools": tools()}),
            json!({"tools": tools(), "parallel_tool_calls": false}),
            json!({"tools": tools(), "tool_choice": "none"}),
            json!({"tools": tools(), "stop": ["Rome", "need"]}),
            json!({"tools": tools(), "max_tokens": 40}),
            json!({}),
        ] {
            let body = chat("Weather?", further.clone());
            let [plain, streamed] = site.whole_and_streamed(CHAT, body).await;
            assert_eq!(joined(&streamed), whole(&plain), "{text} {further}");
        }
        site.close().await;
    }
}

/// Only a cut within a call hides that there are calls: then the reason is that of the cut.
#[tokio::test]
async fn an_answer_that_is_cut_says_tool_calls_if_its_calls_are_whole() {
    let site = Site::thinking_and_calling(Script::tokens(encode(CALLS))).await;
    let within = encode(CALLS.split_once("Oslo").expect("a call").0).len();
    let begun = "{\"city\": \"";
    let one = "{\"city\": \"Oslo\"}";
    for (further, arguments, expected) in [
        (json!({"max_tokens": within}), begun, "length"),
        (json!({"stop": "Oslo"}), begun, "stop"),
        (json!({"stop": "\n</tool_call>"}), one, "tool_calls"),
        (
            json!({"stop": "</tool_call>\n<tool_call>"}),
            one,
            "tool_calls",
        ),
        (
            json!({"stop": "Rome", "parallel_tool_calls": false}),
            one,
            "tool_calls",
        ),
        (json!({"parallel_tool_calls": false}), one, "tool_calls"),
    ] {
        let body = chat("Weather?", with(json!({"tools": tools()}), further.clone()));
        let [plain, streamed] = site.whole_and_streamed(CHAT, body).await;
        let (message, reason) = whole(&plain);
        assert_eq!(reason, expected, "{further}");
        let calls = json!([["get_weather", arguments]]);
        assert_eq!(message[2], calls, "{further}");
        assert_eq!(joined(&streamed), (message, reason), "{further}");
    }
    site.close().await;
}

/// A template that prints everything that reaches it.
const SHOWS_ALL: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|\
    {% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}{% endfor %}]\
    {% endfor %}{{ tools | tojson if tools }}";

/// A template that concatenates arguments with its text, which works only for strings.
const JOINS: &str = "{% for m in messages %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}\
    {% endfor %}{% endfor %}";

/// The prompt that the template renders for a chat.
async fn prompt(template: &str, further: Value) -> String {
    prompt_of(parsing("hermes", "none"), template, further).await
}

async fn prompt_of(worker: WorkerConfig, template: &str, further: Value) -> String {
    let engine = Script::tokens(encode("Hi"));
    let worker = with_template(worker, template);
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let response = site.post(CHAT, &chat("Weather?", further)).await;
    assert_eq!(response.status, 200, "{}", response.text());
    site.close().await;
    let tokens = engine.requests().remove(0);
    let tokens = tokens.tokens().expect("tokens");
    tokenizer().decode_all(tokens, false).expect("they decode")
}

fn conversation() -> Value {
    let function = json!({"name": "get_weather", "arguments": "{\"city\": \"Oslo\"}"});
    json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain."}]},
        {"role": "assistant", "content": "Wet.", "tool_calls": []},
        {"role": "user", "content": "Thanks."},
    ])
}

#[tokio::test]
async fn the_template_sees_tools_calls_and_results() {
    let further = json!({"messages": conversation(), "tools": tools()});
    let shown = prompt(SHOWS_ALL, further).await;
    let expected = "[user|Weather?||][assistant|||call_1 get_weather Oslo][tool|Rain.|call_1|]\
        [assistant|Wet.||][user|Thanks.||]";
    let (messages, seen_tools) = shown.split_at(expected.len());
    assert_eq!(messages, expected);
    assert_eq!(
        serde_json::from_str::<Value>(seen_tools).expect("JSON"),
        tools()
    );
    let further = json!({"messages": conversation(), "tools": tools(), "tool_choice": "none"});
    assert_eq!(prompt(SHOWS_ALL, further).await, expected);
    let further = json!({"messages": conversation()});
    assert_eq!(prompt(JOINS, further).await, "<{\"city\":\"Oslo\"}>");
}

/// The template of gpt-oss has its own name for reasoning, and refuses it beside calls and content.
#[tokio::test]
async fn the_template_of_a_harmony_model_sees_thoughts_as_thinking() {
    const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}|{{ m.thinking }}]{% endfor %}";
    let calls = json!([{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]);
    let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "Noon."});
    let messages = json!([
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": calls},
        result,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Ah.", "tool_calls": calls},
        result,
        {"role": "assistant", "content": "Noon.", "reasoning_content": "So."},
        {"role": "user", "content": "Thanks."},
    ]);
    for (parser, [hm, so]) in [("harmony", ["Hm.", "So."]), ("hermes", ["", ""])] {
        let further = json!({"messages": messages});
        let shown = prompt_of(parsing(parser, "none"), TEMPLATE, further).await;
        let expected =
            format!("[user|][assistant|{hm}][tool|][assistant|][tool|][assistant|{so}][user|]");
        assert_eq!(shown, expected, "{parser}");
    }
}

#[tokio::test]
async fn the_flag_goes_before_the_card() {
    let names = |tool: &str, reasoning: &str| FrontendConfig {
        parsers: ParserNames {
            tool: Some(tool.into()),
            reasoning: Some(reasoning.into()),
        },
        ..config()
    };
    let engine = Script::tokens(encode("<think>Hm.</think>[TOOL_CALLS]now[ARGS]{}"));
    let worker = parsing("hermes", "kimi");
    let site = Site::with_worker(names("mistral", "qwen3"), worker.clone(), engine.clone()).await;
    let response = site
        .post(CHAT, &chat("Time?", json!({"tools": tools()})))
        .await;
    let message = response.json()["choices"][0]["message"].clone();
    assert_eq!(message["reasoning_content"], "Hm.");
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["tool_calls"][0]["function"]["name"], "now");
    let id = message["tool_calls"][0]["id"].as_str().expect("an id");
    assert!(
        id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()),
        "{id}"
    );
    site.close().await;
    let site = Site::with_worker(names("none", "none"), worker, engine).await;
    let response = site.post(CHAT, &chat("Time?", json!({}))).await;
    assert_eq!(
        response.content(),
        "<think>Hm.</think>[TOOL_CALLS]now[ARGS]{}"
    );
    let response = site
        .post(CHAT, &chat("Time?", json!({"tools": tools()})))
        .await;
    let message = response.does_not_support("tools");
    assert!(message.contains("tool_parser"), "{message}");
    site.close().await;
}

/// A template with the marks of calls and reasoning.
const SHOWS_MARKS: &str = "{% set think = '</think>' %}{{ messages[0].content }}{{ tools | tojson if tools }}\
    {% for m in messages if m.tool_calls %}<tool_call>\n{\"name\": \"{{ m.tool_calls[0].function.name }}\"}\n</tool_call>\
    {% endfor %}";

#[tokio::test]
async fn parsers_that_nobody_names_are_found_in_the_template() {
    let unnamed = WorkerConfig {
        tool_parser: None,
        reasoning_parser: Some("auto".into()),
        ..worker_config()
    };
    let names = |tool: Option<&str>| FrontendConfig {
        parsers: ParserNames {
            tool: tool.map(str::to_owned),
            reasoning: None,
        },
        ..config()
    };
    let body = chat("Weather?", json!({"tools": tools()}));
    let ask = async |tool, template| {
        let worker = with_template(unnamed.clone(), template);
        let engine = Script::tokens(encode(CALLS));
        let site = Site::with_worker(names(tool), worker, engine).await;
        let response = site.post(CHAT, &body).await;
        site.close().await;
        response
    };
    for tool in [None, Some("auto")] {
        let (message, reason) = whole(&ask(tool, SHOWS_MARKS).await);
        assert_eq!(reason, "tool_calls");
        assert_eq!(message[0], "I look.");
        assert_eq!(message[1], "I need the weather.");
        assert_eq!(message[2][1][0], "get_weather");
    }
    for (tool, template, has_hint) in [(None, SHOWS_ALL, false), (Some("none"), SHOWS_MARKS, true)]
    {
        let message = ask(tool, template).await.does_not_support("tools");
        assert!(message.contains("--tool-parser"), "{message}");
        assert_eq!(message.contains("hermes"), has_hint, "{message}");
    }
}

#[tokio::test]
async fn a_parser_there_is_none_of_is_an_error_at_the_start() {
    let runtime = Runtime::in_process();
    let parsers = ParserNames {
        tool: Some("hermse".into()),
        reasoning: None,
    };
    let config = FrontendConfig {
        parsers,
        ..config()
    };
    let error = FrontendServer::bind(&runtime, config).await;
    let error = error.expect_err("there is no such parser").to_string();
    assert!(
        error.contains("hermse") && error.contains("hermes, "),
        "{error}"
    );
    runtime.shutdown().await;
}

#[tokio::test]
async fn a_call_is_made_certain_by_guided_decoding_or_refused() {
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let site_without = Site::thinking_and_calling(Script::tokens(encode("Hi"))).await;
    for choice in [json!("required"), named.clone()] {
        let further = json!({"tools": tools(), "tool_choice": choice});
        let response = site_without.post(CHAT, &chat("Weather?", further)).await;
        response.does_not_support("tool_choice");
    }
    site_without.close().await;

    let city = r#"{"city": "Oslo"}"#;
    let engine = Script::new(|request, out| async move {
        let Some(GuidedDecoding::JsonSchema(schema)) = request.guided.as_deref() else {
            return Ok(Finish::stop());
        };
        let city = r#"{"city": "Oslo"}"#;
        let text = match schema["type"].as_str() {
            Some("array") => format!(r#"[{{"name": "get_weather", "parameters": {city}}}]"#),
            _ => city.to_owned(),
        };
        for token in encode(&text) {
            out.token(token).await?;
        }
        Ok(Finish::stop())
    });
    let site = Site::thinking_and_calling(engine.declaring_guided()).await;
    for choice in [json!("required"), named] {
        let further = json!({"tools": tools(), "tool_choice": choice});
        let body = chat("Weather?", further);
        let [plain, streamed] = site.whole_and_streamed(CHAT, body).await;
        let expected = (
            json!(["", "", [["get_weather", city]]]),
            json!("tool_calls"),
        );
        assert_eq!(whole(&plain), expected);
        assert_eq!(joined(&streamed), expected);
    }
    site.close().await;
}

/// The model sees the others too, so that its prompt stays in the prefix cache.
#[tokio::test]
async fn only_allowed_tools_are_called() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let further = |mode: &str| {
        let allowed = json!({"mode": mode, "tools": [tool("get_weather")]});
        let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
        json!({"tools": [tool("get_time"), tool("get_weather")], "tool_choice": choice})
    };
    let call = |name: &str| {
        format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{}}}}</tool_call>")
    };
    let (time, weather) = (call("get_time"), call("get_weather"));
    for (text, calls, reason) in [
        (
            [time.as_str(), &weather].concat(),
            json!([["get_weather", "{}"]]),
            "tool_calls",
        ),
        (time, json!([]), "stop"),
    ] {
        let site = Site::thinking_and_calling(Script::tokens(encode(&text))).await;
        let body = chat("Weather?", further("auto"));
        let [plain, streamed] = site.whole_and_streamed(CHAT, body).await;
        let expected = (json!(["", "", calls]), json!(reason));
        assert_eq!(whole(&plain), expected, "{text}");
        assert_eq!(joined(&streamed), expected, "{text}");
        site.close().await;
    }

    let engine = Script::tokens(encode("[]")).declaring_guided();
    let template = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}";
    let worker = with_template(parsing("hermes", "qwen3"), template);
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let of_chat = chat("Weather?", further("required"));
    let tools = ["get_time", "get_weather"].map(|name| json!({"type": "function", "name": name}));
    let of_response = json!({
        "model": MODEL, "input": "Weather?", "tools": tools,
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [tools[1]]},
    });
    for (path, body) in [(CHAT, of_chat), ("/v1/responses", of_response)] {
        let response = site.post(path, &body).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = engine.requests().pop().expect("a request");
        let Some(GuidedDecoding::JsonSchema(schema)) = request.guided.as_deref() else {
            panic!("it is not guided: {request:?}");
        };
        let calls = schema["items"]["anyOf"].as_array().expect("calls");
        assert_eq!(calls.len(), 1, "{schema}");
        assert_eq!(
            calls[0]["properties"]["name"],
            json!({"const": "get_weather"})
        );
        let prompt = tokenizer().decode_all(request.tokens().expect("tokens"), false);
        assert_eq!(prompt.expect("they decode"), "get_time;get_weather;");
    }
    for (mode, name, param) in [
        ("auto", "f", "tool_choice.tools[0].name"),
        ("none", "get_time", "tool_choice.mode"),
    ] {
        let allowed = json!([{"type": "function", "name": name}]);
        let choice = json!({"type": "allowed_tools", "mode": mode, "tools": allowed});
        let body = json!({"model": MODEL, "input": "Hi", "tools": tools, "tool_choice": choice});
        site.post("/v1/responses", &body).await.blames(param);
    }
    let allowed = json!([{"type": "web_search"}]);
    let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": allowed});
    let body = json!({"model": MODEL, "input": "Hi", "tools": tools, "tool_choice": choice});
    let refused = site.post("/v1/responses", &body).await;
    let why = refused.does_not_support("tool_choice.tools");
    assert!(why.contains("run at OpenAI"), "{why}");
    site.close().await;
}

/// Completions are text: it is passed unchanged, whatever the model's parsers.
#[tokio::test]
async fn completions_are_not_taken_apart() {
    let site = Site::thinking_and_calling(Script::tokens(encode(CALLS))).await;
    let response = site
        .post(COMPLETIONS, &completion("Hi", json!({"max_tokens": 500})))
        .await;
    assert_eq!(response.content(), CALLS);
    let body = completion("Hi", json!({"parallel_tool_calls": true}));
    site.post(COMPLETIONS, &body)
        .await
        .blames("parallel_tool_calls");
    site.close().await;
}

/// The number of reasoning tokens in `text`, as the guide counts them: including the markers.
fn tokens_of_thoughts(text: &str) -> usize {
    let begin = text.find("<think>").expect("thoughts") + "<think>".len();
    let end = text.find("</think>").expect("their end") + "</think>".len();
    let is_thought = |at: usize| (begin..end).contains(&at);
    let tokens = encode(text);
    let length = |count: usize| {
        let text = tokenizer().decode_all(&tokens[..count], false);
        text.expect("they decode").len()
    };
    let places = (0..tokens.len()).map(|index| (length(index), length(index + 1)));
    places
        .filter(|(before, after)| is_thought(*before) || is_thought(*after))
        .count()
}

#[tokio::test]
async fn tokens_of_thoughts_are_counted_apart() {
    let expected = tokens_of_thoughts(CALLS);
    assert!(expected > 4 && expected < encode(CALLS).len() / 2);
    let at_once = Script::new(|_, out| async move {
        for token_ids in encode(CALLS).chunks(7) {
            out.tokens(TokenChunk {
                token_ids: token_ids.iter().copied().collect(),
                logprobs: Default::default(),
            })
            .await?;
        }
        Ok(Finish::stop())
    });
    for engine in [Script::tokens(encode(CALLS)), at_once] {
        let site = Site::thinking_and_calling(engine).await;
        for further in [
            json!({}),
            json!({"tools": tools()}),
            json!({"tools": tools(), "n": 2}),
        ] {
            let choices = further["n"].as_u64().unwrap_or(1);
            let of_usage = |usage: &Value| {
                let details = &usage["completion_tokens_details"];
                assert!(details["reasoning_tokens"].as_u64() < usage["completion_tokens"].as_u64());
                details["reasoning_tokens"].as_u64()
            };
            let expected = u64::try_from(expected).ok().map(|count| count * choices);
            let whole = site.post(CHAT, &chat("Weather?", further.clone())).await;
            assert_eq!(of_usage(&whole.json()["usage"]), expected, "{further}");
            let mut further = further;
            further["stream"] = true.into();
            further["stream_options"] = json!({"include_usage": true});
            let streamed = site.post(CHAT, &chat("Weather?", further)).await;
            let last = streamed.chunks().pop().expect("chunks");
            assert_eq!(of_usage(&last["usage"]), expected);
        }
        let body = json!({"model": MODEL, "input": "Weather?", "tools": tools_of_responses()});
        let [whole, streamed] = site.whole_and_streamed("/v1/responses", body).await;
        let last = streamed.named_events().pop().expect("events");
        for usage in [&whole.json()["usage"], &last["response"]["usage"]] {
            assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], expected);
        }
        site.idle().await;
        let counted = site.metric("genset_http_reasoning_tokens_total");
        assert_eq!(
            counted,
            f64::from(u32::try_from(expected * 10).expect("few"))
        );
        site.close().await;
    }
    // Without a reasoning parser, no reasoning tokens are counted.
    let site = Site::start(Script::tokens(encode(CALLS))).await;
    let usage = site.post(CHAT, &chat("Weather?", json!({}))).await.json()["usage"].clone();
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 0);
    site.close().await;
}

fn tools_of_responses() -> Value {
    json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}])
}
