//! Engines on stand-in servers, their answers, and the stand-ins' reports.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::process::Command;
use std::time::Duration;

use futures_util::StreamExt as _;
use genset_backend_common::output::{Finished, TokenLogprob};
use genset_backend_common::{
    EngineError, GenerateRequest, LLMEngine, OutputStream, RequestContext, StartContext,
};
use genset_conformance::Answer as Whole;
use genset_engine_launcher::{LauncherConfig, LauncherEngine, ServerInput, ServerKind};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Only to fail instead of hanging.
pub const LONG: Duration = Duration::from_secs(120);

/// A value for `-X`: keeps Python's compiled files away from its sources.
const PYTHON_CACHE: &str = concat!("pycache_prefix=", env!("CARGO_TARGET_TMPDIR"), "/pycache");

/// The APIs that take tokens.
pub const OF_TOKENS: [&str; 4] = ["vllm", "sglang", "trtllm", "llama"];

/// The config of an engine on the stand-in for `api`, with flags for the stand-in.
pub fn config(api: &str, flags: &[&str]) -> LauncherConfig {
    let kind = match api {
        "vllm" => ServerKind::Vllm,
        "sglang" => ServerKind::Sglang,
        "trtllm" => ServerKind::Trtllm,
        "llama" | "llama_cpp.server" => ServerKind::LlamaCpp,
        other => panic!("there is no stand-in for {other}"),
    };
    let input = match api {
        "llama_cpp.server" => ServerInput::Text,
        _ => ServerInput::Tokens {
            vocab_size: NonZeroU32::new(1000),
        },
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in");
    // Without the machine's packages, whose look-up is a part of each start.
    let command = ["python3", "-S", "-X", PYTHON_CACHE, script, api]
        .into_iter()
        .chain(flags.iter().copied());
    let mut config = LauncherConfig::new(kind, "/models/stand-in", input);
    config.command = Some(command.map(str::to_owned).collect());
    // Otherwise Python would compile even the standard library at every start.
    let keeps_nothing = "PYTHONDONTWRITEBYTECODE".to_owned();
    config.env.insert(keeps_nothing, String::new());
    config.model_context_length_tokens = Some(256);
    config.start_timeout = LONG;
    config
}

/// The config of a vLLM or an SGLang that is started with everything that operations need.
pub fn operated(api: &str, flags: &[&str]) -> LauncherConfig {
    const VLLM: [&str; 4] = [
        "--enable-lora",
        "--enable-sleep-mode",
        "--profiler-config",
        r#"{"profiler": "torch", "torch_profiler_dir": "/profiles"}"#,
    ];
    const SGLANG: [&str; 2] = ["--enable-memory-saver", "--enable-weights-cpu-backup"];
    let needed: &[&str] = match api {
        "vllm" => &VLLM,
        "sglang" => &SGLANG,
        other => panic!("nothing can be asked of {other}"),
    };
    let mut config = config(api, &[needed, flags].concat());
    for variable in ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"] {
        config.env.insert(variable.to_owned(), "1".to_owned());
    }
    config
}

/// The folder of an adapter. The stand-in's answers under it depend on its rank.
pub fn adapter_folder(rank: u32) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let said = serde_json::json!({ "r": rank }).to_string();
    std::fs::write(folder.path().join("adapter_config.json"), said).unwrap();
    folder
}

/// A started engine.
pub async fn started(config: LauncherConfig) -> LauncherEngine {
    let engine = LauncherEngine::new(config);
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

/// A greedy request.
pub fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", prompt.to_vec());
    request.stop.max_tokens = Some(max_tokens);
    request.sampling.temperature = Some(0.0);
    request
}

/// Kills a process.
pub fn kill(pid: impl Display) {
    let mut kill = Command::new("kill");
    let killed = kill.args(["-KILL", &pid.to_string()]).status().unwrap();
    assert!(killed.success());
}

/// The result of a request.
#[derive(Debug)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
    pub text: String,
    pub end: Result<Finished, EngineError>,
}

impl Answer {
    pub fn finished(&self) -> &Finished {
        self.end.as_ref().unwrap()
    }

    pub fn error(&self) -> &EngineError {
        self.end.as_ref().unwrap_err()
    }
}

pub async fn answer(engine: &LauncherEngine, request: GenerateRequest) -> Answer {
    let outputs = engine.generate(request, RequestContext::new("r")).await;
    read(outputs.unwrap()).await
}

/// Reads up to the terminal.
pub async fn read(outputs: OutputStream) -> Answer {
    let whole = Whole::of(timeout(LONG, outputs.collect()).await.unwrap());
    let end = match whole.error() {
        Some(error) => Err(error.clone()),
        None => Ok(whole.finished().unwrap().clone()),
    };
    Answer {
        tokens: whole.tokens(),
        logprobs: whole.logprobs(),
        text: whole.text(),
        end,
    }
}

/// What a stand-in reports while it runs.
pub struct Reports {
    listener: TcpListener,
    lines: Option<Lines<BufReader<TcpStream>>>,
}

impl Reports {
    pub async fn listen() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self {
            listener,
            lines: None,
        }
    }

    /// The stand-in's flag.
    pub fn flag(&self) -> String {
        format!("--report={}", self.listener.local_addr().unwrap().port())
    }

    /// The next report with this name; skips others.
    pub async fn next(&mut self, name: &str) -> Value {
        let wanted = async {
            loop {
                let Some(lines) = &mut self.lines else {
                    let (stream, _) = self.listener.accept().await.unwrap();
                    self.lines = Some(BufReader::new(stream).lines());
                    continue;
                };
                match lines.next_line().await.unwrap_or(None) {
                    None => self.lines = None,
                    Some(line) => {
                        let mut report: Value = serde_json::from_str(&line).unwrap();
                        if let Some(value) = report.get_mut(name) {
                            return value.take();
                        }
                    }
                }
            }
        };
        timeout(LONG, wanted).await.unwrap()
    }
}
