//! `out=vllm` and others: servers of other projects, here replaced by stand-ins that speak their APIs.

use serde_json::{Value, json};
use tokio::process::Command;

use crate::fleet::Fleet;
use crate::support::{Server, file, genset, run_with, stand_in, tiny_chat, until};

/// The binary with a `PATH` to a shell and an interpreter.
fn with_path(words: &[&str]) -> Command {
    let mut command = genset(words);
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command
}

async fn chat(server: Server, model: &str) -> Value {
    let body = json!({
        "model": model,
        "max_tokens": 5,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Hello you there"}],
    });
    let answer = server.ask("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}{}", answer.body, server.log());
    server.stop().await;
    serde_json::from_str(&answer.body).unwrap()
}

#[tokio::test]
async fn a_server_of_tokens_answers_the_api() {
    for api in ["vllm", "sglang", "trtllm"] {
        let output = format!("out={api}");
        let mut command = with_path(&["run", "in=http", &output, "--http-port", "0"]);
        command.arg(tiny_chat()).arg(stand_in(api));
        let server = Server::spawn(command).await;
        let log = server.log();
        let has_none = log.contains("the KV events of TensorRT-LLM are not followed");
        assert_eq!(has_none, api == "trtllm", "{api}: {log}");
        let answer = chat(server, "tiny-chat").await;
        assert_eq!(answer["usage"]["completion_tokens"], 5, "{api}: {answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{api}");
    }
}

#[tokio::test]
async fn a_gguf_file_is_served_as_text_or_with_its_folder_as_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("parrot.gguf");
    std::fs::copy(tiny_chat().join("tiny-chat-q8_0.gguf"), &model).unwrap();
    let run = ["run", "in=http", "out=llamacpp", "--http-port", "0"];

    let mut command = with_path(&run);
    command.arg(&model).arg(stand_in("llama_cpp.server"));
    let server = Server::spawn(command).await;
    // Its template says so, as with a folder.
    let found = "tool parser hermes: found in the chat template";
    until(async || server.log().contains(found)).await;
    let answer = chat(server, "parrot").await;
    assert_eq!(answer["model"], "parrot");
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        "Hello you there"
    );

    let mut command = with_path(&run);
    command.arg(&model).arg(stand_in("llama"));
    command.arg("--model-config").arg(tiny_chat());
    let answer = chat(Server::spawn(command).await, "tiny-chat").await;
    assert_eq!(answer["usage"]["completion_tokens"], 5, "{answer}");
}

/// The router's decision for an answer with the annotation, and the number of cached prompt tokens.
async fn decided(frontend: &Server, rank: Option<u32>) -> (Value, u64) {
    let mut genset = json!({"annotations": ["router"]});
    if let Some(rank) = rank {
        genset["data_parallel_rank"] = rank.into();
    }
    let body = json!({
        "genset": genset,
        "model": "tiny-chat",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "a question of some length, so that it has a few blocks ".repeat(8)}],
    });
    let answer = frontend.ask("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer: Value = serde_json::from_str(&answer.body).unwrap();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (answer["genset"]["router"][0].clone(), cached.unwrap())
}

#[tokio::test]
async fn the_router_knows_what_each_rank_of_a_launched_vllm_has() {
    let model = tiny_chat().display().to_string();
    let server = stand_in("vllm --context 2048 --data-parallel-size 2");
    let words = [
        "in=dyn",
        "out=vllm",
        &model,
        &server,
        "--kv-cache-block-size=16",
    ];
    let path = std::env::var("PATH").unwrap();
    let fleet = Fleet::new();
    let worker = fleet.worker_of(&words, &[("PATH", &path)]).await;
    let frontend = fleet.frontend(&[("GENSET_ROUTER_MODE", "kv")]).await;
    let (first, cached) = decided(&frontend, Some(1)).await;
    assert_eq!((&first["rank"], cached), (&json!(1), 0), "{first}");
    let knows = |metrics: &str| {
        let mut lines = metrics.lines();
        let line = lines.find(|line| line.starts_with("genset_router_index_blocks"));
        let blocks = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        blocks.is_some_and(|blocks| blocks > 0.0)
    };
    until(async || knows(&frontend.get("/metrics").await.body)).await;
    let (again, cached) = decided(&frontend, None).await;
    assert_eq!(
        (&again["rank"], &again["reason"], &again["candidate_count"]),
        (&json!(1), &json!("overlap"), &json!(2)),
        "{again}"
    );
    assert!(cached > 0 && cached % 16 == 0, "{cached}");
    // The other rank has none of it in its cache.
    let (elsewhere, cached) = decided(&frontend, Some(0)).await;
    assert_eq!(cached, 0, "{elsewhere}");
    frontend.stop().await;
    worker.stop().await;
}

#[tokio::test]
async fn what_cannot_be_started_is_told() {
    let model = tiny_chat().display().to_string();
    let run = ["run", "in=stdin", "out=vllm", &model];
    let cases: [(&[&str], i32, &str); 4] = [
        (&["--server-cmd=/no/such/vllm"], 1, "pip install vllm"),
        (&["--node-rank=1"], 2, "--node-rank"),
        (&["--extra-engine-args=/no/such.json"], 2, "/no/such.json"),
        (
            &["--kv-transfer-host=127.0.0.1"],
            2,
            "--role prefill and decode",
        ),
    ];
    for (flags, code, expected) in cases {
        let words = [&run[..], flags].concat();
        let ended = run_with(with_path(&words), b"hi").await;
        ended.fails(code, expected);
    }
}

/// A request with a key would share KV blocks with other keys, so every request would be refused.
#[tokio::test]
async fn a_server_that_cannot_keep_api_keys_apart_is_told_before_it_starts() {
    let model = tiny_chat().display().to_string();
    let hash = "0".repeat(64);
    let keys = file(&format!(
        "[[key]]\nname = \"alice\"\nhash = \"blake3:{hash}\"\n"
    ));
    let flag = format!("--api-keys={}", keys.path().display());
    let words = [
        "run",
        "in=http",
        "out=trtllm",
        &model,
        &flag,
        "--http-port=0",
    ];
    let ended = run_with(with_path(&words), b"").await;
    ended.fails(2, "--api-keys");
    let remedy = "enable_block_reuse: false";
    assert!(ended.stderr.contains(remedy), "{}", ended.stderr);
}

#[tokio::test]
async fn a_role_that_a_server_cannot_play_is_told_before_it_starts() {
    let model = tiny_chat().display().to_string();
    for (api, named) in [("sglang", "at the same time"), ("trtllm", "not driven")] {
        let output = format!("out={api}");
        let words = ["run", "in=dyn", &output, &model, "--role=prefill"];
        let ended = run_with(with_path(&words), b"").await;
        ended.fails(2, "--role");
        assert!(ended.stderr.contains(named), "{}", ended.stderr);
    }
}
