//! Whole transcripts, compared byte for byte except ids, times and ports.

use serde_json::{Value, json};

use crate::client::{Response, request};
use crate::script::Script;
use crate::support::{CHAT, COMPLETIONS, MODEL, Site, chat, completion, echo, echo_text, encode};
use genset_backend_common::EngineError;
use genset_backend_common::output::Finish;

/// Replaces each run of `is_part` characters after `mark` by `X`.
fn redact(text: &str, mark: &str, is_part: impl Fn(char) -> bool) -> String {
    let mut parts = text.split(mark);
    let mut redacted = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(&is_part);
        let what = if rest.len() < part.len() { "X" } else { "" };
        redacted.extend([mark, what, rest]);
    }
    redacted
}

fn redact_all(text: &str) -> String {
    let is_time = |c: char| c == ' ' || c.is_ascii_digit();
    let times = ["\"created\":", "\"created_at\":"].into_iter();
    let text = times.fold(text.to_owned(), |text, mark| redact(&text, mark, is_time));
    let is_digit = |c: char| c.is_ascii_digit();
    // Null if the answer is incomplete, which must stay visible.
    let ends = ["\"completed_at\":", "\"completed_at\": "].into_iter();
    let text = ends.fold(text, |text, mark| redact(&text, mark, is_digit));
    let ids = [
        "cmpl-", "rerank-", "score-", "req-", "\"call_", "\"msg_", "\"resp_", "\"rs_", "\"fc_",
    ];
    let is_hex = |c: char| c.is_ascii_hexdigit();
    let text = (ids.into_iter()).fold(text, |text, mark| redact(&text, mark, is_hex));
    redact(&text, "genset-0.1.", is_digit)
}

/// The transcript of an answer: status, the headers that matter, the body.
fn transcript(response: &Response) -> String {
    let mut shown = format!("{}\n", response.status);
    for name in [
        "content-type",
        "cache-control",
        "allow",
        "retry-after",
        "x-request-id",
    ] {
        if let Some(value) = response.header(name) {
            shown += &format!("{name}: {value}\n");
        }
    }
    let body = response.text();
    let body = match serde_json::from_str::<Value>(&body) {
        Ok(json) => serde_json::to_string_pretty(&json).expect("JSON is JSON"),
        Err(_) => body,
    };
    redact_all(&(shown + "\n" + &body))
}

pub(crate) fn check(name: &str, response: &Response) {
    snapshot(name, transcript(response));
}

fn snapshot(name: &str, shown: String) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, shown));
}

#[tokio::test]
async fn chat_completions() {
    let site = Site::start(echo()).await;
    let cases = [
        ("chat_plain", json!({})),
        (
            "chat_plain_length",
            json!({"max_completion_tokens": 3, "n": 2}),
        ),
        ("chat_streamed", json!({"stream": true})),
        (
            "chat_streamed_usage",
            json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 3}),
        ),
        (
            "chat_past_eos",
            json!({"ignore_eos": true, "add_generation_prompt": false, "max_tokens": 7}),
        ),
    ];
    for (name, further) in cases {
        let response = site.post(CHAT, &chat("Hello there", further)).await;
        check(name, &response);
    }
    site.close().await;
}

#[tokio::test]
async fn completions() {
    let site = Site::start(echo()).await;
    let tokens = encode("one two");
    let cases = [
        ("completion_plain", completion("say \"hi\"\n", json!({}))),
        ("completion_tokens", completion(tokens.clone(), json!({}))),
        (
            "completion_prompts",
            completion(
                vec![Value::from("first"), "second".into(), "third".into()],
                json!({"n": 2}),
            ),
        ),
        (
            "completion_token_lists",
            completion(
                vec![Value::from(tokens.clone()), tokens.into()],
                json!({"max_tokens": 1}),
            ),
        ),
        (
            "completion_echo",
            completion("one two", json!({"echo": true, "n": 2, "max_tokens": 1})),
        ),
        (
            "completion_echo_streamed",
            completion("one two", json!({"echo": true, "stream": true})),
        ),
        (
            "completion_streamed",
            completion("one two", json!({"stream": true})),
        ),
        (
            "completion_streamed_usage",
            completion(
                "one two",
                json!({"stream": true, "stream_options": {"include_usage": true}, "stop": "two"}),
            ),
        ),
    ];
    for (name, body) in cases {
        check(name, &site.post(COMPLETIONS, &body).await);
    }
    site.close().await;
}

