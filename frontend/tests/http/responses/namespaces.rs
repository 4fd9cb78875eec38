//! Functions in namespaces: the model sees both names as one, the client gets them apart.

use serde_json::{Value, json};

use super::{RESPONSES, SHOWS_ALL, asked, joined};
use crate::script::Script;
use crate::support::{Site, config, encode, thinking_and_calling, tokenizer, with_template};

fn function(name: &str) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "name": name, "description": "Weather.", "parameters": city, "strict": false})
}

fn namespace(name: &str, functions: Value) -> Value {
    json!({"type": "namespace", "name": name, "description": "Tools.", "tools": functions})
}

#[tokio::test]
async fn a_call_has_the_namespace_of_its_function() {
    for (name, seen) in [
        ("mcp__sky", "mcp__sky__now"),
        ("mcp__sky__", "mcp__sky__now"),
    ] {
        let said = format!(
            "<tool_call>\n{{\"name\": \"{seen}\", \"arguments\": {{\"city\": \"Oslo\"}}}}\n</tool_call>"
        );
        let engine = Script::tokens(encode(&said));
        let worker = with_template(thinking_and_calling(), SHOWS_ALL);
        let site = Site::with_worker(config(), worker, engine.clone()).await;
        let without = json!({"type": "function", "name": "on"});
        let tools = json!([
            namespace(name, json!([function("now"), without])),
            function("now")
        ]);
        // The functions of OpenAI's responses have all fields.
        let mut repeated = tools.clone();
        let complete =
            json!({"type": "function", "name": "on", "parameters": null, "strict": null});
        repeated[0]["tools"][1] = complete;
        let body = asked("Weather?", json!({"tools": tools}));
        let [whole, streamed] = site.whole_and_streamed(RESPONSES, body).await;
        let mut calls = Vec::new();
        for response in [whole.json(), joined(&streamed)] {
            assert_eq!(response["tools"], repeated);
            let items = response["output"].as_array().expect("items");
            let is_call = |item: &&Value| item["type"] == "function_call";
            let call = items.iter().find(is_call).expect("a call");
            assert_eq!(
                (&call["namespace"], &call["name"]),
                (&json!(name), &json!("now"))
            );
            calls.push(call.clone());
        }
        let call = calls.remove(0);
        let output =
            json!({"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."});
        let items = json!([{"role": "user", "content": "Weather?"}, call, output]);
        let response = site
            .post(RESPONSES, &asked(items, json!({"tools": tools})))
            .await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = engine.requests().pop().expect("a request");
        let prompt = tokenizer().decode_all(request.tokens().expect("tokens"), false);
        let expected = format!("[user|Weather?||][assistant|||{seen} Oslo;][tool|Rain.||]");
        assert_eq!(prompt.expect("they decode"), expected);
        site.close().await;
    }
}

#[tokio::test]
async fn what_is_wrong_in_a_namespace_is_named() {
    let site = Site::thinking_and_calling(Script::tokens(encode("Hi"))).await;
    let f = function("f");
    let custom = json!({"type": "custom", "name": "f"});
    let broken = json!({"type": "function", "name": "g", "parameters": 1});
    let of_f = |name: &str| namespace(name, json!([f]));
    for (tools, param) in [
        (json!([of_f("a b")]), "tools[0].name"),
        (json!([namespace("a", json!([]))]), "tools[0].tools"),
        (
            json!([namespace("a", json!([custom]))]),
            "tools[0].tools[0].type",
        ),
        (
            json!([namespace("a", json!([f, broken]))]),
            "tools[0].tools[1].parameters",
        ),
        (
            json!([namespace("a", json!([f, f]))]),
            "tools[0].tools[1].name",
        ),
        (json!([of_f("a"), function("a__f")]), "tools"),
        (json!([f, of_f(&"a".repeat(126))]), "tools[1].tools[0].name"),
        (
            json!([namespace("a", json!([f, function("g")])), broken]),
            "tools[1].parameters",
        ),
    ] {
        let refused = site
            .post(RESPONSES, &asked("Hi", json!({"tools": tools})))
            .await;
        refused.blames(param);
    }
    site.close().await;
}
