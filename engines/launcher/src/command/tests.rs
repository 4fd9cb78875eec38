use std::num::NonZeroU32;

use genset_backend_common::ErrorKind;

use super::*;
use crate::config::ServerInput;
use crate::kind::ServerKind;

fn config(kind: ServerKind) -> LauncherConfig {
    let input = match kind {
        ServerKind::LlamaCpp => ServerInput::Text,
        ServerKind::Vllm | ServerKind::Sglang | ServerKind::Trtllm => {
            ServerInput::Tokens { vocab_size: None }
        }
    };
    LauncherConfig::new(kind, "/m/model", input)
}

/// With extra arguments.
fn extra(kind: ServerKind, text: &str) -> LauncherConfig {
    let extra = Some(ExtraArgs::in_test(text));
    LauncherConfig {
        extra,
        ..config(kind)
    }
}

fn line(config: &LauncherConfig, dialect: Dialect) -> String {
    let plan = Plan::new(config, dialect).unwrap();
    format!("{} {}", plan.program.display(), plan.args(8000).join(" "))
}

#[test]
fn every_program_is_started_as_its_documentation_says() {
    let cases = [
        (
            Dialect::Vllm,
            "vllm serve /m/model --host 127.0.0.1 --enable-prompt-tokens-details --uvicorn-log-level warning --port 8000",
        ),
        (
            Dialect::Sglang,
            "python3 -m sglang.launch_server --model-path /m/model --host 127.0.0.1 --log-level-http warning --enable-metrics --port 8000",
        ),
        (
            Dialect::Trtllm,
            "trtllm-serve /m/model --host 127.0.0.1 --port 8000",
        ),
        (
            Dialect::LlamaServer,
            "llama-server --model /m/model --host 127.0.0.1 --reasoning-format none --metrics --port 8000",
        ),
        (
            Dialect::LlamaCppPython,
            "python3 -m llama_cpp.server --model /m/model --host 127.0.0.1 --interrupt_requests false --port 8000",
        ),
    ];
    for (dialect, expected) in cases {
        assert_eq!(line(&config(dialect.kind()), dialect), expected);
    }
}

#[test]
fn our_settings_become_the_servers_flags() {
    let mut sglang = config(ServerKind::Sglang);
    sglang.context_length_tokens = Some(4096);
    sglang.tensor_parallel_size = Some(16);
    sglang.base_gpu_id = Some(4);
    sglang.kv_block_size = NonZeroU32::new(64);
    sglang.nodes.num_nodes = Some(2);
    sglang.nodes.node_rank = Some(0);
    sglang.nodes.leader_addr = Some("10.0.0.1:5000".into());
    let said = line(&sglang, Dialect::Sglang);
    let expected = "--context-length 4096 --tp-size 16 --base-gpu-id 4 --nnodes 2 --node-rank 0 --page-size 64 \
                    --dist-init-addr 10.0.0.1:5000";
    assert!(said.contains(expected), "{said}");

    let mut vllm = sglang.clone();
    (vllm.kind, vllm.base_gpu_id) = (ServerKind::Vllm, None);
    let said = line(&vllm, Dialect::Vllm);
    let expected = "--max-model-len 4096 --tensor-parallel-size 16 --nnodes 2 --node-rank 0 --block-size 64 \
                    --master-addr 10.0.0.1 --master-port 5000";
    assert!(said.contains(expected), "{said}");

    let mut llama = config(ServerKind::LlamaCpp);
    llama.context_length_tokens = Some(512);
    assert!(line(&llama, Dialect::LlamaServer).contains("--ctx-size 512"));
    assert!(line(&llama, Dialect::LlamaCppPython).contains("--n_ctx 512"));
}

#[test]
fn what_a_server_lacks_is_refused_by_our_flags_name() {
    type Set = fn(&mut LauncherConfig);
    let cases: [(Dialect, &str, Set); 5] = [
        (Dialect::Trtllm, "--num-nodes", |c| {
            c.nodes.num_nodes = Some(2)
        }),
        (Dialect::Trtllm, "--kv-cache-block-size", |c| {
            c.kv_block_size = NonZeroU32::new(16)
        }),
        (Dialect::LlamaServer, "--tensor-parallel-size", |c| {
            c.tensor_parallel_size = Some(2)
        }),
        (Dialect::LlamaServer, "--node-rank", |c| {
            c.nodes.node_rank = Some(0)
        }),
        (Dialect::LlamaCppPython, "--leader-addr", |c| {
            c.nodes.leader_addr = Some("a:1".into())
        }),
    ];
    for (dialect, flag, set) in cases {
        let mut config = config(dialect.kind());
        set(&mut config);
        let error = Plan::new(&config, dialect).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.at().map(|at| at.name()), Some(flag));
    }
}

