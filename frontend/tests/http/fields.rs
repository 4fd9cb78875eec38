//! What the engine receives for a request's fields.

use std::sync::Arc;

use genset_backend_common::{GenerateRequest, LLMEngine};
use genset_frontend::FrontendConfig;
use serde_json::{Value, json};

use crate::apis::embedder;
use crate::client::request;
use crate::scores::scorer;
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, TOKENIZER_FILE, chat, completion, config, echo, echo_text,
    encode, file, json_file, pairs_worker_config, with_file, with_template, worker_config,
};

/// Returns the requests that the engine gets for a chat with `further` fields.
async fn seen(further: Value) -> Vec<GenerateRequest> {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    let response = site.post(CHAT, &chat("Hello", further)).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let requests = engine.requests();
    site.close().await;
    requests
}

async fn seen_one(further: Value) -> GenerateRequest {
    seen(further).await.remove(0)
}

#[tokio::test]
async fn extensions_may_stand_in_three_places() {
    let inner = json!({
        "ignore_eos": true, "min_tokens": 2, "stop_token_ids": [7, 8], "top_k": 5, "min_p": 0.25,
        "repetition_penalty": 1.5, "priority": -3,
    });
    let plain = seen_one(inner.clone()).await;
    assert!(plain.stop.ignore_eos);
    assert_eq!((plain.stop.min_tokens, plain.priority), (2, -3));
    assert_eq!(*plain.stop.stop_token_ids, [7, 8]);
    assert_eq!(
        (plain.sampling.top_k, plain.sampling.min_p),
        (Some(5), Some(0.25))
    );
    assert_eq!(plain.sampling.repetition_penalty, Some(1.5));
    assert_eq!(*plain.stop.eos_token_ids, [2, 0]);
    for extension in ["genset", "nvext"] {
        let mut inner = inner.clone();
        inner["annotations"] = json!({"a": [1]});
        let mut request = seen_one(json!({extension: inner})).await;
        assert_eq!(request.annotations.remove("a"), Some(json!([1])));
        assert_eq!(request, plain);
    }
}

/// As in `transformers`.
#[tokio::test]
async fn a_negative_id_ends_no_sequence() {
    for (ids, expected) in [(json!([-1, 0]), 0), (json!(-1), 2)] {
        let generation = json!({"eos_token_id": ids}).to_string();
        let worker = with_file(worker_config(), "generation_config.json", generation);
        let engine = Script::tokens(encode("Hi"));
        let site = Site::with_worker(config(), worker, engine.clone()).await;
        let response = site.post(CHAT, &chat("Hello", json!({}))).await;
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(*engine.requests()[0].stop.eos_token_ids, [expected]);
        site.close().await;
    }
}

#[tokio::test]
async fn max_completion_tokens_goes_before_max_tokens() {
    let limit = |further| async { seen_one(further).await.stop.max_tokens };
    let room = limit(json!({})).await;
    assert!(
        room > Some(2000),
        "what is left of the context, not {room:?}"
    );
    assert_eq!(limit(json!({"max_tokens": 3})).await, Some(3));
    assert_eq!(limit(json!({"max_completion_tokens": 4})).await, Some(4));
    let both = json!({"max_tokens": 3, "max_completion_tokens": 4});
    assert_eq!(limit(both).await, Some(4));
}

#[tokio::test]
async fn sampling_reaches_the_engine_and_every_choice_has_its_seed() {
    let further = json!({
        "n": 3, "seed": -1, "temperature": 0.5, "top_p": 0.5, "presence_penalty": -1, "frequency_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
    });
    let requests = seen(further).await;
    let seeds: Vec<_> = requests
        .iter()
        .map(|request| request.sampling.seed)
        .collect();
    assert_eq!(seeds, [Some(u64::MAX), Some(0), Some(1)]);
    for request in requests {
        let sampling = &request.sampling;
        assert_eq!(
            (sampling.temperature, sampling.top_p),
            (Some(0.5), Some(0.5))
        );
        assert_eq!(
            (sampling.presence_penalty, sampling.frequency_penalty),
            (Some(-1.0), Some(2.0))
        );
        assert_eq!(*sampling.logit_bias, [(5, -100.0), (6, 1.5)].into());
    }
}

