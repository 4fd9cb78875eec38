//! Any input gets an answer that says what is wrong, and the next client is served.

use serde_json::{Value, json};

use crate::client::{post, request};
use crate::support::{CHAT, COMPLETIONS, CONTEXT, MODEL, Site, chat, completion, config, echo};

/// Sends `body` unchanged. The answer must be a 400 whose message contains all `words`, and the server must still work.
async fn refused(site: &Site, path: &str, body: impl AsRef<[u8]>, words: &[&str]) {
    let body = body.as_ref();
    let response = site.send(post(path, body)).await;
    let sent = String::from_utf8_lossy(body.get(..body.len().min(200)).unwrap_or(body));
    let (status, _, _, message) = response.refusal();
    assert_eq!(status, 400, "{sent}: {message}");
    for word in words {
        assert!(message.contains(word), "{sent}: {message}");
    }
    site.is_well().await;
}

#[tokio::test]
async fn bodies_that_are_no_request() {
    let site = Site::start(echo()).await;
    let good = chat("Hello", json!({})).to_string();
    for path in [CHAT, COMPLETIONS] {
        refused(&site, path, "", &["not valid JSON"]).await;
        refused(&site, path, "{", &["not valid JSON", "line 1"]).await;
        refused(&site, path, "hello", &["not valid JSON"]).await;
        refused(&site, path, "[1, 2]", &["a JSON object", "a list"]).await;
        refused(&site, path, "null", &["a JSON object", "null"]).await;
        refused(&site, path, "\"model\"", &["a JSON object"]).await;
        refused(
            &site,
            path,
            b"{\"model\": \"\xff\xfe\"}",
            &["not valid JSON"],
        )
        .await;
        refused(&site, path, b"\xff\xfe\x00", &["not valid JSON"]).await;
        refused(&site, path, format!("{good}{good}"), &["trailing"]).await;
        refused(&site, path, good.replace(':', ""), &["not valid JSON"]).await;
    }
    site.close().await;
}

#[tokio::test]
async fn numbers_that_are_none() {
    let site = Site::start(echo()).await;
    for field in [
        "n",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "top_k",
        "temperature",
        "top_p",
        "min_p",
        "seed",
        "priority",
    ] {
        for bad in [
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "0x10",
            "01",
            "1e39",
            "-1e39",
            "\"1\"",
            "[1]",
            "{}",
            "true",
            "123456789012345678901234567890",
        ] {
            let body = format!(
                "{{\"model\": \"{MODEL}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \"{field}\": {bad}}}"
            );
            let response = site.send(post(CHAT, &body)).await;
            assert_eq!(response.status, 400, "{field} {bad}: {}", response.text());
            let (_, param, _, message) = response.refusal();
            let is_syntax = message.contains("not valid JSON");
            assert!(
                is_syntax || param.as_deref() == Some(field),
                "{field} {bad}: {message}"
            );
        }
    }
    site.is_well().await;
    site.close().await;
}

#[tokio::test]
async fn of_several_prompts_the_one_at_fault_is_named() {
    let site = Site::start(echo()).await;
    for (prompts, name) in [(vec!["a", "b", ""], "prompt[2]"), (vec![""], "prompt")] {
        let body = completion(prompts, json!({}));
        site.post(COMPLETIONS, &body).await.blames(name);
    }
    site.close().await;
}

#[tokio::test]
async fn prompts_longer_than_the_context() {
    let site = Site::start(echo()).await;
    let tokens = vec![100; 3000];
    let second = completion(vec![Value::from("short"), tokens.clone().into()], json!({}));
    for (body, name) in [
        (completion(tokens, json!({})), "prompt"),
        (second, "prompt[1]"),
        (completion(vec![100; 2048], json!({})), "prompt"),
    ] {
        let response = site.post(COMPLETIONS, &body).await;
        let message = response.blames(name);
        let code = response.refusal().2;
        assert_eq!(code.as_deref(), Some("context_length_exceeded"));
        let length = if message.contains("3000") {
            "3000"
        } else {
            "2048"
        };
        assert!(
            message.contains(length) && message.contains(&CONTEXT.to_string()),
            "{message}"
        );
        site.is_well().await;
    }
    let long = "word ".repeat(20_000);
    for body in [
        chat(&long, json!({})),
        chat(&long, json!({"stream": true})),
        chat(&long, json!({"n": 3})),
    ] {
        let (status, _, code, message) = site.post(CHAT, &body).await.refusal();
        assert_eq!(
            (status, code.as_deref()),
            (400, Some("context_length_exceeded"))
        );
        assert!(message.contains(&CONTEXT.to_string()), "{message}");
        site.is_well().await;
    }
    let response = site
        .post(
            COMPLETIONS,
            &completion(vec![100; 2047], json!({"max_tokens": 5000})),
        )
        .await;
    assert_eq!(
        response.status, 200,
        "a prompt that leaves room for one token fits"
    );
    assert_eq!(response.json()["usage"]["completion_tokens"], 1);
    site.idle().await;
    site.close().await;
}

