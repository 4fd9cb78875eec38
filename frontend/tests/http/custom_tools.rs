//! Custom tools: the model sees functions of a text, the client gets and sends the text.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::script::Script;
use crate::support::{
    CHAT, MODEL, Site, chat, config, encode, thinking_and_calling, tokenizer, with_template,
};

/// Two calls, of which the first is of the custom tool.
const SAID: &str = "<tool_call>\n{\"name\": \"run\", \"arguments\": {\"input\": \"say \\\"hi\\\"\\n\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

/// The input of the first.
const INPUT: &str = "say \"hi\"\n";

/// Shows calls and what the custom tool takes.
const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}|\
    {% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments.input }}{% endfor %}]{% endfor %}\
    {{ tools[0].function.description }} {{ tools[0].function.parameters.required[0] }}";

/// What it shows of a call and its output.
const SHOWN: &str = "[user|Run.|][assistant||run say \"hi\"\n][tool|Hi.|]Runs. input";

async fn site() -> (Site, Arc<Script>) {
    let engine = Script::tokens(encode(SAID));
    let worker = with_template(thinking_and_calling(), TEMPLATE);
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    (site, engine)
}

/// The prompt of the latest request.
fn prompt(engine: &Script) -> String {
    let request = engine.requests().pop().expect("a request");
    let prompt = tokenizer().decode_all(request.tokens().expect("tokens"), false);
    prompt.expect("they decode")
}

#[tokio::test]
async fn a_chats_call_of_a_custom_tool_has_its_input() {
    let (site, engine) = site().await;
    let now = json!({"type": "function", "function": {"name": "now"}});
    let tools = json!([{"type": "custom", "custom": {"name": "run", "description": "Runs."}}, now]);
    let body = chat("Run.", json!({"tools": tools}));
    let [whole, streamed] = site.whole_and_streamed(CHAT, body).await;
    let calls = whole.json()["choices"][0]["message"]["tool_calls"].clone();
    assert_eq!(calls[0]["type"], "custom");
    assert_eq!(calls[0]["custom"], json!({"name": "run", "input": INPUT}));
    assert_eq!(calls[1]["type"], "function");
    let deltas = streamed.chunks().into_iter().filter_map(|chunk| {
        let call = &chunk["choices"][0]["delta"]["tool_calls"][0];
        (call["index"] == 0).then(|| call.clone())
    });
    let deltas: Vec<Value> = deltas.collect();
    assert_eq!(deltas.len(), 2, "{deltas:?}");
    assert_eq!(deltas[0]["type"], "custom");
    assert_eq!(deltas[0]["custom"], json!({"name": "run", "input": ""}));
    assert_eq!(deltas[1], json!({"index": 0, "custom": {"input": INPUT}}));
    let messages = json!([
        {"role": "user", "content": "Run."},
        {"role": "assistant", "tool_calls": [calls[0]]},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Hi."},
    ]);
    let body = json!({"model": MODEL, "messages": messages, "tools": tools});
    let response = site.post(CHAT, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(prompt(&engine), SHOWN);
    site.close().await;
}
