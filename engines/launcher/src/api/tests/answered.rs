//! The answers of each server, and what it reports about itself.

use super::*;

#[test]
fn some_abilities_are_there_only_with_the_servers_own_settings() {
    let settings =
        "scheduling_policy: priority\nguided_decoding_backend: xgrammar\nmax-logprobs: 5\n";
    for (kind, dialect) in [
        (ServerKind::Vllm, Dialect::Vllm),
        (ServerKind::Trtllm, Dialect::Trtllm),
    ] {
        let mut config = LauncherConfig::new(kind, "/m", ServerInput::Tokens { vocab_size: None });
        let before = of(&config, dialect).unwrap().capabilities();
        config.extra = Some(ExtraArgs::in_test(settings));
        let after = of(&config, dialect).unwrap().capabilities();
        if kind == ServerKind::Vllm {
            assert_eq!((before.priority, before.max_logprobs), (false, Some(20)));
            assert_eq!((after.priority, after.max_logprobs), (true, Some(5)));
        } else {
            assert!(before.guided.is_empty() && after.guided.len() == 5);
        }
    }
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
    // With a list of ours the server continues past its model's ends, so the last token belongs to the answer.
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
    // The ranks of a part of a server.
    assert_eq!(ranks(&[2, 3]), None);
    // A label's name must match as a whole.
    let other = "vllm:cache_config_info{hash_block_size=\"7\",num_gpu_blocks=\"5\"} 1.0\n";
    let read = completions::CacheConfig::read(other);
    assert_eq!((read.block_size, read.num_gpu_blocks), (None, Some(5)));
    for none in [
        "",
        "vllm:cache_config_info{block_size=\"",
        "vllm:cache_config_info{block_size=\"0\"}",
    ] {
        assert_eq!(completions::CacheConfig::read(none), Default::default());
    }
}

#[test]
fn sglang_honours_seeds_where_it_infers_deterministically() {
    let mut config = LauncherConfig::new(
        ServerKind::Sglang,
        "/m",
        ServerInput::Tokens { vocab_size: None },
    );
    config.extra = Some(ExtraArgs::in_test("enable_deterministic_inference: true"));
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
    for (status, message, kind) in [
        (400, "too long", ErrorKind::InvalidArgument),
        (503, "The request queue is full.", ErrorKind::Overloaded),
    ] {
        let event = json!({"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": {
            "type": "abort", "message": message, "status_code": status}}});
        let error = api(Dialect::Sglang)
            .reader(&request())
            .read(event.to_string().as_bytes())
            .unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.message().contains(message));
    }
}
