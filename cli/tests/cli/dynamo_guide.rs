//! The command lines of NVIDIA Dynamo's guide to `dynamo-run`, unchanged, given to this binary under that name.
//!
//! Models are small ones with the names of the guide's: folders and files in `llms`, and a hub's cache that is used offline.
//! Lines that start another project's server get as far as the search for its program.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::hub::cache_of;
use crate::support::{Server, run_with, send_signal, soon, tiny_chat, until};

/// The usage line with every value that it shows, for an engine that takes all its flags: a `--model-config` goes with a GGUF
/// file.
const USAGE: &str = "in=http out=llamacpp --http-port 8080 --model-path Llama-3.2-3B-Instruct-Q4_K_M.gguf --model-name served --model-config \
    Qwen/Qwen3-0.6B --tensor-parallel-size=1 --context-length=1024 --num-nodes=1 --node-rank=0 --leader-addr=127.0.0.1:9876 \
    --base-gpu-id=0 --extra-engine-args=args.json --router-mode round-robin --kv-overlap-score-weight=1.0 \
    --router-temperature=0.0 --use-kv-events=true --verbosity";

/// Lines that this machine can run completely, and lines for a worker or a frontend of several processes.
const OWN: &[&str] = &[
    "Qwen/Qwen3-0.6B",
    "in=http out=mistralrs -v",
    "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
    "in=http out=mistralrs Llama-3.2-3B-Instruct-Q4_K_M.gguf",
    "in=http out=dyn",
    "in=http out=dyn --router-mode kv",
    "in=dyn://test out=echo_full --migration-limit=3",
    "Qwen/Qwen3-4B",
    "in=text out=mistralrs Qwen/Qwen3-4B",
    "in=http out=echo_core --model-path ~/llms/Llama-3.2-3B-Instruct",
    "in=http out=echo_full --model-name my_model",
    "in=http out=echo_full",
    "in=dyn://dynamo.mocker.generate out=mocker --model-path TinyLlama/TinyLlama-1.1B-Chat-v1.0 --extra-engine-args mocker_args.json",
];

/// Lines that start another project's server, and the first program that is missing.
const OF_SERVERS: &[(&str, &str)] = &[
    ("out=vllm Qwen/Qwen3-4B", "vllm"),
    (
        "in=dyn://llama3B.backend.generate out=vllm ~/llms/Llama-3.2-3B-Instruct",
        "vllm",
    ),
    (
        "in=dyn://qwen3-32b.backend.generate out=sglang /data/Qwen3-32B --tensor-parallel-size 2 --base-gpu-id 0",
        "python3",
    ),
    (
        "in=dyn://qwen3-32b.backend.generate out=sglang /data/Qwen3-32B --tensor-parallel-size 2 --base-gpu-id 2",
        "python3",
    ),
    (
        "in=dyn://qwen3-32b.backend.generate out=vllm /data/Qwen3-32B",
        "vllm",
    ),
    (
        "in=dyn://llama3-1-8b.backend.generate out=vllm /data/Llama-3.1-8B-Instruct/",
        "vllm",
    ),
    (
        "in=dyn://dynamo.endpoint.generate out=vllm /data/llms/Qwen/Qwen3-4B",
        "vllm",
    ),
    ("out=llamacpp ~/llms/gemma-3-1b-it-q4_0.gguf", "python3"),
    ("out=llamacpp ~/llms/Qwen3-0.6B-Q8_0.gguf", "python3"),
    (
        "out=llamacpp ~/llms/Llama-4-Scout-17B-16E-Instruct-UD-IQ1_S.gguf --context-length 32768 --model-config \
         ~/llms/Llama-4-Scout-17B-16E-Instruct",
        "python3",
    ),
    (
        "in=http out=sglang --model-path ~/llms/DeepSeek-R1-Distill-Llama-70B/ --tensor-parallel-size 8",
        "python3",
    ),
    (
        "out=sglang ~/llms/Llama-4-Scout-17B-16E-Instruct/ --tensor-parallel-size 8",
        "python3",
    ),
    (
        "out=sglang ~/llms/Llama-3.2-3B-Instruct --tensor-parallel-size 4 --base-gpu-id 4",
        "python3",
    ),
    (
        "out=sglang /data/models/DeepSeek-R1-Distill-Llama-70B/ --tensor-parallel-size 16 --node-rank 0 --num-nodes 2 \
         --leader-addr 10.217.98.122:5000",
        "python3",
    ),
    ("in=http out=vllm ~/llms/Llama-3.2-3B-Instruct/", "vllm"),
    (
        "out=vllm ~/llms/DeepSeek-R1-Distill-Llama-70B/ --tensor-parallel-size 16",
        "vllm",
    ),
    (
        "in=http out=trtllm TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "trtllm-serve",
    ),
    (
        "in=batch:prompts.jsonl out=llamacpp ~/llms/Qwen3-0.6B-Q8_0.gguf",
        "python3",
    ),
    (
        "out=sglang ~/llms/Llama-3.2-3B-Instruct --extra-engine-args sglang_extra.json",
        "python3",
    ),
    (
        "in=http out=trtllm TinyLlama/TinyLlama-1.1B-Chat-v1.0 --extra-engine-args trtllm_extra.yaml",
        "trtllm-serve",
    ),
];

