use genset_backend_common::{GuidedDecoding, config::SamplingOption, request::ChatInput};
use serde_json::{Value, json};

use super::*;
use crate::config::ServerInput;
use crate::extra::ExtraArgs;
use crate::kind::ServerKind;

fn api(dialect: Dialect) -> Arc<dyn Api> {
    let input = if dialect == Dialect::LlamaCppPython {
        ServerInput::Text
    } else {
        ServerInput::Tokens { vocab_size: None }
    };
    of(&LauncherConfig::new(dialect.kind(), "/m", input), dialect).unwrap()
}

fn request() -> GenerateRequest {
    GenerateRequest::from_tokens("m", vec![1, 2])
}

fn body(dialect: Dialect, request: &GenerateRequest) -> Value {
    let call = api(dialect).call(request, Some(5)).unwrap();
    serde_json::from_slice(&call.body).unwrap()
}

const OF_TOKENS: [Dialect; 4] = [
    Dialect::Vllm,
    Dialect::Trtllm,
    Dialect::Sglang,
    Dialect::LlamaServer,
];

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

/// With `min_tokens` they keep the model's own ends away, which may come where they are ignored.
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

/// Only beside a grammar may llama-server end a character behind the limit: elsewhere its tokens are drawn again.
#[test]
fn llama_server_generates_no_more_than_it_is_asked_for() {
    let mut request = request();
    assert_eq!(body(Dialect::LlamaServer, &request)["n_predict"], 5);
    request.guided = Some(GuidedDecoding::JsonObject.into());
    assert_eq!(body(Dialect::LlamaServer, &request)["n_predict"], 13);
}

/// Servers that know salts are told them; another reuses nothing for a request that has one.
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

