//! The requests to each server.

use super::*;

#[test]
fn a_plain_request_says_what_it_must() {
    let mut request = request();
    request.stop.eos_token_ids = [2].into();
    request.stop.stop_token_ids = [7].into();
    let expected = [
        json!({"model": "/m", "prompt": [1, 2], "stream": true, "stream_options": {"include_usage": true},
               "add_special_tokens": false, "ignore_eos": true, "stop_token_ids": [7, 2], "max_tokens": 5,
               "return_token_ids": true}),
        json!({"model": "/m", "prompt": [1, 2], "stream": true, "stream_options": {"include_usage": true},
               "add_special_tokens": false, "ignore_eos": true, "stop_token_ids": [7, 2], "max_tokens": 5,
               "detokenize": false}),
        json!({"input_ids": [1, 2], "stream": true, "sampling_params": {
               "max_new_tokens": 5, "ignore_eos": false, "stop_token_ids": [7, 2]}}),
        json!({"prompt": [1, 2], "stream": true, "return_tokens": true, "timings_per_token": true, "cache_prompt": true,
               "n_predict": 5}),
    ];
    for (dialect, expected) in OF_TOKENS.into_iter().zip(expected) {
        assert_eq!(body(dialect, &request), expected, "{dialect:?}");
    }
}

/// With `min_tokens` the servers ban the model's own end-of-sequence tokens, which may come if they are ignored.
#[test]
fn min_tokens_is_not_said_where_the_models_ends_are_ignored() {
    let mut request = request();
    request.stop.stop_token_ids = [7].into();
    request.stop.min_tokens = 3;
    let vllm = body(Dialect::Vllm, &request);
    assert_eq!(
        (&vllm["min_tokens"], &vllm["stop_token_ids"]),
        (&json!(3), &json!([7]))
    );
    let sglang = body(Dialect::Sglang, &request);
    assert_eq!(sglang["sampling_params"]["min_new_tokens"], 3);
    request.stop.ignore_eos = true;
    let vllm = body(Dialect::Vllm, &request);
    assert_eq!(
        (vllm.get("min_tokens"), vllm.get("stop_token_ids")),
        (None, None)
    );
    let sglang = body(Dialect::Sglang, &request);
    assert_eq!(sglang["sampling_params"].get("min_new_tokens"), None);
}

#[test]
fn a_repetition_penalty_above_what_sglang_takes_is_refused_by_name() {
    let mut request = request();
    request.sampling.repetition_penalty = Some(2.0);
    let sent = body(Dialect::Sglang, &request);
    assert_eq!(sent["sampling_params"]["repetition_penalty"], 2.0);
    request.sampling.repetition_penalty = Some(2.5);
    let error = api(Dialect::Sglang).call(&request, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.at().map(|at| at.name()), Some("repetition_penalty"));
}

/// Only with a grammar may llama-server complete a character past the limit: otherwise its tokens are drawn again.
#[test]
fn llama_server_generates_no_more_than_it_is_asked_for() {
    let mut request = request();
    assert_eq!(body(Dialect::LlamaServer, &request)["n_predict"], 5);
    request.guided = Some(GuidedDecoding::JsonObject.into());
    assert_eq!(body(Dialect::LlamaServer, &request)["n_predict"], 13);
}

/// Servers that know salts receive them; another server reuses nothing for a request with a salt.
#[test]
fn a_cache_salt_keeps_prompts_apart() {
    let mut request = request();
    request.cache_salt = Some("tenant".into());
    for (dialect, field, value) in [
        (Dialect::Vllm, "cache_salt", json!("tenant")),
        (Dialect::Sglang, "extra_key", json!("tenant")),
        (Dialect::Sglang, "cache_salt", json!("tenant")),
        (Dialect::LlamaServer, "cache_prompt", json!(false)),
    ] {
        assert_eq!(body(dialect, &request)[field], value, "{dialect:?}");
    }
}

