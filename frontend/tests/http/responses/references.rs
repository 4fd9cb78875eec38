//! Items that a request gives by their ids, as the AI SDK does in its second turn.

use genset_frontend::FrontendConfig;
use serde_json::{Value, json};

use super::{RESPONSES, SHOWS_ALL, asked, tools};
use crate::client::request;
use crate::script::Script;
use crate::support::{CALLS, Site, config, encode, thinking_and_calling, tokenizer, with_template};

fn reference(item: &Value) -> Value {
    json!({"type": "item_reference", "id": item["id"]})
}

#[tokio::test]
async fn an_item_given_by_its_id_is_the_item_itself() {
    let engine = Script::tokens(encode(CALLS));
    let worker = with_template(thinking_and_calling(), SHOWS_ALL);
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let further = json!({"tools": tools()});
    let body = asked("Weather?", further.clone());
    let first = site.post(RESPONSES, &body).await.json();
    let output = first["output"].as_array().expect("items");
    let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(
        kinds,
        ["reasoning", "message", "function_call", "function_call"]
    );
    let results = output[2..].iter().map(
        |call| json!({"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}),
    );
    let results: Vec<Value> = results.collect();
    let references: Vec<Value> = output.iter().map(reference).collect();
    for answer in [output.clone(), references] {
        let question = vec![json!({"role": "user", "content": "Weather?"})];
        let input = [question, answer, results.clone()].concat();
        let body = asked(input, further.clone());
        let response = site.post(RESPONSES, &body).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let path = format!("{RESPONSES}/input_tokens");
        let body = json!({"model": body["model"], "input": body["input"], "tools": tools()});
        let counted = site.post(&path, &body).await.json();
        assert_eq!(
            counted["input_tokens"],
            response.json()["usage"]["input_tokens"]
        );
    }
    let requests = engine.requests();
    assert_eq!(requests[1].input, requests[2].input);
    let prompt = tokenizer().decode_all(requests[2].tokens().expect("tokens"), false);
    let prompt = prompt.expect("a text");
    assert!(prompt.contains("|I look.|I need the weather.|"), "{prompt}");
    site.close().await;
}

#[tokio::test]
async fn an_item_is_known_as_long_as_a_conversation_with_it_is_kept() {
    let keeps_one = FrontendConfig {
        max_stored_responses: 1,
        ..config()
    };
    let site = Site::with(keeps_one, Script::tokens(encode("Paris."))).await;
    let user = json!({"role": "user", "content": "Where?"});
    let mut input = vec![user.clone()];
    let mut last = Value::Null;
    for _ in 0..3 {
        let response = site.post(RESPONSES, &asked(input.clone(), json!({}))).await;
        assert_eq!(response.status, 200, "{}", response.text());
        last = response.json()["id"].clone();
        input.extend([reference(&response.json()["output"][0]), user.clone()]);
    }
    // This one is not stored, so the last one still is.
    let body = asked(input.clone(), json!({"store": false}));
    assert_eq!(site.post(RESPONSES, &body).await.status, 200);
    let path = format!("{RESPONSES}/{}", last.as_str().expect("an id"));
    let delete = request("DELETE", &path, "", "");
    assert_eq!(site.send(delete).await.status, 200);
    site.post(RESPONSES, &body).await.blames("input[1].id");
    site.close().await;
}