/// TensorRT-LLM's server refuses the field; without reuse of blocks there is nothing to keep apart.
#[test]
fn a_cache_salt_is_refused_where_trtllm_reuses_blocks() {
    let mut request = request();
    request.cache_salt = Some("tenant".into());
    let config = |extra: &str| {
        let input = ServerInput::Tokens { vocab_size: None };
        let mut config = LauncherConfig::new(ServerKind::Trtllm, "/m", input);
        let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
        std::fs::write(&file, extra).unwrap();
        config.extra = Some(ExtraArgs::load(file.path()).unwrap());
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
fn some_abilities_are_there_only_with_the_servers_own_settings() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("extra.yaml");
    let settings =
        "scheduling_policy: priority\nguided_decoding_backend: xgrammar\nmax-logprobs: 5\n";
    std::fs::write(&path, settings).unwrap();
    for (kind, dialect) in [
        (ServerKind::Vllm, Dialect::Vllm),
        (ServerKind::Trtllm, Dialect::Trtllm),
    ] {
        let mut config = LauncherConfig::new(kind, "/m", ServerInput::Tokens { vocab_size: None });
        let before = of(&config, dialect).unwrap().capabilities();
        config.extra = Some(ExtraArgs::load(&path).unwrap());
        let after = of(&config, dialect).unwrap().capabilities();
        if kind == ServerKind::Vllm {
            assert_eq!((before.priority, before.max_logprobs), (false, Some(20)));
            assert_eq!((after.priority, after.max_logprobs), (true, Some(5)));
        } else {
            assert!(before.guided.is_empty() && after.guided.len() == 5);
        }
    }
}

#[test]
fn what_an_api_cannot_carry_is_refused_by_name() {
    let chat = ChatInput {
        messages: vec![json!({"role": "user", "content": "hi"})],
        tools: vec![json!({})],
    };
    type Set = fn(&mut GenerateRequest);
    let cases: [(Dialect, GenerateRequest, &str, Set); 6] = [
        (Dialect::LlamaServer, request(), "min_tokens", |r| {
            r.stop.min_tokens = 1;
            r.guided = Some(GuidedDecoding::JsonObject.into());
        }),
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

fn read(dialect: Dialect, request: &GenerateRequest, events: &[Value]) -> Vec<Step> {
    let mut reader = api(dialect).reader(request);
    events
        .iter()
        .map(|event| reader.read(event.to_string().as_bytes()).unwrap())
        .collect()
}

fn ids(step: &Step) -> Vec<TokenId> {
    step.tokens.token_ids.to_vec()
}

#[test]
fn sglang_tokens_are_the_new_ones_whether_all_are_repeated_or_not() {
    let event = |ids: &[u32], total: usize| json!({"output_ids": ids, "meta_info": {"completion_tokens": total}});
    for events in [
        [
            event(&[4, 5], 2),
            event(&[4, 5, 6], 3),
            event(&[4, 5, 6, 7, 8], 5),
        ],
        [event(&[4, 5], 2), event(&[6], 3), event(&[7, 8], 5)],
    ] {
        let read = read(Dialect::Sglang, &request(), &events);
        let tokens: Vec<_> = read.iter().map(ids).collect();
        assert_eq!(tokens, [vec![4, 5], vec![6], vec![7, 8]]);
    }
    let mut reader = api(Dialect::Sglang).reader(&request());
    reader
        .read(event(&[4, 5], 2).to_string().as_bytes())
        .unwrap();
    let error = reader
        .read(event(&[1], 9).to_string().as_bytes())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Disconnected);
}

#[test]
fn a_stop_at_the_models_own_end_is_not_part_of_the_answer() {
    let matched = json!({"output_ids": [4, 2], "meta_info": {
        "completion_tokens": 2, "finish_reason": {"type": "stop", "matched": 2}}});
    let step = &read(Dialect::Sglang, &request(), &[matched])[0];
    assert_eq!(
        (ids(step), step.end.clone()),
        (vec![4], Some(End::Stop(Some(2))))
    );

    let unnamed =
        json!({"choices": [{"token_ids": [4, 2], "finish_reason": "stop", "stop_reason": null}]});
    let step = &read(Dialect::Vllm, &request(), std::slice::from_ref(&unnamed))[0];
    assert_eq!(
        (ids(step), step.end.clone()),
        (vec![4], Some(End::Stop(Some(2))))
    );
    // With a list of our own the server goes on past its model's, so the last token is an answer's.
    let mut listed = request();
    listed.stop.eos_token_ids = [9].into();
    let step = &read(Dialect::Vllm, &listed, &[unnamed])[0];
    assert_eq!(
        (ids(step), step.end.clone()),
        (vec![4, 2], Some(End::Stop(None)))
    );
}

#[test]
fn candidates_are_sorted_and_as_many_as_asked_for() {
    let mut request = request();
    request.output.logprobs = Some(2);
    let vllm = json!({"choices": [{"token_ids": [7], "finish_reason": null, "logprobs": {
        "token_logprobs": [-3.0], "tokens": ["token_id:7"],
        "top_logprobs": [{"token_id:9": -1.5, "token_id:8": -0.5, "token_id:7": -3.0}]}}]});
    let sglang = json!({"output_ids": [7], "meta_info": {"completion_tokens": 1,
        "output_token_logprobs": [[-3.0, 7, null]], "output_top_logprobs": [[[-0.5, 8, null], [-1.5, 9, null]]]}});
    let llama = json!({"tokens": [7], "stop": false, "completion_probabilities": [
        {"id": 7, "logprob": -3.0, "top_logprobs": [{"id": 8, "logprob": -0.5}, {"id": 9, "logprob": -1.5}]}]});
    for (dialect, event) in [
        (Dialect::Vllm, vllm),
        (Dialect::Sglang, sglang),
        (Dialect::LlamaServer, llama),
    ] {
        let step = &read(dialect, &request, &[event])[0];
        let at = &step.tokens.logprobs[0];
        let top: Vec<_> = at.top.iter().map(|c| (c.token_id, c.logprob)).collect();
        assert_eq!(
            (at.logprob, top),
            (-3.0, vec![(8, -0.5), (9, -1.5)]),
            "{dialect:?}"
        );
    }
}

#[test]
fn log_probabilities_that_are_missing_are_an_error() {
    let mut request = request();
    request.output.logprobs = Some(0);
    let events = [
        (Dialect::Trtllm, json!({"choices": [{"token_ids": [7]}]})),
        (
            Dialect::Sglang,
            json!({"output_ids": [7], "meta_info": {"completion_tokens": 1}}),
        ),
        (Dialect::LlamaServer, json!({"tokens": [7], "stop": false})),
    ];
    for (dialect, event) in events {
        let read = api(dialect)
            .reader(&request)
            .read(event.to_string().as_bytes());
        assert_eq!(
            read.unwrap_err().kind(),
            ErrorKind::Disconnected,
            "{dialect:?}"
        );
    }
}

#[test]
fn llama_servers_count_of_tokens_shows_those_that_it_withheld() {
    let event = |content: &str, tokens: &[u32], predicted: u64| json!({"content": content, "tokens": tokens, "stop": false, "tokens_predicted": predicted});
    let read = read(
        Dialect::LlamaServer,
        &request(),
        &[event("a", &[7], 1), event("ん", &[244], 4)],
    );
    assert_eq!((ids(&read[0]), &read[0].withheld), (vec![7], &None));
    let withheld = Withheld {
        text: "ん".into(),
        count: 3,
        given: vec![244],
    };
    assert_eq!(
        (ids(&read[1]), &read[1].withheld),
        (vec![], &Some(withheld))
    );

    let mut reader = api(Dialect::LlamaServer).reader(&request());
    let end = json!({"content": "", "tokens": [], "stop": true, "stop_type": "limit", "tokens_predicted": 2});
    let step = reader.read(end.to_string().as_bytes()).unwrap();
    assert_eq!(
        (step.withheld.unwrap().count, step.end),
        (2, Some(End::Length))
    );
}

#[test]
fn the_size_of_vllms_kv_blocks_is_among_its_metrics() {
    let metrics = "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"128\",engine=\"0\",num_gpu_blocks=\"2048\"} 1.0\n";
    let read = completions::CacheConfig::read(metrics);
    assert_eq!(
        (read.block_size, read.num_gpu_blocks),
        (std::num::NonZeroU32::new(128), Some(2048))
    );
    assert_eq!(read.ranks, Some(1));
    let line = |engine: u32| {
        format!("vllm:cache_config_info{{block_size=\"128\",engine=\"{engine}\"}} 1.0\n")
    };
    let ranks = |engines: &[u32]| {
        let lines: String = engines.iter().copied().map(line).collect();
        completions::CacheConfig::read(&lines).ranks
    };
    assert_eq!(ranks(&[1, 0, 2]), Some(3));
    // Ranks of a part of a server.
    assert_eq!(ranks(&[2, 3]), None);
    for none in [
        "",
        "vllm:cache_config_info{block_size=\"",
        "vllm:cache_config_info{block_size=\"0\"}",
    ] {
        assert_eq!(completions::CacheConfig::read(none), Default::default());
    }
}

#[test]
fn a_rank_is_named_as_each_server_takes_it() {
    let mut request = request();
    request.data_parallel_rank = Some(1);
    let input = ServerInput::Tokens { vocab_size: None };
    let called = |kind, dialect| {
        let api = of(&LauncherConfig::new(kind, "/m", input), dialect).unwrap();
        let call = api.call(&request, None).unwrap();
        let body: Value = serde_json::from_slice(&call.body).unwrap();
        (call.headers, body)
    };
    let (headers, _) = called(ServerKind::Vllm, Dialect::Vllm);
    assert_eq!(headers, [("x-data-parallel-rank", "1".to_owned())]);
    let (headers, body) = called(ServerKind::Sglang, Dialect::Sglang);
    let fields = ["data_parallel_rank", "routed_dp_rank"].map(|field| &body[field]);
    assert_eq!((headers.len(), fields), (0, [&json!(1), &json!(1)]));
    let (headers, body) = called(ServerKind::Trtllm, Dialect::Trtllm);
    assert!(headers.is_empty() && body.get("data_parallel_rank").is_none());
}

#[test]
fn sglang_honours_seeds_where_it_infers_deterministically() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("extra.yaml");
    std::fs::write(&path, "enable_deterministic_inference: true\n").unwrap();
    let mut config = LauncherConfig::new(
        ServerKind::Sglang,
        "/m",
        ServerInput::Tokens { vocab_size: None },
    );
    config.extra = Some(ExtraArgs::load(&path).unwrap());
    let api = of(&config, Dialect::Sglang).unwrap();
    assert!(api.capabilities().sampling.contains(&SamplingOption::Seed));
    let mut request = request();
    request.sampling.seed = Some(u64::MAX);
    let body: Value = serde_json::from_slice(&api.call(&request, None).unwrap().body).unwrap();
    assert_eq!(body["sampling_params"]["sampling_seed"], json!(-1));
}

#[test]
fn a_server_that_gives_no_token_ids_is_told_so() {
    let old = [
        (
            Dialect::Vllm,
            json!({"choices": [{"text": "hi"}]}),
            "token_ids",
        ),
        (
            Dialect::Sglang,
            json!({"text": "hi", "meta_info": {}}),
            "skip-tokenizer-init",
        ),
    ];
    for (dialect, event, expected) in old {
        let error = api(dialect)
            .reader(&request())
            .read(event.to_string().as_bytes())
            .unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}

#[test]
fn what_servers_complain_of_has_a_kind() {
    let cases = [
        (
            Some(400),
            json!({"error": {"message": "x", "type": "BadRequestError", "code": 400}}),
            ErrorKind::InvalidArgument,
        ),
        (
            Some(400),
            json!({"object": "error", "message": "x", "code": 400}),
            ErrorKind::InvalidArgument,
        ),
        (
            Some(422),
            json!({"detail": [{"msg": "x"}]}),
            ErrorKind::InvalidArgument,
        ),
        (
            Some(400),
            json!({"error": {"message": "x", "type": "exceed_context_size_error", "code": 400}}),
            ErrorKind::ContextLengthExceeded,
        ),
        (
            Some(400),
            json!({"error": {"message": "x", "code": "context_length_exceeded"}}),
            ErrorKind::ContextLengthExceeded,
        ),
        (
            Some(404),
            json!({"detail": "Not Found"}),
            ErrorKind::NotFound,
        ),
        (Some(429), json!("slow down"), ErrorKind::Overloaded),
        (
            None,
            json!({"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}),
            ErrorKind::Overloaded,
        ),
        (Some(503), json!(null), ErrorKind::Unavailable),
        (Some(504), json!(null), ErrorKind::DeadlineExceeded),
        (
            Some(500),
            json!({"error": {"message": "x", "code": null}}),
            ErrorKind::Internal,
        ),
        (
            None,
            json!({"error": {"message": "x", "code": 503}}),
            ErrorKind::Unavailable,
        ),
        (None, json!({"message": "x"}), ErrorKind::Internal),
    ];
    for (status, body, kind) in cases {
        assert_eq!(error_of(status, &body).kind(), kind, "{status:?} {body}");
    }
}

#[test]
fn sglang_aborts_have_their_status() {
    let event = json!({"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": {
        "type": "abort", "message": "too long", "status_code": 400}}});
    let error = api(Dialect::Sglang)
        .reader(&request())
        .read(event.to_string().as_bytes())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("too long"));
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