/// The slot that computed the prompt keeps it.
#[test]
fn nobody_reads_from_llama_servers_slots_once_a_prompt_with_a_salt_is_in_one() {
    let config = LauncherConfig::new(ServerKind::LlamaCpp, "/m", ServerInput::Text);
    let of_text = of(&config, Dialect::LlamaServer).unwrap();
    for (api, plain) in [
        (api(Dialect::LlamaServer), request()),
        (of_text, GenerateRequest::from_text("m", "hi")),
    ] {
        let reads = |call: Call| {
            let body: Value = serde_json::from_slice(&call.body).unwrap();
            body.get("cache_prompt") != Some(&json!(false))
        };
        let mut salted = plain.clone();
        salted.cache_salt = Some("tenant".into());
        let asked = [&plain, &salted, &plain].map(|it| reads(api.call(it, Some(5)).unwrap()));
        assert_eq!(asked, [true, false, false]);
        if let Some(withholds) = api.withholds() {
            assert!(!reads(withholds.rating_call(&plain, 1).unwrap()));
        }
    }
}

#[test]
fn a_seeded_draw_of_llama_servers_is_from_a_prompt_that_is_computed_anew() {
    let mut request = request();
    request.sampling.seed = Some(7);
    request.sampling.temperature = Some(1.0);
    assert_eq!(body(Dialect::LlamaServer, &request)["cache_prompt"], false);
    request.sampling.temperature = Some(0.0);
    assert_eq!(body(Dialect::LlamaServer, &request)["cache_prompt"], true);
}

#[test]
fn an_adapter_is_a_model_of_vllms() {
    let mut request = request();
    let base = body(Dialect::Vllm, &request)["model"].clone();
    request.adapter = Some("french".into());
    let model = &body(Dialect::Vllm, &request)["model"];
    assert!(*model == "french" && *model != base);
}

/// TensorRT-LLM refuses the field; without block reuse there is nothing to isolate.
#[test]
fn a_cache_salt_is_refused_where_trtllm_reuses_blocks() {
    let mut request = request();
    request.cache_salt = Some("tenant".into());
    let config = |extra: &str| {
        let input = ServerInput::Tokens { vocab_size: None };
        let mut config = LauncherConfig::new(ServerKind::Trtllm, "/m", input);
        config.extra = Some(ExtraArgs::in_test(extra));
        config
    };
    let call = |extra: &str| {
        let api = of(&config(extra), Dialect::Trtllm).unwrap();
        api.call(&request, None)
    };
    for reuses in ["", "kv_cache_config: {enable_block_reuse: true}"] {
        let error = call(reuses).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.at().map(|at| at.name()), Some("cache_salt"));
        let at_start = config(reuses).validate_api_keys().unwrap_err();
        assert_eq!(at_start.at().map(|at| at.name()), Some("--api-keys"));
        assert!(
            error.message().contains("enable_block_reuse: false"),
            "{error}"
        );
    }
    let apart = "kv_cache_config: {enable_block_reuse: false}";
    config(apart).validate_api_keys().unwrap();
    let sent = call(apart).unwrap();
    let body: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(body.get("cache_salt"), None);
}

#[test]
fn every_declared_option_is_said() {
    let mut request = request();
    let sampling = &mut request.sampling;
    (sampling.temperature, sampling.top_p, sampling.top_k) = (Some(0.5), Some(0.25), Some(3));
    (
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    ) = (Some(0.125), Some(1.0), Some(-1.0));
    (sampling.repetition_penalty, sampling.seed) = (Some(2.0), Some(u64::MAX));
    sampling.logit_bias = [(7, 1.5)].into();
    request.output.logprobs = Some(0);
    for dialect in OF_TOKENS {
        let body = body(dialect, &request);
        let said = if dialect == Dialect::Sglang {
            &body["sampling_params"]
        } else {
            &body
        };
        let repetition = if dialect == Dialect::LlamaServer {
            "repeat_penalty"
        } else {
            "repetition_penalty"
        };
        for (name, value) in [
            ("temperature", 0.5),
            ("top_p", 0.25),
            ("min_p", 0.125),
            ("presence_penalty", 1.0),
            ("frequency_penalty", -1.0),
            (repetition, 2.0),
        ] {
            assert_eq!(said[name], json!(value), "{dialect:?} {name}");
        }
        assert_eq!(said["top_k"], json!(3), "{dialect:?}");
        let mut unlimited = request.clone();
        unlimited.sampling.top_k = Some(u32::MAX);
        let sent = self::body(dialect, &unlimited);
        let none = match dialect {
            Dialect::Sglang => &sent["sampling_params"]["top_k"],
            Dialect::Vllm | Dialect::Trtllm | Dialect::LlamaServer | Dialect::LlamaCppPython => {
                &sent["top_k"]
            }
        };
        let expected = if dialect == Dialect::Sglang { -1 } else { 0 };
        assert_eq!(*none, json!(expected), "{dialect:?}");
        let bias = if dialect == Dialect::LlamaServer {
            json!([[7, 1.5]])
        } else {
            json!({"7": 1.5})
        };
        assert_eq!(said["logit_bias"], bias, "{dialect:?}");
        let declares_seed = api(dialect)
            .capabilities()
            .sampling
            .contains(&SamplingOption::Seed);
        assert_eq!(said.get("seed").is_some(), declares_seed, "{dialect:?}");
    }
    assert_eq!(body(Dialect::Vllm, &request)["seed"], json!(-1));
    let unsigned = json!(u64::MAX);
    assert_eq!(body(Dialect::Trtllm, &request)["seed"], unsigned);
    assert_eq!(body(Dialect::LlamaServer, &request)["n_probs"], json!(1));
    assert_eq!(body(Dialect::Trtllm, &request)["logprobs"], json!(1));
    assert_eq!(
        body(Dialect::Sglang, &request)["top_logprobs_num"],
        json!(0)
    );
}

