//! Conversations that are too long, and counts of their tokens.

use serde_json::{Value, json};

use super::{RESPONSES, asked, tools};
use crate::golden;
use crate::script::Script;
use crate::support::{MODEL, Site, echo_text, encode, tokenizer, with};

fn decode(tokens: &[u32]) -> String {
    tokenizer().decode_all(tokens, false).expect("a text")
}

/// Forty turns after a system message, several times as long as the model's context.
fn long_talk() -> Value {
    let turn = |index: usize| {
        let said = format!("Turn {index}. {}", "many words ".repeat(40));
        [
            json!({"role": "user", "content": said}),
            json!({"role": "assistant", "content": "I see."}),
        ]
    };
    let mut items: Vec<Value> = (0..40).flat_map(turn).collect();
    items.insert(0, json!({"role": "system", "content": "Stay polite."}));
    items.push(json!({"role": "user", "content": "The last question?"}));
    items.into()
}

#[tokio::test]
async fn a_conversation_that_is_too_long_loses_its_beginning_where_it_may() {
    let engine = Script::tokens(encode("Paris."));
    let site = Site::thinking_and_calling(engine.clone()).await;
    let ask = |further: Value| {
        let body = with(json!({"model": MODEL, "input": long_talk()}), further);
        let site = &site;
        async move { site.post(RESPONSES, &body).await }
    };
    for further in [json!({}), json!({"truncation": "disabled"})] {
        let (status, _, code, _) = ask(further).await.refusal();
        assert_eq!(
            (status, code.as_deref()),
            (400, Some("context_length_exceeded"))
        );
    }
    let mut prompts = Vec::new();
    for further in [
        json!({"truncation": "auto"}),
        json!({"truncation": "auto", "stream": true}),
        json!({"truncation": "auto", "max_output_tokens": 1000}),
    ] {
        let response = ask(further.clone()).await;
        assert_eq!(response.status, 200, "{}", response.text());
        if further["stream"].is_null() {
            assert_eq!(response.json()["truncation"], "auto");
        }
        let request = engine.requests().pop().expect("a request");
        let prompt = request.tokens().expect("tokens").to_vec();
        let text = decode(&prompt);
        for kept in ["Stay polite.", "Turn 39.", "The last question?"] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert!(!text.contains("Turn 0."), "{text}");
        prompts.push(prompt.len());
    }
    // A quarter of the context stays free, or what the answer requests, and not much more.
    assert!((1100..=1536).contains(&prompts[0]), "{prompts:?}");
    assert_eq!(prompts[0], prompts[1]);
    assert!((600..=1048).contains(&prompts[2]), "{prompts:?}");
    // An answer gets all the room that it requests, and no turn is dropped needlessly: one is about 200 tokens.
    for answer in (100..=1000).step_by(60) {
        let response = ask(json!({"truncation": "auto", "max_output_tokens": answer})).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = engine.requests().pop().expect("a request");
        let prompt = request.tokens().expect("tokens").len();
        let room = 2048 - answer;
        assert!((room - 250..=room).contains(&prompt), "{answer}: {prompt}");
    }
    // The last message alone is too long.
    let input = "many words ".repeat(3000);
    let alone = ask(json!({"truncation": "auto", "input": input})).await;
    assert_eq!(alone.refusal().0, 400);
    site.idle().await;
    site.close().await;
}

/// A count equals the usage of the same request.
#[tokio::test]
async fn the_prompts_tokens_are_counted_without_an_answer() {
    const COUNT: &str = "/v1/responses/input_tokens";
    let engine = Script::tokens(encode("Paris."));
    let site = Site::thinking_and_calling(engine.clone()).await;
    let first = site.post(RESPONSES, &asked("Hi", json!({}))).await.json();
    for further in [
        json!({}),
        json!({"instructions": "Be brief.", "truncation": "disabled"}),
        json!({"input": long_talk(), "truncation": "auto"}),
        json!({"tools": tools(), "tool_choice": "auto", "parallel_tool_calls": true}),
        json!({"previous_response_id": first["id"], "text": {"format": {"type": "text"}}}),
        json!({"input": [{"role": "user", "content": "One"}, {"role": "assistant", "content": "two"}]}),
    ] {
        let body = with(json!({"model": MODEL, "input": "And?"}), further.clone());
        let counted = site.post(COUNT, &body).await;
        assert_eq!(counted.status, 200, "{}", counted.text());
        let before = engine.requests().len();
        let usage = site.post(RESPONSES, &body).await.json()["usage"].clone();
        let expected =
            json!({"object": "response.input_tokens", "input_tokens": usage["input_tokens"]});
        assert_eq!(counted.json(), expected, "{further}");
        assert_eq!(engine.requests().len(), before + 1);
    }
    let body = json!({"model": MODEL, "input": "Hello there"});
    golden::check("responses_input_tokens", &site.post(COUNT, &body).await);
    for (further, param, code) in [
        (json!({"input": null}), "input", None),
        (json!({"model": null}), "model", None),
        (
            json!({"conversation": "conv_1"}),
            "conversation",
            Some("unsupported_parameter"),
        ),
        (
            json!({"personality": "friendly"}),
            "personality",
            Some("unsupported_parameter"),
        ),
        (json!({"truncation": "some"}), "truncation", None),
        (json!({"stream": true}), "stream", Some("unknown_parameter")),
        (
            json!({"max_output_tokens": 4}),
            "max_output_tokens",
            Some("unknown_parameter"),
        ),
        (
            json!({"previous_response_id": "resp_0"}),
            "previous_response_id",
            Some("previous_response_not_found"),
        ),
    ] {
        let refused = site.post(COUNT, &with(body.clone(), further)).await;
        refused.blames(param);
        assert_eq!(refused.refusal().2.as_deref(), code, "{param}");
    }
    site.close().await;
    let text = Site::start(echo_text()).await;
    let response = text.post(COUNT, &body).await;
    assert_eq!(response.status, 400, "{}", response.text());
    text.close().await;
}
