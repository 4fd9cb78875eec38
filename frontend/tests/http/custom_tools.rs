//! Custom tools: the model sees functions of a text, the client gets and sends the text.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::responses::{RESPONSES, asked, joined, without_ids};
use crate::script::Script;
use crate::support::{
    CHAT, MODEL, Site, chat, config, encode, thinking_and_calling, tokenizer, with, with_template,
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

#[tokio::test]
async fn a_response_has_calls_of_custom_tools_as_items() {
    let (site, engine) = site().await;
    let run = json!({"type": "custom", "name": "run", "description": "Runs.", "format": {"type": "text"}});
    let tools = json!([{"type": "web_search"}, run, {"type": "function", "name": "now"}]);
    let body = asked("Run.", json!({"tools": tools}));
    let [whole, streamed] = site.whole_and_streamed(RESPONSES, body).await;
    let whole = whole.json();
    assert_eq!(joined(&streamed), without_ids(whole.clone()));
    let items = whole["output"].as_array().expect("items");
    let is_call = |item: &&Value| item["type"] == "custom_tool_call";
    let call = items.iter().find(is_call).expect("a call");
    assert_eq!(
        (&call["name"], &call["input"]),
        (&json!("run"), &json!(INPUT))
    );
    let output = json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "name": "run", "output": "Hi."});
    let input = json!([{"role": "user", "content": "Run."}, call, output]);
    let body = asked(input, json!({"tools": tools}));
    let response = site.post(RESPONSES, &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(prompt(&engine), SHOWN);
    let id = response.json()["id"].as_str().expect("an id").to_owned();
    let listed = site.get(&format!("{RESPONSES}/{id}/input_items")).await;
    let kinds = ["custom_tool_call_output", "custom_tool_call", "message"];
    for (item, kind) in listed.json()["data"]
        .as_array()
        .expect("items")
        .iter()
        .zip(kinds)
    {
        assert_eq!(item["type"], kind);
    }
    site.close().await;
}

/// Nothing holds it to the grammar, which the header says.
#[tokio::test]
async fn the_model_sees_the_grammar_of_a_custom_tool() {
    let (site, engine) = site().await;
    let grammar = json!({"syntax": "lark", "definition": "start: \"a\""});
    let run = |format: Value| json!({"name": "run", "description": "Runs.", "format": format});
    let of_chat = run(json!({"type": "grammar", "grammar": grammar}));
    let of_chat = json!([{"type": "custom", "custom": of_chat}]);
    let of_response = run(with(grammar, json!({"type": "grammar"})));
    let of_response = json!([with(of_response, json!({"type": "custom"}))]);
    let chat = chat("Run.", json!({"tools": of_chat}));
    let asked = asked("Run.", json!({"tools": of_response}));
    for (path, body, ignored) in [
        (CHAT, chat, "tools[0].custom.format"),
        (RESPONSES, asked, "tools[0].format"),
    ] {
        let response = site.post(path, &body).await;
        let named = response.header("x-genset-ignored");
        assert_eq!(named, Some(ignored), "{}", response.text());
        let prompt = prompt(&engine);
        assert!(
            prompt.contains("Runs.\n\n") && prompt.contains(" lark grammar:\nstart: \"a\""),
            "{prompt}"
        );
    }
    site.close().await;
}

#[tokio::test]
async fn what_is_wrong_in_a_responses_custom_tool_is_named() {
    let (site, _) = site().await;
    let custom = |name: &str| json!({"type": "custom", "name": name});
    let mut bound = custom("f");
    bound["format"] = json!({"type": "grammar", "syntax": "peg", "definition": "start: /a/"});
    let function = json!({"type": "function", "name": "f"});
    let namespace = json!({"type": "namespace", "name": "a", "tools": [function]});
    for (tools, param) in [
        (json!([function, bound]), "tools[1].format.syntax"),
        (json!([namespace, custom("a b")]), "tools[1].name"),
        (json!([namespace, custom("a__f")]), "tools"),
    ] {
        let body = asked("Run.", json!({"tools": tools}));
        site.post(RESPONSES, &body).await.blames(param);
    }
    site.close().await;
}