#[tokio::test]
async fn values_that_ask_for_nothing_are_taken() {
    let further = json!({
        "user": "u", "metadata": {"a": "b"}, "store": true, "safety_identifier": "s", "prompt_cache_key": "k",
        "parallel_tool_calls": true, "logprobs": false, "top_logprobs": 0, "tools": [], "tool_choice": "auto",
        "functions": [], "function_call": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "verbosity": "medium", "service_tier": "auto", "audio": null, "stop": null, "n": null, "stream": null,
        "stop_token_ids": [], "logit_bias": {}, "chat_template_kwargs": {"enable_thinking": false},
        "reasoning_effort": null, "genset": {}, "nvext": null, "tpyo": null, "prompt_cache_options": {},
        "prediction": {"type": "content", "content": "Hi"}, "guided_json": null,
    });
    seen_one(further).await;
    let site = Site::start(Script::tokens(encode("Hi"))).await;
    let further =
        json!({"echo": false, "suffix": "", "best_of": 2, "n": 2, "user": "u", "logprobs": null});
    let response = site.post(COMPLETIONS, &completion("Hello", further)).await;
    assert_eq!(response.status, 200, "{}", response.text());
    site.close().await;
}

/// Effort is a variable of the chat template, if the template uses it.
#[tokio::test]
async fn effort_reaches_a_template_that_reads_it() {
    let template = "{{ messages[0].content }}{% if reasoning_effort is defined %}, {{ reasoning_effort }}{% endif %}";
    let worker = with_template(worker_config(), template);
    let engine = Script::tokens(encode("Hi"));
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    for (further, expected) in [
        (json!({}), "Hello"),
        (json!({"reasoning_effort": "low"}), "Hello, low"),
        (
            json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
            "Hello, high",
        ),
    ] {
        let response = site.post(CHAT, &chat("Hello", further)).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = engine.requests().pop().expect("a request");
        assert_eq!(request.tokens().expect("tokens"), encode(expected));
    }
    site.close().await;
    for engine in [echo(), echo_text()] {
        let site = Site::start(engine).await;
        let asked = chat("Hello", json!({"reasoning_effort": "low"}));
        let response = site.post(CHAT, &asked).await;
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(
            response.header("x-genset-ignored"),
            Some("reasoning_effort")
        );
        site.close().await;
    }
}

/// Each API with all of its hints, and the header's value for them.
fn hints() -> [(&'static str, Value, &'static str); 4] {
    [
        (
            CHAT,
            chat(
                "Hi",
                json!({
                    "user": "u", "service_tier": "flex", "verbosity": "low", "reasoning_effort": "low",
                    "prediction": {"type": "content", "content": "Hi"}, "safety_identifier": null,
                }),
            ),
            "service_tier, verbosity, user, prediction, reasoning_effort",
        ),
        (
            COMPLETIONS,
            completion("Hi", json!({"service_tier": "flex", "user": "u"})),
            "service_tier, user",
        ),
        (
            "/v1/responses",
            json!({
                "model": MODEL, "input": "Hi", "service_tier": "flex", "text": {"verbosity": "low"},
                "safety_identifier": "s", "reasoning": {"effort": "low", "summary": "auto"},
                "include": vec!["reasoning.encrypted_content"; 1000], "client_metadata": {"x-codex-installation-id": "i"},
                "access_programs": {"cyber": "standard"}, "tools": vec![json!({"type": "web_search"}); 1000],
            }),
            "include[0], text.verbosity, reasoning.summary, tools[0], safety_identifier, client_metadata, access_programs, \
             service_tier, reasoning.effort",
        ),
        (
            "/v1/messages",
            chat(
                "Hi",
                json!({
                    "max_tokens": 4, "service_tier": "priority", "speed": "fast", "metadata": {"user_id": "u"},
                    "output_config": {"effort": "low"},
                    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                    "diagnostics": {"previous_message_id": null, "level": 1},
                }),
            ),
            "metadata, diagnostics, service_tier, speed, context_management.edits, output_config.effort",
        ),
    ]
}

