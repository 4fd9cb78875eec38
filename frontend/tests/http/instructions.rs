//! System messages within a conversation, which Claude Code and Codex send, for templates that take one at the beginning alone.

use serde_json::{Value, json};

use crate::script::Script;
use crate::support::{CHAT, MODEL, Site, config, encode, tokenizer, with_template, worker_config};

/// As templates of Qwen's models are.
const ONE_AT_THE_BEGINNING: &str = "{% for m in messages %}\
    {% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}\
    [{{ m.role }}|{{ m.content }}]{% endfor %}";

const ANYWHERE: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}";

/// The same conversation in each API.
fn conversations() -> [(&'static str, Value); 3] {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And now?"},
    ]);
    let of_anthropic = json!([
        {"role": "user", "content": "Hi."},
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And now?"},
    ]);
    [
        (CHAT, json!({"model": MODEL, "messages": messages})),
        ("/v1/responses", json!({"model": MODEL, "input": messages})),
        (
            "/v1/messages",
            json!({"model": MODEL, "max_tokens": 9, "system": "Be brief.", "messages": of_anthropic}),
        ),
    ]
}

#[tokio::test]
async fn instructions_lead_only_where_the_template_refuses_them_elsewhere() {
    for (template, expected) in [
        (
            ONE_AT_THE_BEGINNING,
            "[system|Be brief.\n\nBe kind.][user|Hi.][assistant|Hello.][user|And now?]",
        ),
        (
            ANYWHERE,
            "[system|Be brief.][user|Hi.][system|Be kind.][assistant|Hello.][user|And now?]",
        ),
    ] {
        let engine = Script::tokens(encode("Hi"));
        let worker = with_template(worker_config(), template);
        let site = Site::with_worker(config(), worker, engine.clone()).await;
        for (path, body) in conversations() {
            let response = site.post(path, &body).await;
            assert_eq!(response.status, 200, "{path}: {}", response.text());
            let request = engine.requests().pop().expect("a request");
            let prompt = tokenizer().decode_all(request.tokens().expect("tokens"), false);
            assert_eq!(prompt.expect("they decode"), expected, "{path}");
        }
        site.close().await;
    }
}

#[tokio::test]
async fn what_a_template_says_is_said_if_no_order_helps() {
    let template = "{{ raise_exception('no system role') }}";
    let worker = with_template(worker_config(), template);
    let site = Site::with_worker(config(), worker, Script::tokens(encode("Hi"))).await;
    for (path, body) in conversations() {
        let response = site.post(path, &body).await;
        assert_eq!(response.status, 400, "{path}");
        assert!(response.text().contains("no system role"), "{path}");
    }
    site.close().await;
}