#[test]
fn grammars_are_said_in_each_servers_way() {
    let schema = json!({"type": "integer"});
    let cases = [
        (
            Dialect::Vllm,
            GuidedDecoding::JsonSchema(schema.clone()),
            "/structured_outputs/json",
            schema.clone(),
        ),
        (
            Dialect::Vllm,
            GuidedDecoding::JsonObject,
            "/structured_outputs/json_object",
            json!(true),
        ),
        (
            Dialect::Vllm,
            GuidedDecoding::Choice(vec!["a".into()]),
            "/structured_outputs/choice",
            json!(["a"]),
        ),
        (
            Dialect::Trtllm,
            GuidedDecoding::Regex("a+".into()),
            "/response_format/regex",
            json!("a+"),
        ),
        (
            Dialect::Trtllm,
            GuidedDecoding::Grammar("g".into()),
            "/response_format/ebnf",
            json!("g"),
        ),
        (
            Dialect::Sglang,
            GuidedDecoding::JsonSchema(schema.clone()),
            "/sampling_params/json_schema",
            json!("{\"type\":\"integer\"}"),
        ),
        (
            Dialect::Sglang,
            GuidedDecoding::Choice(vec!["a".into(), "b".into()]),
            "/sampling_params/regex",
            json!("(a|b)"),
        ),
        (
            Dialect::LlamaServer,
            GuidedDecoding::JsonSchema(schema.clone()),
            "/json_schema",
            schema,
        ),
        (
            Dialect::LlamaServer,
            GuidedDecoding::Choice(vec!["a".into()]),
            "/grammar",
            json!("root ::= \"a\""),
        ),
    ];
    for (dialect, guided, pointer, expected) in cases {
        let mut request = request();
        request.guided = Some(guided.into());
        let body = body(dialect, &request);
        assert_eq!(body.pointer(pointer), Some(&expected), "{dialect:?} {body}");
    }
}