#[test]
fn the_first_gpu_is_a_flag_or_what_the_program_sees() {
    for dialect in [Dialect::Vllm, Dialect::Trtllm, Dialect::LlamaServer] {
        let mut config = config(dialect.kind());
        config.base_gpu_id = Some(2);
        config.env = [("CUDA_VISIBLE_DEVICES".into(), "4,5,6".into())].into();
        let plan = Plan::new(&config, dialect).unwrap();
        assert_eq!(plan.env, [("CUDA_VISIBLE_DEVICES", "6".to_owned())]);
        config.base_gpu_id = Some(3);
        let error = Plan::new(&config, dialect).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--base-gpu-id"));
    }
    let mut sglang = config(ServerKind::Sglang);
    sglang.base_gpu_id = Some(2);
    let plan = Plan::new(&sglang, Dialect::Sglang).unwrap();
    // Leaves the GPUs alone, but sets the kind of log probabilities.
    assert_eq!(
        plan.env,
        [("SGLANG_RETURN_ORIGINAL_LOGPROB", "1".to_owned())]
    );
}

#[test]
fn followers_and_half_said_nodes_are_refused() {
    type Set = fn(&mut LauncherConfig);
    let cases: [(&str, Set); 5] = [
        ("--node-rank", |c| c.nodes.node_rank = Some(1)),
        ("--leader-addr", |c| c.nodes.num_nodes = Some(2)),
        ("--leader-addr", |c| {
            c.nodes.leader_addr = Some("a:1".into())
        }),
        ("--num-nodes", |c| c.nodes.num_nodes = Some(0)),
        ("--leader-addr", |c| {
            (c.nodes.num_nodes, c.nodes.leader_addr) = (Some(2), Some("nowhere".into()));
        }),
    ];
    for (flag, set) in cases {
        let mut config = config(ServerKind::Sglang);
        set(&mut config);
        let error = config.validate().unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some(flag), "{error}");
    }
    let mut text = config(ServerKind::Vllm);
    text.input = ServerInput::Text;
    assert_eq!(text.validate().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn extra_arguments_become_flags_in_each_programs_way() {
    let text = r#"{"dtype": "half", "trust_remote_code": true, "enforce-eager": false, "rope_scaling": {"factor": 2.0},
                   "middleware": ["a", "b"], "seed": null, "swap_space": 4}"#;
    let cases = [
        (
            Dialect::Vllm,
            "--dtype half --no-enforce-eager --middleware a b --rope-scaling {\"factor\":2.0} --swap-space 4 --trust-remote-code",
        ),
        (
            Dialect::Sglang,
            "--dtype half --middleware a b --rope-scaling {\"factor\":2.0} --swap-space 4 --trust-remote-code",
        ),
        (
            Dialect::LlamaCppPython,
            "--dtype half --enforce_eager false --middleware a b --rope_scaling {\"factor\":2.0} --swap_space 4 \
             --trust_remote_code true",
        ),
    ];
    for (dialect, expected) in cases {
        let said = line(&extra(dialect.kind(), text), dialect);
        let mut found: Vec<&str> = said.split(" --").collect();
        found.sort_unstable();
        for flag in expected.trim_start_matches("--").split(" --") {
            assert!(
                found.contains(&flag),
                "{dialect:?} has no `--{flag}` in {said}"
            );
        }
        assert!(!said.contains("seed"), "{said}");
    }
}

#[test]
fn tensorrt_llm_gets_the_file_itself() {
    let config = extra(ServerKind::Trtllm, "backend: pytorch");
    let expected = format!("--extra_llm_api_options {}", absolute("extra.yaml"));
    assert!(line(&config, Dialect::Trtllm).contains(&expected));
}

#[test]
fn what_the_file_and_a_flag_both_say_is_named() {
    let cases = [
        (ServerKind::Vllm, "port: 1", "port"),
        (ServerKind::Sglang, "model-path: x", "model-path"),
        (ServerKind::Vllm, "max_model_len: 5", "max_model_len"),
        (ServerKind::Sglang, "tp: 5", "tp"),
        (
            ServerKind::Trtllm,
            "tensor_parallel_size: 5",
            "tensor_parallel_size",
        ),
    ];
    for (kind, text, key) in cases {
        let mut config = extra(kind, text);
        (config.context_length_tokens, config.tensor_parallel_size) = (Some(4096), Some(2));
        let error = Plan::new(&config, Dialect::first_of(kind)).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--extra-engine-args"));
        assert!(error.message().contains(key), "{error}");
        (config.context_length_tokens, config.tensor_parallel_size) = (None, None);
        let is_always = ["port", "model-path"].contains(&key);
        assert_eq!(
            Plan::new(&config, Dialect::first_of(kind)).is_err(),
            is_always,
            "{key}"
        );
    }
}