#[tokio::test]
async fn hints_without_an_effect_are_named_in_the_answer() {
    let site = Site::start(Script::tokens(encode("Hi"))).await;
    for (path, mut body, ignored) in hints() {
        for stream in [false, true] {
            body["stream"] = stream.into();
            let response = site.post(path, &body).await;
            assert_eq!(response.status, 200, "{path}: {}", response.text());
            assert_eq!(response.header("x-genset-ignored"), Some(ignored), "{path}");
        }
    }
    let plain = site
        .post(CHAT, &chat("Hi", json!({"verbosity": "medium"})))
        .await;
    assert_eq!(plain.header("x-genset-ignored"), None);
    site.close().await;
}

#[tokio::test]
async fn hints_are_named_where_nothing_is_generated() {
    let counted = json!({
        "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "cache_control": {"type": "ephemeral"},
        "output_config": {"effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    });
    let ranked = json!({"model": MODEL, "query": "one", "documents": ["two"], "user": "u"});
    let scored = json!({"model": MODEL, "text_1": "one", "text_2": "two", "user": "u"});
    let embedded = json!({"model": MODEL, "input": "one", "user": "u"});
    let cases: [(Arc<dyn LLMEngine>, &str, Value, &str); 4] = [
        (
            Script::tokens(encode("Hi")),
            "/v1/messages/count_tokens",
            counted,
            "context_management.edits, cache_control, output_config.effort",
        ),
        (scorer(), "/v1/rerank", ranked, "user"),
        (scorer(), "/v1/score", scored, "user"),
        (embedder(), "/v1/embeddings", embedded, "user"),
    ];
    for (engine, path, body, ignored) in cases {
        let site = Site::with_worker(config(), pairs_worker_config(), engine).await;
        let response = site.post(path, &body).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
        assert_eq!(response.header("x-genset-ignored"), Some(ignored), "{path}");
        site.close().await;
    }
}

#[tokio::test]
async fn a_strict_server_refuses_hints_that_ask_for_something() {
    let strict = FrontendConfig {
        strict_parameters: true,
        ..config()
    };
    let site = Site::with(strict, Script::tokens(encode("Hi"))).await;
    for (path, body, _) in hints() {
        assert_eq!(site.post(path, &body).await.status, 400, "{path}");
    }
    for (hint, param) in [
        (json!({"service_tier": "flex"}), "service_tier"),
        (json!({"verbosity": "low"}), "verbosity"),
        (json!({"reasoning_effort": "low"}), "reasoning_effort"),
    ] {
        site.post(CHAT, &chat("Hi", hint))
            .await
            .does_not_support(param);
    }
    let asked = json!({"model": MODEL, "input": "Hi", "reasoning": {"effort": "low"}});
    let refused = site.post("/v1/responses", &asked).await;
    refused.blames("reasoning.effort");
    let asked = json!({"model": MODEL, "input": "Hi", "tools": [{"type": "web_search"}]});
    let refused = site.post("/v1/responses", &asked).await;
    refused.does_not_support("tools[0]");
    // Values that were always accepted still are.
    let harmless = chat(
        "Hi",
        json!({"user": "u", "service_tier": "auto", "verbosity": "medium"}),
    );
    let response = site.post(CHAT, &harmless).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("x-genset-ignored"), Some("user"));
    site.close().await;
}

/// A prompt of any kind precedes its answers, whole and streamed, and costs nothing.
#[tokio::test]
async fn an_echo_is_the_prompt_and_the_answer() {
    for (engine, kinds) in [
        (echo(), vec![json!("one two"), json!(encode("one two"))]),
        (echo_text(), vec![json!("one two")]),
    ] {
        let site = Site::start(engine).await;
        for prompt in kinds {
            for stream in [false, true] {
                // The answer repeats the prompt. It is searched for stop strings; the echo is not.
                let further = json!({"echo": true, "stop": "two", "stream": stream});
                let body = completion(prompt.clone(), further);
                let response = site.post(COMPLETIONS, &body).await;
                let text = if stream {
                    response.streamed(0).0
                } else {
                    response.content()
                };
                assert_eq!(text, "one twoone ");
            }
        }
        site.close().await;
    }
    let site = Site::start(Script::tokens(encode("Yes"))).await;
    let prompts = json!({"echo": true, "n": 2});
    let body = completion(vec!["a", "b"], prompts);
    let json = site.post(COMPLETIONS, &body).await.json();
    let texts = json["choices"].as_array().into_iter().flatten();
    let texts: Vec<&Value> = texts.map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["aYes", "aYes", "bYes", "bYes"]);
    assert_eq!(json["usage"]["completion_tokens"], 4 * encode("Yes").len());
    site.close().await;
}

#[tokio::test]
async fn a_developer_is_a_system_and_parts_are_joined() {
    let messages = json!([
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null},
        {"role": "user", "content": ""},
    ]);
    let request = seen_one(json!({"messages": messages})).await;
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
        <|im_start|>assistant\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(request.tokens().expect("tokens"), encode(expected));
}

