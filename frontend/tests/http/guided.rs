//! Structured output: passed to engines that declare it, refused by others.

use genset_backend_common::output::Finish;
use genset_backend_common::{GuidedDecoding, config::GuidedKind};
use serde_json::{Value, json};

use crate::script::Script;
use crate::support::{CHAT, COMPLETIONS, Site, chat, completion, config, echo, encode, parsing};

/// Each way to request it, the field to blame if it is not supported, and what the engine receives.
fn ways() -> Vec<(Value, &'static str, GuidedDecoding)> {
    let schema = json!({"type": "object", "required": ["a"]});
    let named = json!({"name": "answer", "strict": true, "schema": schema});
    vec![
        (
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
            GuidedDecoding::JsonObject,
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": named}}),
            "response_format",
            GuidedDecoding::JsonSchema(schema.clone()),
        ),
        (
            json!({"guided_json": schema}),
            "guided_json",
            GuidedDecoding::JsonSchema(schema.clone()),
        ),
        (
            json!({"genset": {"guided_regex": "[a-z]+"}}),
            "genset.guided_regex",
            GuidedDecoding::Regex("[a-z]+".into()),
        ),
        (
            json!({"nvext": {"guided_choice": ["yes", "no"]}}),
            "nvext.guided_choice",
            GuidedDecoding::Choice(vec!["yes".into(), "no".into()]),
        ),
        (
            json!({"guided_grammar": "root ::= \"a\""}),
            "guided_grammar",
            GuidedDecoding::Grammar("root ::= \"a\"".into()),
        ),
    ]
}

#[tokio::test]
async fn an_engine_that_declares_it_is_told() {
    use GuidedKind::{Choice, Grammar, JsonObject, JsonSchema, Regex};
    let kinds = [JsonObject, JsonSchema, Regex, Choice, Grammar];
    let engine = Script::tokens(encode("{}")).declaring(|can| can.guided.extend(kinds));
    let site = Site::start(engine.clone()).await;
    for (further, _, expected) in ways() {
        let response = site.post(CHAT, &chat("Hi", further.clone())).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let told = engine.requests().pop().and_then(|request| request.guided);
        assert_eq!(told.as_deref(), Some(&expected), "{further}");
        if further.get("response_format").is_none() {
            let response = site.post(COMPLETIONS, &completion("Hi", further)).await;
            assert_eq!(response.status, 200, "{}", response.text());
            let told = engine.requests().pop().and_then(|request| request.guided);
            assert_eq!(told.as_deref(), Some(&expected));
        }
    }
    let plain = json!({"response_format": {"type": "text"}});
    site.post(CHAT, &chat("Hi", plain)).await;
    assert_eq!(engine.requests().pop().expect("a request").guided, None);
    site.close().await;
}

#[tokio::test]
async fn an_engine_that_does_not_refuses_by_name() {
    let site = Site::start(echo()).await;
    for (further, field, _) in ways() {
        let response = site.post(CHAT, &chat("Hi", further)).await;
        response.does_not_support(field);
    }
    let format = json!({"response_format": {"type": "text"}});
    let response = site.post(COMPLETIONS, &completion("Hi", format)).await;
    response.blames("response_format");
    site.close().await;
}

#[tokio::test]
async fn any_object_is_a_schema_too() {
    let engine = Script::tokens(encode("{}")).declaring_guided();
    let site = Site::start(engine.clone()).await;
    let format = json!({"response_format": {"type": "json_object"}});
    site.post(CHAT, &chat("Hi", format)).await;
    let told = engine.requests().pop().and_then(|request| request.guided);
    let object = GuidedDecoding::JsonSchema(json!({"type": "object"}));
    assert_eq!(told.as_deref(), Some(&object));
    site.close().await;
}

/// For a reasoning model, an answer bound from its first token is all content, without reasoning.
#[tokio::test]
async fn a_bound_answer_is_all_content() {
    let engine = Script::new(|request, out| async move {
        let text = if request.guided.is_some() {
            "{\"a\": 1}"
        } else {
            "hm</think>Yes"
        };
        for token in encode(text) {
            out.token(token).await?;
        }
        Ok(Finish::stop())
    });
    let worker = parsing("hermes", "deepseek_r1");
    let site = Site::with_worker(config(), worker, engine.declaring_guided()).await;
    let free = site.post(CHAT, &chat("Hi", json!({}))).await.json();
    let message = &free["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("hm"), &json!("Yes"))
    );
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let further = json!({"guided_json": {}, "tools": tools, "tool_choice": "none"});
    let bound = site.post(CHAT, &chat("Hi", further)).await.json();
    let message = &bound["choices"][0]["message"];
    assert_eq!(message["content"], "{\"a\": 1}");
    assert!(message["reasoning_content"].is_null());
    site.close().await;
}