/// The key is ours to set. SGLang would take calls out of the text of chats with media. vLLM would answer only to that name.
/// llama-server is asked for its load every second, so it would never be idle.
#[test]
fn what_no_file_and_no_command_may_say_is_refused_with_the_alternative() {
    let cases = [
        (Dialect::Vllm, "api-key: x", "genset sets it"),
        (Dialect::Sglang, "api_key: x", "genset sets it"),
        (Dialect::Sglang, "config: x.yaml", "genset sets it"),
        (Dialect::LlamaServer, "api-key-file: x", "genset sets it"),
        (Dialect::LlamaCppPython, "api_key: x", "genset sets it"),
        (Dialect::Sglang, "tool-call-parser: x", "--tool-parser"),
        (Dialect::Sglang, "tool_call_parser: x", "--tool-parser"),
        (
            Dialect::LlamaServer,
            "reasoning-format: auto",
            "--reasoning-parser",
        ),
        (Dialect::Vllm, "served_model_name: x", "--model-name"),
        (Dialect::Sglang, "served_model_name: x", "--model-name"),
        (
            Dialect::LlamaServer,
            "sleep-idle-seconds: 600",
            "would never sleep",
        ),
        (Dialect::Vllm, "ssl_certfile: x", "--http-tls-cert"),
        (Dialect::Vllm, "uds: /run/x", "in vain"),
        (Dialect::Vllm, "headless: true", "in vain"),
        (Dialect::Sglang, "ssl-keyfile: x", "in vain"),
        (Dialect::LlamaServer, "ssl-cert-file: x", "in vain"),
        (Dialect::LlamaServer, "api-prefix: /x", "in vain"),
        (Dialect::LlamaCppPython, "ssl_keyfile: x", "in vain"),
    ];
    for (dialect, text, instead) in cases {
        let error = Plan::new(&extra(dialect.kind(), text), dialect).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at().map(|at| at.name()), Some("--extra-engine-args"));
        let (key, _) = text.split_once(':').unwrap();
        for part in [key, "leave it out", instead] {
            assert!(error.message().contains(part), "{error}");
        }
    }
    for (dialect, command, flag) in [
        (
            Dialect::Vllm,
            "vllm serve --served-model-name x",
            "--served-model-name",
        ),
        (Dialect::Vllm, "vllm serve --uds=/run/x", "--uds"),
        (Dialect::Vllm, "vllm serve --api-key=x", "--api-key"),
        (
            Dialect::Sglang,
            "python -m sglang.launch_server --tool_call_parser x",
            "--tool_call_parser",
        ),
    ] {
        let mut config = config(dialect.kind());
        config.command = Some(command.split(' ').map(str::to_owned).collect());
        let error = Plan::new(&config, dialect).unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--server-cmd"));
        for part in [flag, "leave it out"] {
            assert!(error.message().contains(part), "{error}");
        }
    }
    // Requests tell vLLM to parse no calls, whatever it was started with.
    let vllm = extra(ServerKind::Vllm, "tool-call-parser: hermes");
    assert!(line(&vllm, Dialect::Vllm).contains("--tool-call-parser hermes"));
}

#[test]
fn a_default_of_ours_gives_way_to_the_file() {
    let text = "uvicorn_log_level: debug\nno-enable-prompt-tokens-details: true";
    let said = line(&extra(ServerKind::Vllm, text), Dialect::Vllm);
    assert!(
        said.contains("--uvicorn-log-level debug") && !said.contains("warning"),
        "{said}"
    );
    assert!(!said.contains(" --enable-prompt-tokens-details"), "{said}");
}

#[test]
fn bad_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text, expected) in [
        ("a.json", "{", "no JSON"),
        ("a.yaml", "a: [", "no YAML"),
        ("b.yaml", "- a", "one object"),
        ("c.json", "3", "one object"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let error = ExtraArgs::load(&path).unwrap_err();
        assert!(
            error.message().contains(expected) && error.message().contains(name),
            "{error}"
        );
    }
    assert!(ExtraArgs::load(&folder.path().join("none.json")).is_err());
}

#[test]
fn a_command_takes_the_place_of_the_usual_one() {
    let mut config = config(ServerKind::Vllm);
    config.command = Some(vec![
        "uv".into(),
        "run".into(),
        "vllm".into(),
        "serve".into(),
    ]);
    assert!(line(&config, Dialect::Vllm).starts_with("uv run vllm serve /m/model --host"));
}