#[tokio::test]
async fn the_request_id_is_the_clients_where_it_is_usable() {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    let body = chat("Hello", json!({})).to_string();
    let send = async |id: &str, body: &str| {
        let line = format!("x-request-id: {id}\r\n");
        let response = site.send(request("POST", CHAT, &line, body)).await;
        let given = response.header("x-request-id").map(str::to_owned);
        given.expect("every answer has an id")
    };
    assert_eq!(send("abc-1", &body).await, "abc-1");
    assert_eq!(send("abc-1", &body).await, "abc-1");
    let ids = engine.ids();
    assert!(ids.iter().all(|id| id.starts_with("abc-1.")), "{ids:?}");
    assert_ne!(
        ids.first(),
        ids.get(1),
        "ids are unique, also where the client's are not"
    );
    assert_eq!(send("abc-2", "{").await, "abc-2", "a refusal has it too");
    let streamed = chat("Hello", json!({"stream": true, "n": 2})).to_string();
    assert_eq!(send("abc-3", &streamed).await, "abc-3");
    let ids = engine.ids();
    assert!(
        ids.iter().skip(2).all(|id| id.starts_with("abc-3.")),
        "{ids:?}"
    );
    assert_ne!(ids.get(2), ids.get(3));
    for unusable in ["", "é", &"a".repeat(129)] {
        let id = send(unusable, &body).await;
        assert!(id.starts_with("req-"), "{id}");
    }
    site.close().await;
}

/// Before a worker is called, and with the client's own name for a field.
#[tokio::test]
async fn token_ids_out_of_the_vocabulary_are_refused_by_name_and_id() {
    let engine = Script::tokens(encode("Hi"));
    let site = Site::start(engine.clone()).await;
    let limited = |further: Value| json!({"max_tokens": 1, "genset": further});
    for (path, body, field, token) in [
        (
            CHAT,
            chat("Hello", json!({"logit_bias": {"5": 1, "2048": -1}})),
            "logit_bias",
            2048,
        ),
        (
            COMPLETIONS,
            completion("Hello", json!({"logit_bias": {"4294967295": 1}})),
            "logit_bias",
            u32::MAX,
        ),
        (
            CHAT,
            chat(
                "Hello",
                json!({"stop_token_ids": [7, 2048], "stream": true}),
            ),
            "stop_token_ids",
            2048,
        ),
        (
            COMPLETIONS,
            completion(vec![1], limited(json!({"stop_token_ids": [3000]}))),
            "stop_token_ids",
            3000,
        ),
        (
            COMPLETIONS,
            completion(vec![vec![1], vec![2, 2048]], json!({})),
            "prompt[1]",
            2048,
        ),
    ] {
        let (status, param, code, message) = site.post(path, &body).await.refusal();
        assert_eq!(
            (status, param.as_deref(), code),
            (400, Some(field), None),
            "{body}"
        );
        assert!(message.contains(&format!("id {token} ")), "{message}");
    }
    assert!(engine.requests().is_empty(), "no engine was asked");
    let last = json!({"logit_bias": {"2047": 1}, "stop_token_ids": [2047]});
    assert_eq!(site.post(CHAT, &chat("Hello", last)).await.status, 200);
    site.close().await;
}