#[tokio::test]
async fn deep_and_wide_json() {
    let site = Site::start(echo()).await;
    let deep = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    let with = |field: &str, value: &str| {
        format!(
            "{{\"model\": \"{MODEL}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hi\"}}], \"{field}\": {value}}}"
        )
    };
    for depth in [1, 50, 120, 127, 128, 1000, 200_000] {
        for field in ["stop", "messages", "genset", "tpyo", "logit_bias"] {
            refused(&site, CHAT, with(field, &deep(depth)), &[]).await;
        }
        // Ignored and so never read, or an argument of the template: all that parses is fine.
        for (field, is_read) in [("metadata", false), ("chat_template_kwargs", true)] {
            let value = format!("{{\"a\": {}}}", deep(depth));
            let response = site.send(post(CHAT, with(field, &value))).await;
            let is_fine = depth < 125 || !is_read;
            assert_eq!(
                response.status,
                if is_fine { 200 } else { 400 },
                "{depth} {field}"
            );
        }
    }
    let stop_ids: Vec<u32> = (1000..1256).cycle().take(10_000).collect();
    let body = chat("Hello", json!({"stop_token_ids": stop_ids}));
    assert_eq!(site.post(CHAT, &body).await.status, 200);
    let annotations = |bytes: usize| json!({"genset": {"annotations": {"a": "a".repeat(bytes)}}});
    let biases = |count: u32| {
        let biases = (0..count).map(|id| (id.to_string(), json!(1)));
        json!({"logit_bias": biases.collect::<serde_json::Map<_, _>>()})
    };
    let stop_ids: Vec<u32> = (0..257).collect();
    let too_many = [
        (json!({"stop_token_ids": stop_ids}), "stop_token_ids", "256"),
        (
            json!({"nvext": {"stop_token_ids": stop_ids}}),
            "nvext.stop_token_ids",
            "256",
        ),
        (annotations(16 << 10), "genset.annotations", "16384"),
        (biases(1025), "logit_bias", "1024"),
    ];
    for (further, field, limit) in too_many {
        let response = site.post(CHAT, &chat("Hello", further)).await;
        let message = response.blames(field);
        assert!(message.contains(limit), "{message}");
    }
    let fits = site.post(CHAT, &chat("Hello", annotations(16_000))).await;
    assert_eq!(fits.status, 200);
    let response = site.post(CHAT, &chat("Hello", biases(10_000))).await;
    response.blames("logit_bias");
    let fields: serde_json::Map<_, _> =
        (0..10_000).map(|id| (format!("f{id}"), json!(1))).collect();
    let (status, _, _, message) = site
        .post(CHAT, &chat("Hello", Value::Object(fields)))
        .await
        .refusal();
    assert_eq!(status, 400);
    assert!(message.contains("256 fields"), "{message}");
    site.is_well().await;
    site.close().await;
}

/// JSON does not define it; here the last one counts, as in Python and JavaScript.
#[tokio::test]
async fn of_duplicate_keys_the_last_counts() {
    let site = Site::start(echo()).await;
    let body = format!(
        "{{\"model\": \"gone\", \"prompt\": \"one\", \"prompt\": \"two\", \"model\": \"{MODEL}\"}}"
    );
    let response = site.send(post(COMPLETIONS, body)).await;
    assert_eq!((response.status, response.content()), (200, "two".into()));
    site.close().await;
}

#[tokio::test]
async fn limits_are_those_of_the_config() {
    let config = genset_frontend::FrontendConfig {
        max_choices: 2,
        max_stop_strings: 1,
        max_stop_bytes: 4,
        max_prompts: 2,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    for (further, word) in [
        (json!({"n": 3}), "between 1 and 2"),
        (json!({"stop": ["a", "b"]}), "at most 1"),
        (json!({"stop": "abcde"}), "at most 4 bytes"),
        (json!({"stop": "ééé"}), "at most 4 bytes"),
    ] {
        refused(&site, CHAT, chat("Hello", further).to_string(), &[word]).await;
    }
    let prompts = completion(vec!["a", "b", "c"], json!({})).to_string();
    refused(&site, COMPLETIONS, prompts, &["at most 2 prompts"]).await;
    let body = chat("Hello", json!({"n": 2, "stop": ["abcd"]}));
    assert_eq!(site.post(CHAT, &body).await.status, 200);
    site.close().await;
}

/// The content type is not checked: many clients send none.
#[tokio::test]
async fn any_content_type_will_do() {
    let site = Site::start(echo()).await;
    let body = chat("Hello", json!({})).to_string();
    for kind in ["", "content-type: text/plain\r\n", "content-type: ;;;\r\n"] {
        let bytes = request("POST", CHAT, kind, &body);
        assert_eq!(site.send(bytes).await.status, 200);
    }
    site.close().await;
}