#[test]
fn a_connector_of_ones_own_is_kept_and_an_instance_that_does_the_whole_gets_none() {
    let mut config = config(ServerKind::Vllm);
    let told = |config: &LauncherConfig, role| {
        let plan = Plan::new(config, Dialect::Vllm).unwrap();
        let plan = plan.in_role(config, role);
        (plan.side_channel.is_some(), plan.args(8000).join(" "))
    };
    let (has_channel, args) = told(&config, Role::Aggregated);
    assert!(!has_channel && !args.contains("kv-transfer"), "{args}");
    let own = "kv_transfer_config: {kv_connector: MultiConnector, kv_role: kv_both}";
    config.extra = Some(ExtraArgs::in_test(own));
    let (has_channel, args) = told(&config, Role::Prefill);
    let own = r#"--kv-transfer-config {"kv_connector":"MultiConnector","kv_role":"kv_both"}"#;
    assert!(has_channel && args.contains(own), "{args}");
    assert_eq!(args.matches("--kv-transfer-config").count(), 1, "{args}");
}

fn adapter(name: &str, source: &str) -> Adapter {
    Adapter {
        name: name.into(),
        source: source.into(),
    }
}

#[test]
fn vllm_is_told_of_adapters() {
    let adapters = [adapter("french", "/a/french"), adapter("a=b", "/a/x,y")];
    let mut config = config(ServerKind::Vllm);
    let line = |config: &LauncherConfig| {
        let plan = Plan::new(config, Dialect::Vllm).unwrap();
        let plan = plan.with_adapters(&adapters, config).unwrap();
        plan.with_args(lora_modules(&adapters)).args(8000).join(" ")
    };
    let modules = r#"--lora-modules french=/a/french {"name":"a=b","path":"/a/x,y"} --port 8000"#;
    let told = line(&config);
    assert!(
        told.ends_with(&format!("--enable-lora --max-loras 3 {modules}")),
        "{told}"
    );
    config.extra = Some(ExtraArgs::in_test("max-lora-rank: 64\nmax_loras: 1\n"));
    let told = line(&config);
    assert!(
        told.ends_with(&format!(
            "--max-lora-rank 64 --max-loras 1 --enable-lora {modules}"
        )),
        "{told}"
    );
    config.extra = Some(ExtraArgs::in_test("lora-modules: [a=b]\n"));
    let plan = Plan::new(&config, Dialect::Vllm).unwrap();
    let error = plan.with_adapters(&adapters, &config);
    assert!(error.unwrap_err().message().contains("lora-modules"));
}

#[test]
fn a_vllm_that_loads_adapters_later_has_room_for_them() {
    let mut config = config(ServerKind::Vllm);
    let with = |config: &LauncherConfig, adapters: &[Adapter]| {
        let plan = Plan::new(config, Dialect::Vllm).unwrap();
        let plan = plan.with_adapters(adapters, config).unwrap();
        plan.args(8000).join(" ")
    };
    let one = [adapter("french", "/a/french")];
    assert!(with(&config, &one).ends_with("--enable-lora --max-loras 2 --port 8000"));
    config.env.insert(LORA_UPDATES.into(), "True".into());
    assert!(with(&config, &one).ends_with("--enable-lora --max-loras 9 --port 8000"));
    assert!(!with(&config, &[]).contains("lora"));
    config.extra = Some(ExtraArgs::in_test("enable-lora: true\n"));
    assert!(with(&config, &[]).ends_with("--enable-lora --max-loras 9 --port 8000"));
    config.extra = Some(ExtraArgs::in_test(
        "enable_lora: true\nmax-loras: 3\nlora-modules: [a=/a]\n",
    ));
    let told = with(&config, &[]);
    assert_eq!(told.matches("--max-loras 3").count(), 1, "{told}");
    assert_eq!(told.matches("lora-modules").count(), 1, "{told}");
    config.env.insert(LORA_UPDATES.into(), "0".into());
    config.extra = None;
    let command = ["vllm", "serve", "--max-loras", "4"].map(str::to_owned);
    config.command = Some(command.to_vec());
    let told = with(&config, &one);
    assert_eq!(told.matches("--max-loras").count(), 1, "{told}");
}

#[test]
fn other_servers_are_told_of_no_adapters() {
    for dialect in [Dialect::Sglang, Dialect::Trtllm, Dialect::LlamaServer] {
        let config = config(dialect.kind());
        let plan = || Plan::new(&config, dialect).unwrap();
        plan().with_adapters(&[], &config).unwrap();
        let error = plan()
            .with_adapters(&[adapter("a", "/a")], &config)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.at().map(|at| at.name()), Some("--adapter"));
    }
}