/// A machine as the guide assumes it.
struct Machine {
    folder: TempDir,
    hub: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let hub = cache_of(&[
            "Qwen/Qwen3-0.6B",
            "Qwen/Qwen3-4B",
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        ]);
        let machine = Self { folder, hub };
        let link = |from: &Path, to: &str| {
            let to = machine.path(to);
            std::fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
            std::os::unix::fs::symlink(from, to).expect("a link");
        };
        let weights = tiny_chat().join("tiny-chat-q8_0.gguf");
        for file in [
            "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
            "llms/gemma-3-1b-it-q4_0.gguf",
            "llms/Qwen3-0.6B-Q8_0.gguf",
            "llms/Llama-4-Scout-17B-16E-Instruct-UD-IQ1_S.gguf",
        ] {
            link(&weights, file);
        }
        for folder in [
            "llms/Llama-3.2-3B-Instruct",
            "llms/Llama-4-Scout-17B-16E-Instruct",
            "llms/DeepSeek-R1-Distill-Llama-70B",
            "data/Qwen3-32B",
            "data/Llama-3.1-8B-Instruct",
            "data/llms/Qwen/Qwen3-4B",
            "data/models/DeepSeek-R1-Distill-Llama-70B",
        ] {
            link(&tiny_chat(), folder);
        }
        link(Path::new(env!("CARGO_BIN_EXE_genset")), "dynamo-run");
        // The only program that a launcher itself needs.
        link(Path::new("/bin/sh"), "bin/sh");
        for (file, text) in [
            ("args.json", "{\"dtype\": \"half\"}"),
            (
                "sglang_extra.json",
                "{\"dtype\": \"half\", \"trust_remote_code\": true}",
            ),
            (
                "trtllm_extra.yaml",
                "backend: pytorch\nkv_cache_config:\n  event_buffer_max_size: 1024\n",
            ),
            ("mocker_args.json", "{\"speedup_ratio\": 10.0}\n"),
            (
                "prompts.jsonl",
                "{\"text\": \"What is the capital of France?\"}\n{\"text\": \"What is the capital of Spain?\"}\n",
            ),
        ] {
            std::fs::write(machine.path(file), text).expect("a file");
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `dynamo-run` with these words, in which a shell has expanded the home folder. Finds no other program.
    fn command(&self, line: &str, further: &[&str]) -> Command {
        let mut command = Command::new(self.path("dynamo-run"));
        let data = self.path("data").display().to_string();
        let words = line
            .split_whitespace()
            .map(|word| match word.strip_prefix("~/") {
                Some(rest) => self.path(rest).display().to_string(),
                None if word.starts_with("/data/") => word.replacen("/data", &data, 1),
                None => word.to_owned(),
            });
        command
            .args(words)
            .args(further)
            .env_clear()
            .env("PATH", self.path("bin"))
            .env("HF_HUB_CACHE", self.hub.path())
            .env("HF_HUB_OFFLINE", "1")
            .env("GENSET_DISCOVERY_PATH", self.path("discovery"))
            .current_dir(self.folder.path())
            .kill_on_drop(true);
        command
    }

    /// The server that the line starts, on its own port.
    async fn server(&self, line: &str) -> Server {
        Server::spawn(self.command(line, &["--http-port=0"])).await
    }
}

#[tokio::test]
async fn every_line_is_taken_as_it_stands() {
    let machine = Machine::new();
    let of_servers = OF_SERVERS.iter().map(|(line, _)| *line);
    for line in OWN.iter().copied().chain(of_servers).chain([USAGE]) {
        let ended = run_with(machine.command(line, &["--print-config"]), b"").await;
        assert_eq!(ended.code, Some(0), "{line}: {ended:?}");
    }
}

#[tokio::test]
async fn a_server_of_another_project_is_looked_for_by_its_name() {
    let machine = Machine::new();
    for (line, program) in OF_SERVERS {
        let further: &[&str] = match line.starts_with("in=http") {
            true => &["--http-port=0"],
            false => &[],
        };
        let ended = run_with(machine.command(line, further), b"Hello").await;
        assert!(
            ended.code.is_some_and(|code| code != 0),
            "{line}: {ended:?}"
        );
        let is_named = [
            format!("there is no program `{program}`"),
            format!("there is no Python `{program}`"),
        ]
        .iter()
        .any(|named| ended.stderr.contains(named));
        assert!(is_named, "{line}: {ended:?}");
        // Only this server has replacements.
        let has_others = line.contains("out=llamacpp");
        for other in ["out=candle", "out=libllama"] {
            let is_told = ended.stderr.contains(other);
            assert_eq!(is_told, has_others, "{line}: {ended:?}");
        }
    }
    // The guide shows a flag with it, but no model.
    let ended = run_with(machine.command("in=text out=llamacpp -vv", &[]), b"").await;
    ended.fails(2, "name a GGUF file");
}

#[tokio::test]
async fn a_model_answers_on_the_terminal() {
    let machine = Machine::new();
    for line in [
        "Qwen/Qwen3-0.6B",
        "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        "Qwen/Qwen3-4B",
        "in=text out=mistralrs Qwen/Qwen3-4B",
        "in=batch:prompts.jsonl out=mistralrs ~/llms/Qwen3-0.6B-Q8_0.gguf",
    ] {
        let ended = run_with(
            machine.command(line, &[]),
            b"What is the capital of France?\n",
        )
        .await;
        assert_eq!(ended.code, Some(0), "{line}: {ended:?}");
        let output = machine.path("output.jsonl");
        let said = std::fs::read_to_string(&output).unwrap_or(ended.stdout);
        assert!(said.contains("Paris"), "{line}: {said}");
    }
    let output = std::fs::read_to_string(machine.path("output.jsonl")).expect("the answers");
    let lines = output.lines().map(serde_json::from_str::<Value>);
    let lines: Vec<Value> = lines.collect::<Result<_, _>>().expect("JSON");
    assert_eq!(lines.len(), 2);
    for line in &lines {
        for field in ["text", "response", "tokens_in", "tokens_out", "elapsed_ms"] {
            assert!(line.get(field).is_some(), "{field}: {line}");
        }
    }
}

#[tokio::test]
async fn a_model_is_served_and_answers_as_the_guide_asks_it() {
    let machine = Machine::new();
    let server = machine
        .server("in=http out=mistralrs Llama-3.2-3B-Instruct-Q4_K_M.gguf")
        .await;
    let models = server.get("/v1/models").await.body;
    assert!(
        models.contains("\"id\":\"Llama-3.2-3B-Instruct-Q4_K_M\""),
        "{models}"
    );
    let body = r#"{"model": "Llama-3.2-3B-Instruct-Q4_K_M", "max_completion_tokens": 2049, "messages":[{"role":"user", "content": "What is the capital of South Africa?" }]}"#;
    let answer = server
        .post("/v1/chat/completions", body)
        .await
        .response()
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    server.stop().await;

    let server = machine.server("in=http out=mistralrs -v").await;
    assert!(server.log().contains("DEBUG"), "{}", server.log());
    server.stop().await;
}

#[tokio::test]
async fn the_echo_engines_answer_as_the_guide_asks_them() {
    let machine = Machine::new();
    let line = "in=http out=echo_core --model-path ~/llms/Llama-3.2-3B-Instruct --model-name Qwen2.5-3B-Instruct";
    let server = machine.server(line).await;
    let body = r#"{"nvext": {"ignore_eos": true}, "stream": true, "model": "Qwen2.5-3B-Instruct", "max_completion_tokens": 4096, "messages":[{"role":"user", "content": "Tell me a story" }]}"#;
    let answer = server
        .post("/v1/chat/completions", body)
        .await
        .response()
        .await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let events = crate::support::done_events(&answer.body);
    let text = crate::support::text_of(&events);
    // The whole prompt with its template, once.
    assert_eq!(text.matches("Tell me a story").count(), 1, "{text}");
    assert_eq!(crate::support::finish_reason(&events), Some("stop"));
    server.stop().await;

    let mut command = machine.command("in=http out=echo_full", &["--http-port=0"]);
    command.env("DYN_TOKEN_ECHO_DELAY_MS", "1");
    let server = Server::spawn(command).await;
    let models: Value = serde_json::from_str(&server.get("/v1/models").await.body).expect("JSON");
    let body = json!({"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Hello there"}]});
    let answer = server.ask("/v1/chat/completions", &body).await;
    assert!(answer.body.contains("Hello there"), "{}", answer.body);
    server.stop().await;
    let server = machine
        .server("in=http out=echo_full --model-name my_model")
        .await;
    assert!(server.get("/v1/models").await.body.contains("my_model"));
    server.stop().await;
}

#[tokio::test]
async fn a_mocker_is_found_by_a_frontend_with_the_kv_router() {
    let machine = Machine::new();
    let line = "in=dyn://dynamo.mocker.generate out=mocker --model-path TinyLlama/TinyLlama-1.1B-Chat-v1.0 --extra-engine-args \
        mocker_args.json";
    let mut worker = machine.command(line, &["--status-port=0"]);
    worker
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut worker = worker.spawn().expect("the binary starts");
    let mut said = BufReader::new(worker.stdout.take().expect("a pipe")).lines();
    let server = machine.server("in=http out=dyn --router-mode kv").await;
    until(async || server.get("/ready").await.status == 200).await;
    let models = server.get("/v1/models").await.body;
    assert!(models.contains("TinyLlama"), "{models}");
    server.stop().await;
    send_signal(&worker, Signal::TERM);
    soon(async { while let Ok(Some(_)) = said.next_line().await {} }).await;
    assert_eq!(soon(worker.wait()).await.expect("it ends").code(), Some(0));
}
