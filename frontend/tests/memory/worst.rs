//! Bodies of two megabytes that would expand as much as possible.

use serde_json::json;

use crate::{Site, TURN, bound};

const BODY_BYTES: usize = 2 << 20;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// A body with `inner` in this field, after the fields that the API requires.
fn around(path: &str, field: &str, inner: &str) -> Vec<u8> {
    let hi = r#"[{"role": "user", "content": "Hi"}]"#;
    let needed = match path {
        CHAT | "/tokenize" if field != "messages" => format!(r#""messages": {hi}, "#),
        MESSAGES | "/v1/messages/count_tokens" if field != "messages" => {
            format!(r#""max_tokens": 4, "messages": {hi}, "#)
        }
        MESSAGES => r#""max_tokens": 4, "#.into(),
        COMPLETIONS if field != "prompt" => r#""prompt": "Hi", "#.into(),
        RESPONSES if field != "input" => r#""input": "Hi", "#.into(),
        _ => String::new(),
    };
    format!(r#"{{"model": "tiny", {needed}"{field}": {inner}}}"#).into_bytes()
}

/// `first`, then `one` as often as it fits, then `last`.
fn repeated(first: &str, one: &str, last: &str) -> String {
    let times = BODY_BYTES / one.len();
    format!("{first}{}{last}", one.repeat(times))
}

/// Lists and objects that are short as text and large in memory.
fn shapes() -> Vec<String> {
    let names: String = (0..BODY_BYTES / 10)
        .map(|at| format!("\"{at:x}\":0,"))
        .collect();
    vec![
        repeated("[0", ",0", "]"),
        repeated("[[[0]]", ",[[0]]", "]"),
        repeated("[{}", ",{}", "]"),
        repeated("[{\"a\":0}", ",{\"a\":0}", "]"),
        repeated("[\"\"", ",\"\"", "]"),
        format!("{{{names}\"a\":0}}"),
        repeated("{\"a\":0", ",\"a\":0", "}"),
        repeated("\"", "\\u0001", "\""),
        repeated("\"", "\\\"", "\""),
        repeated("\"", "a", "\""),
        // Not JSON.
        repeated("[0", ",0", ""),
        repeated("", "[", ""),
        repeated("", "{\"a\":", ""),
        repeated("[", "[", "0"),
        repeated("\"", "\\", ""),
    ]
}

/// The fields to send them in: unknown fields, ignored fields, and fields of every kind that is read.
const FIELDS: [(&str, &str); 36] = [
    (CHAT, "x"),
    (CHAT, "metadata"),
    (CHAT, "messages"),
    (CHAT, "model"),
    (CHAT, "temperature"),
    (CHAT, "tools"),
    (CHAT, "stop"),
    (CHAT, "logit_bias"),
    (CHAT, "genset"),
    (CHAT, "stop_token_ids"),
    (CHAT, "guided_json"),
    (CHAT, "guided_choice"),
    (CHAT, "response_format"),
    (CHAT, "chat_template_kwargs"),
    (CHAT, "tool_choice"),
    (CHAT, "service_tier"),
    (COMPLETIONS, "prompt"),
    (COMPLETIONS, "suffix"),
    (EMBEDDINGS, "input"),
    ("/v1/rerank", "documents"),
    ("/v1/score", "text_2"),
    ("/tokenize", "prompt"),
    ("/tokenize", "messages"),
    ("/detokenize", "tokens"),
    (MESSAGES, "messages"),
    (MESSAGES, "system"),
    (MESSAGES, "tools"),
    (MESSAGES, "metadata"),
    ("/v1/messages/count_tokens", "x"),
    (RESPONSES, "input"),
    (RESPONSES, "instructions"),
    (RESPONSES, "tools"),
    (RESPONSES, "metadata"),
    (RESPONSES, "prompt_cache_options"),
    (RESPONSES, "text"),
    ("/v1/responses/input_tokens", "input"),
];

/// Sends a body. Returns a message if it took too much.
async fn check(site: &Site, path: &str, body: &[u8]) -> Option<String> {
    let (status, answer, peak) = site.measure(path, body).await;
    let shown = String::from_utf8_lossy(body.get(..120).unwrap_or(body)).into_owned();
    let factor = peak as f64 / body.len() as f64;
    // A response repeats its request; a refusal does not.
    let is_short = status == 200 || answer.len() < 100_000;
    let is_good = peak <= bound(body) && status < 500 && is_short;
    (!is_good).then(|| format!("{path} {status} {peak} bytes, {factor:.1} times: {shown}"))
}

#[tokio::test]
async fn no_shape_of_json_swells() {
    let _turn = TURN.lock().await;
    let site = Site::start().await;
    let shapes = shapes();
    let mut bad = Vec::new();
    for (at, (path, field)) in FIELDS.into_iter().enumerate() {
        // Every shape goes to a few fields, and some fields get all shapes.
        let all = path == CHAT && matches!(field, "x" | "messages");
        for (index, shape) in shapes.iter().enumerate() {
            if all || field == "prompt" || index % 8 == at % 8 {
                bad.extend(check(&site, path, &around(path, field, shape)).await);
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
    site.is_whole().await;
    site.close().await;
}

/// Valid so far: each API's own objects, as many as fit into two megabytes.
fn crowds() -> Vec<(&'static str, Vec<u8>)> {
    let list = |one: serde_json::Value| {
        let one = one.to_string();
        repeated(&format!("[{one}"), &format!(",{one}"), "]")
    };
    let text = json!({"type": "text", "text": ""});
    let call = json!({"type": "tool_use", "id": "", "name": "", "input": {}});
    let calls = json!({"id": "", "type": "function", "function": {"name": "", "arguments": "{}"}});
    let said = |content: &str| format!(r#"[{{"role": "user", "content": {content}}}]"#);
    let arguments = repeated("[0", ",0", "]").replace('"', "\\\"");
    let arguments = format!(
        r#"[{{"role": "assistant", "tool_calls": [{{"id": "a", "type": "function",
            "function": {{"name": "f", "arguments": "{{\"a\": {arguments}}}"}}}}]}}]"#
    );
    let user = list(json!({"role": "user", "content": ""}));
    let calling = format!(
        r#"[{{"role": "assistant", "tool_calls": {}}}]"#,
        list(calls)
    );
    let using = format!(r#"[{{"role": "assistant", "content": {}}}]"#, list(call));
    let annotations = format!(r#"{{"annotations": {{"a": {}}}}}"#, list(json!(0)));
    let outputs = list(json!({"type": "function_call_output", "call_id": "", "output": ""}));
    let crowds = [
        (CHAT, "messages", user.clone()),
        (CHAT, "messages", said(&list(text.clone()))),
        (CHAT, "messages", arguments),
        (CHAT, "messages", calling),
        (CHAT, "stop_token_ids", list(json!(1))),
        (CHAT, "genset", annotations),
        (COMPLETIONS, "prompt", list(json!(""))),
        (COMPLETIONS, "prompt", list(json!([1]))),
        (EMBEDDINGS, "input", list(json!([1, 2]))),
        (MESSAGES, "messages", said(&list(text))),
        (MESSAGES, "messages", using),
        (RESPONSES, "input", user),
        (RESPONSES, "input", outputs),
    ];
    // Showing them would take forty bytes each.
    let prompt = list(json!(5));
    let shown = format!(r#"{{"model": "tiny", "echo": true, "prompt": {prompt}}}"#);
    // Each of the running answers looks for all of them.
    let stops = vec!["x".repeat(1024); 32];
    let stopped =
        json!({"model": "tiny", "prompt": vec!["a"; 256], "max_tokens": 1, "stop": stops});
    let stopped = (COMPLETIONS, stopped.to_string().into_bytes());
    let crowds = crowds.map(|(path, field, inner)| (path, around(path, field, &inner)));
    let shown = (COMPLETIONS, shown.into_bytes());
    crowds.into_iter().chain([shown, stopped]).collect()
}

#[tokio::test]
async fn no_crowd_of_good_objects_swells() {
    let _turn = TURN.lock().await;
    let site = Site::start().await;
    let mut bad = Vec::new();
    for (path, body) in crowds() {
        bad.extend(check(&site, path, &body).await);
    }
    assert!(bad.is_empty(), "{bad:#?}");
    site.is_whole().await;
    site.close().await;
}