/// The choices take turns, each with its index, and the prompt counts once.
#[tokio::test]
async fn choices_streamed_side_by_side() {
    let site = Site::start(Script::tokens(encode("a b"))).await;
    let body = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
    check(
        "chat_streamed_n2",
        &site.post(CHAT, &chat("Hello", body)).await,
    );
    let body = json!({"n": 2, "stream": true});
    check(
        "completion_streamed_n2",
        &site.post(COMPLETIONS, &completion("Hello", body)).await,
    );
    site.close().await;
}

#[tokio::test]
async fn an_engine_on_text() {
    let site = Site::start(echo_text()).await;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one  two "}, {"type": "text", "text": "three"}]},
    ]);
    let body = json!({"model": MODEL, "messages": messages});
    check("text_chat_plain", &site.post(CHAT, &body).await);
    let body = chat(
        "one two three",
        json!({"stream": true, "stop": ["o th"], "stream_options": {"include_usage": true}}),
    );
    check("text_chat_streamed", &site.post(CHAT, &body).await);
    let body = completion("one two three", json!({"max_tokens": 2}));
    check(
        "text_completion_plain",
        &site.post(COMPLETIONS, &body).await,
    );
    let body = completion(encode("one"), json!({}));
    check(
        "text_completion_tokens",
        &site.post(COMPLETIONS, &body).await,
    );
    site.close().await;
}

#[tokio::test]
async fn models_and_probes() {
    let site = Site::start(echo()).await;
    for (name, path) in [
        ("models_list", "/v1/models"),
        ("models_one", "/v1/models/tiny"),
        ("models_unknown", "/v1/models/meta-llama/Llama-3"),
        ("models_not_utf8", "/v1/models/%ff"),
        ("live", "/live"),
        ("ready", "/ready"),
        ("health", "/health"),
        ("unknown_route", "/v1/nothing?x=1"),
        ("wrong_method_get", CHAT),
    ] {
        check(name, &site.get(path).await);
    }
    let response = site.send(request("DELETE", "/v1/models", "", "")).await;
    check("wrong_method_delete", &response);
    assert!(
        site.get("/metrics")
            .await
            .text()
            .contains("genset_http_requests_in_flight")
    );
    site.close().await;
}