/// A decoder that strips a text's first space, as in SentencePiece models, strips a chat's, but not that after a prompt.
#[tokio::test]
async fn a_completion_keeps_the_space_behind_its_prompt() {
    let mut tokenizer = json_file(TOKENIZER_FILE);
    tokenizer["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "Ġ"}, "content": " "},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    let worker = with_file(worker_config(), TOKENIZER_FILE, tokenizer.to_string());
    let site = Site::with_worker(config(), worker, Script::tokens(encode(" Paris"))).await;
    for (further, content) in [
        (json!({}), " Paris"),
        (json!({"echo": true}), "It is Paris"),
    ] {
        let body = completion("It is", further);
        let [plain, streamed] = site.whole_and_streamed(COMPLETIONS, body).await;
        assert_eq!(plain.content(), content);
        assert_eq!(streamed.streamed(0).0, content);
    }
    let body = completion(encode("It is"), json!({}));
    assert_eq!(site.post(COMPLETIONS, &body).await.content(), " Paris");
    let response = site.post(CHAT, &chat("Where?", json!({}))).await;
    assert_eq!(response.content(), "Paris");
    site.close().await;
}

/// A tokenizer with infill tokens makes the prompt of a suffix; any other refuses it by name.
#[tokio::test]
async fn a_suffix_stands_behind_the_answer_where_the_model_has_tokens_for_it() {
    let tokenizer = String::from_utf8(file(TOKENIZER_FILE).to_vec()).expect("text");
    let tokenizer = tokenizer
        .replace("<|im_start|>", "<fim_prefix>")
        .replace("<|im_end|>", "<fim_suffix>")
        .replace("<|endoftext|>", "<fim_middle>");
    let worker = with_file(worker_config(), TOKENIZER_FILE, tokenizer);
    let engine = Script::tokens(encode("b"));
    let site = Site::with_worker(config(), worker, engine.clone()).await;
    let body = completion(vec!["a", "c"], json!({"suffix": "d", "echo": true}));
    let response = site.post(COMPLETIONS, &body).await;
    assert_eq!(response.content(), "ab");
    let [prefix, suffix, middle] = [1, 2, 0];
    for (request, prompt) in engine.requests().iter().zip(["a", "c"]) {
        let expected = [
            vec![prefix],
            encode(prompt),
            vec![suffix],
            encode("d"),
            vec![middle],
        ];
        assert_eq!(request.tokens().expect("tokens"), expected.concat());
    }
    let tokens = completion(encode("a"), json!({"suffix": "d"}));
    site.post(COMPLETIONS, &tokens).await.blames("prompt");
    site.close().await;
    for engine in [echo(), echo_text()] {
        let site = Site::start(engine).await;
        let body = completion("a", json!({"suffix": "d"}));
        let response = site.post(COMPLETIONS, &body).await;
        response.does_not_support("suffix");
        let body = completion("a", json!({"echo": true, "logprobs": 1}));
        let response = site.post(COMPLETIONS, &body).await;
        let message = response.does_not_support("echo");
        assert!(
            message.contains("log probabilities of the prompt"),
            "{message}"
        );
        site.close().await;
    }
}