#[test]
fn what_an_api_cannot_carry_is_refused_by_name() {
    let chat = ChatInput {
        messages: vec![json!({"role": "user", "content": "hi"})],
        tools: vec![json!({})],
    };
    type Set = fn(&mut GenerateRequest);
    let least_of_grammar: Set = |request| {
        request.stop.min_tokens = 1;
        request.guided = Some(GuidedDecoding::JsonObject.into());
    };
    let cases: [(Dialect, GenerateRequest, &str, Set); 7] = [
        (
            Dialect::LlamaServer,
            request(),
            "min_tokens",
            least_of_grammar,
        ),
        (Dialect::Vllm, request(), "min_tokens", least_of_grammar),
        (Dialect::LlamaCppPython, request(), "prompt", |_| {}),
        (
            Dialect::Vllm,
            GenerateRequest::from_text("m", "hi"),
            "prompt",
            |_| {},
        ),
        (
            Dialect::LlamaCppPython,
            GenerateRequest::from_text("m", "hi"),
            "ignore_eos",
            |r| r.stop.ignore_eos = true,
        ),
        (
            Dialect::LlamaCppPython,
            GenerateRequest::from_text("m", "hi"),
            "stop_token_ids",
            |r| {
                r.stop.stop_token_ids = [1].into();
            },
        ),
        (
            Dialect::LlamaCppPython,
            GenerateRequest::from_chat("m", chat),
            "tools",
            |_| {},
        ),
    ];
    for (dialect, mut request, field, set) in cases {
        set(&mut request);
        let error = api(dialect).call(&request, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.at().map(|at| at.name()), Some(field));
    }
    let tokens = LauncherConfig::new(
        ServerKind::LlamaCpp,
        "/m",
        ServerInput::Tokens { vocab_size: None },
    );
    assert_eq!(
        of(&tokens, Dialect::LlamaCppPython).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}

#[test]
fn a_rank_is_named_as_each_server_takes_it() {
    let mut request = request();
    request.data_parallel_rank = Some(1);
    let called = |dialect, request: &GenerateRequest| {
        let call = api(dialect).call(request, None).unwrap();
        let body: Value = serde_json::from_slice(&call.body).unwrap();
        (call.headers, body)
    };
    let (headers, _) = called(Dialect::Vllm, &self::request());
    assert!(headers.is_empty(), "the server places it");
    let (headers, _) = called(Dialect::Vllm, &request);
    assert_eq!(headers, [("x-data-parallel-rank", "1".to_owned())]);
    let (headers, body) = called(Dialect::Sglang, &request);
    let fields = ["data_parallel_rank", "routed_dp_rank"].map(|field| &body[field]);
    assert_eq!((headers.len(), fields), (0, [&json!(1), &json!(1)]));
    let (headers, body) = called(Dialect::Trtllm, &request);
    assert!(headers.is_empty() && body.get("data_parallel_rank").is_none());
}

/// vLLM shows its model the tools for every choice, and refuses `auto` without a parser; SGLang shows none for `none`.
#[test]
fn the_model_sees_the_tools_of_a_chat_and_its_calls_stay_text() {
    let url = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let messages = json!([{"role": "user", "content": [image]}]);
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    let chat = |tools: &Value| {
        let list = |value: &Value| value.as_array().cloned().unwrap();
        let chat = ChatInput {
            messages: list(&messages),
            tools: list(tools),
        };
        GenerateRequest::from_chat("m", chat)
    };
    for (dialect, choice) in [(Dialect::Vllm, "none"), (Dialect::Sglang, "auto")] {
        let asked = body(dialect, &chat(&tools));
        assert_eq!(asked["messages"], messages, "{dialect:?}");
        assert_eq!(asked["tools"], tools, "{dialect:?}");
        assert_eq!(asked["tool_choice"], choice, "{dialect:?}");
        let without = body(dialect, &chat(&json!([])));
        let said = ["tools", "tool_choice"].map(|name| without.get(name));
        assert_eq!(said, [None, None], "{dialect:?}");
    }
}

#[test]
fn every_canary_can_be_carried() {
    let canary = api(Dialect::LlamaCppPython).canary("m").unwrap();
    api(Dialect::LlamaCppPython).call(&canary, None).unwrap();
    for dialect in OF_TOKENS {
        assert_eq!(
            api(dialect).canary("m"),
            None,
            "{dialect:?} takes the usual one"
        );
    }
}

#[test]
fn chats_and_texts_go_to_their_paths() {
    let messages = vec![json!({"role": "user", "content": "hi"})];
    let chat = GenerateRequest::from_chat(
        "m",
        ChatInput {
            messages: messages.clone(),
            tools: vec![],
        },
    );
    let call = api(Dialect::LlamaCppPython).call(&chat, None).unwrap();
    let body: Value = serde_json::from_slice(&call.body).unwrap();
    assert_eq!(call.path, "/v1/chat/completions");
    assert_eq!(
        body,
        json!({"messages": messages, "stream": true, "max_tokens": null})
    );
    let text = GenerateRequest::from_text("m", "hi");
    assert_eq!(
        api(Dialect::LlamaCppPython).call(&text, None).unwrap().path,
        "/v1/completions"
    );
}

/// The server builds their prompt.
#[test]
fn servers_of_text_take_nothing_on() {
    let can = api(Dialect::LlamaCppPython).capabilities();
    assert!(!can.resume_as_prompt && !can.resume);
}