/// Every kind of bad field, in one transcript.
#[tokio::test]
async fn refusals() {
    let site = Site::start(echo()).await;
    let long = "x".repeat(2000);
    let cases = [
        json!({"model": null}),
        json!({"model": 7}),
        json!({"model": "gpt-4"}),
        json!({"messages": null}),
        json!({"messages": "hi"}),
        json!({"messages": []}),
        json!({"messages": ["hi"]}),
        json!({"messages": [{"content": "hi"}]}),
        json!({"messages": [{"role": "user"}]}),
        json!({"messages": [{"role": "user", "content": 3}]}),
        json!({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": {}}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "id": "a"}]}]}),
        json!({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}),
        json!({"messages": [{"role": "tool", "content": "hi"}]}),
        json!({"messages": [{"role": "function", "name": "f", "content": "hi"}]}),
        json!({"messages": [{"role": "narrator", "content": "hi"}]}),
        json!({"messages": [{"role": "assistant", "content": "hi"}]}),
        json!({"n": 0}),
        json!({"n": 17}),
        json!({"n": 1.5}),
        json!({"stream": "yes"}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"stream": true, "stream_options": {"include_use": true}}),
        json!({"stop": ""}),
        json!({"stop": [3]}),
        json!({"stop": {}}),
        json!({"stop": vec!["a"; 33]}),
        json!({"stop": long}),
        json!({"max_tokens": 0}),
        json!({"max_tokens": -1}),
        json!({"max_completion_tokens": 0}),
        json!({"max_completion_tokens": 1, "max_tokens": 0}),
        json!({"max_tokens": 2, "min_tokens": 3}),
        json!({"temperature": 2.5}),
        json!({"temperature": "hot"}),
        json!({"top_p": -0.5}),
        json!({"top_k": -2}),
        json!({"presence_penalty": 1}),
        json!({"logit_bias": {"a": 1}}),
        json!({"logit_bias": {"1": "b"}}),
        json!({"logit_bias": [1]}),
        json!({"seed": 1.5}),
        json!({"stop_token_ids": [-1]}),
        json!({"logprobs": true}),
        json!({"top_logprobs": 2}),
        json!({"logprobs": true, "top_logprobs": 21}),
        json!({"tools": {}}),
        json!({"tools": ["f"]}),
        json!({"tools": [{"type": "custom"}]}),
        json!({"tools": [{"type": "function"}]}),
        json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
        json!({"tools": vec![json!({"type": "function", "function": {"name": "f"}}); 129]}),
        json!({"tool_choice": "required"}),
        json!({"tool_choice": "often"}),
        json!({"tool_choice": 1}),
        json!({"tool_choice": {"type": "allowed_tools"}}),
        json!({"tool_choice": {"type": "function"}}),
        json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}),
        json!({"parallel_tool_calls": "no"}),
        json!({"functions": [{"name": "f"}]}),
        json!({"function_call": {"name": "f"}}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "grammar"}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
        json!({"guided_json": {}}),
        json!({"guided_json": {}, "guided_regex": "a"}),
        json!({"guided_choice": []}),
        json!({"genset": {"guided_grammar": "root ::= x"}}),
        json!({"reasoning_effort": 1}),
        json!({"priority": 1}),
        json!({"genset": {"tpyo": 1}}),
        json!({"nvext": 1}),
        json!({"nvext": {"annotations": ["a"]}}),
        json!({"chat_template_kwargs": []}),
        json!({"tpyo": 1}),
    ];
    let completions = [
        json!({"prompt": null}),
        json!({"prompt": {}}),
        json!({"prompt": []}),
        json!({"prompt": ""}),
        json!({"prompt": [1, "a"]}),
        json!({"prompt": ["a", 1]}),
        json!({"prompt": [[]]}),
        json!({"prompt": [2048]}),
        json!({"prompt": vec!["a"; 257]}),
        json!({"echo": "yes"}),
        json!({"echo": true, "logprobs": 1}),
        json!({"suffix": "x"}),
        json!({"best_of": 2}),
        json!({"logprobs": 1}),
        json!({"logprobs": 21}),
        json!({"logprobs": true}),
        json!({"response_format": {"type": "text"}}),
        json!({"messages": []}),
    ];
    let chats = cases.map(|further| (CHAT, chat("Hello", further.clone()), further));
    let completions =
        completions.map(|further| (COMPLETIONS, completion("Hello", further.clone()), further));
    let mut shown = String::new();
    for (path, body, further) in chats.into_iter().chain(completions) {
        let response = site.post(path, &body).await;
        let error = response.json()["error"].clone();
        let mut asked = further.to_string();
        asked.truncate(80);
        shown += &format!("{asked}\n  {} {error}\n", response.status);
    }
    snapshot("refusals", shown);
    site.is_well().await;
    site.close().await;
}

/// The status was sent long before: the error is an event, and the stream does not end with `[DONE]`.
#[tokio::test]
async fn an_error_after_the_first_token() {
    let error = EngineError::internal("the device fell off the bus");
    let engine = Script::failing(encode("so far so good"), error);
    let site = Site::start(engine.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    check("error_streamed", &site.post(CHAT, &body).await);
    let body = chat("Hello", json!({"stream": true, "n": 2}));
    check("error_streamed_n2", &site.post(CHAT, &body).await);
    check(
        "error_plain",
        &site.post(CHAT, &chat("Hello", json!({}))).await,
    );
    engine.refuse(Some(EngineError::new(
        genset_backend_common::ErrorKind::Overloaded,
        "this engine is full; try again later",
    )));
    check("overloaded", &site.post(CHAT, &body).await);
    site.idle().await;
    assert_eq!(engine.active(), 0);
    site.close().await;
}

#[tokio::test]
async fn a_panic_in_the_engine_ends_its_request_only() {
    let engine = Script::new(|request, out| async move {
        out.token(encode("Hi").first().copied().unwrap_or(0))
            .await?;
        assert_ne!(request.sampling.seed, Some(13), "an unlucky seed");
        Ok(Finish::stop())
    });
    let site = Site::start(engine.clone()).await;
    let body = chat("Hello", json!({"stream": true, "seed": 13}));
    check("panic_streamed", &site.post(CHAT, &body).await);
    let body = chat("Hello", json!({"seed": 13}));
    check("panic_plain", &site.post(CHAT, &body).await);
    site.is_well().await;
    site.idle().await;
    site.close().await;
}
