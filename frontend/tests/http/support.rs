//! The harness: a runtime, Workers and a server in this process.

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_backend_common::{LLMEngine, MetricsRegistry, card::Artifact};
use genset_engine_echo::{EchoArgs, EchoCore, EchoFull};
use genset_frontend::text::TextTokenizer;
use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::{EndpointName, ModelFolder, Runtime, RuntimeRegistrar};
use serde_json::{Value, json};

use crate::client::{Client, Response, get, post, soon};

/// The model's name in every test.
pub(crate) const MODEL: &str = "tiny";

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

pub(crate) const TOKENIZER_FILE: &str = "tokenizer.json";

/// A text of a model with reasoning and tool calls: a thought, content and two calls.
pub(crate) const CALLS: &str = "<think>\nI need the weather.\n</think>\n\nI look.\n\
    <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

/// The context of the test model, in tokens.
pub(crate) const CONTEXT: u32 = 2048;

/// The test model's files.
pub(crate) fn folder() -> &'static ModelFolder {
    static FOLDER: OnceLock<ModelFolder> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-chat");
        ModelFolder::load(Path::new(path)).expect("the test model is in the repository")
    })
}

/// The content of the test model's file `name`.
pub(crate) fn file(name: &str) -> &'static [u8] {
    let mut artifacts = folder().artifacts.iter();
    let file = artifacts.find(|artifact| artifact.reference.name == name);
    &file.expect("the model has the file").content
}

/// The same, as JSON.
pub(crate) fn json_file(name: &str) -> Value {
    serde_json::from_slice(file(name)).expect("the file is JSON")
}

/// The test model's tokenizer.
pub(crate) fn tokenizer() -> &'static TextTokenizer {
    static TOKENIZER: OnceLock<TextTokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| TextTokenizer::from_bytes(file(TOKENIZER_FILE)).expect("it is valid"))
}

/// Tokens of `text`.
pub(crate) fn encode(text: &str) -> Vec<u32> {
    tokenizer().encode(text, false).expect("text has tokens")
}

/// The echo engine on tokens, without pauses.
pub(crate) fn echo() -> Arc<dyn LLMEngine> {
    let args = EchoArgs {
        token_echo_delay_ms: 0,
    };
    Arc::new(EchoCore::from_args(&args, 2048, CONTEXT))
}

/// The echo engine on text, without pauses.
pub(crate) fn echo_text() -> Arc<dyn LLMEngine> {
    let args = EchoArgs {
        token_echo_delay_ms: 0,
    };
    Arc::new(EchoFull::from_args(&args))
}

/// A config for tests: any port, and limits that no test reaches unless it lowers them.
pub(crate) fn config() -> FrontendConfig {
    FrontendConfig {
        address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        max_connections_per_peer: NonZeroUsize::MAX,
        ..FrontendConfig::default()
    }
}

/// The config of a Worker of the test model, without the parsers that the template shows.
pub(crate) fn worker_config() -> WorkerConfig {
    WorkerConfig {
        model_name: Some(MODEL.into()),
        tool_parser: Some("none".into()),
        reasoning_parser: Some("none".into()),
        artifacts: folder().artifacts.clone(),
        grace: Duration::from_secs(30),
        canary: CanaryConfig {
            interval: None,
            ..CanaryConfig::default()
        },
        ..WorkerConfig::default()
    }
}

/// The same, for a model of another name.
pub(crate) fn named(name: &str) -> WorkerConfig {
    WorkerConfig {
        model_name: Some(name.into()),
        ..worker_config()
    }
}

/// The same, for a model whose card names these parsers.
pub(crate) fn parsing(tool: &str, reasoning: &str) -> WorkerConfig {
    WorkerConfig {
        tool_parser: Some(tool.into()),
        reasoning_parser: Some(reasoning.into()),
        ..worker_config()
    }
}

/// The same, for a model with reasoning and tool calls.
pub(crate) fn thinking_and_calling() -> WorkerConfig {
    parsing("hermes", "qwen3")
}

/// The Worker with this file of its model, in place of an earlier one of that name.
pub(crate) fn with_file(
    mut worker: WorkerConfig,
    name: &str,
    content: impl Into<Vec<u8>>,
) -> WorkerConfig {
    let artifacts = &mut worker.artifacts;
    artifacts.retain(|artifact| artifact.reference.name != name);
    artifacts.push(Artifact::new(name, content.into()));
    worker
}

/// The Worker with this chat template.
pub(crate) fn with_template(worker: WorkerConfig, template: &str) -> WorkerConfig {
    with_file(worker, "chat_template.jinja", template)
}

/// A Worker whose tokenizer puts `<|im_end|>` between two texts; the second text's tokens have type 1.
pub(crate) fn pairs_worker_config() -> WorkerConfig {
    let mut json = json_file(TOKENIZER_FILE);
    let between = "<|im_end|>";
    let id = tokenizer().token_id(between).expect("it is there");
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": between, "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {between: {"id": between, "ids": [id], "tokens": [between]}},
    });
    with_file(worker_config(), TOKENIZER_FILE, json.to_string())
}

/// Starts a Worker of `runtime` and waits until it serves.
pub(crate) async fn start_worker(
    runtime: &Runtime,
    id: u64,
    engine: Arc<dyn LLMEngine>,
    config: WorkerConfig,
    metrics: MetricsRegistry,
) -> WorkerHandle {
    let registrar = Arc::new(RuntimeRegistrar::new(
        runtime.clone(),
        EndpointName::default(),
    ));
    let worker = Worker::new(id, engine, config, registrar, metrics).spawn();
    soon(worker.ready()).await.expect("the worker starts");
    worker
}

/// A chat of one user message, with further fields.
pub(crate) fn chat(text: &str, further: Value) -> Value {
    let messages = json!([{"role": "user", "content": text}]);
    with(json!({"model": MODEL, "messages": messages}), further)
}

/// A completion request, with further fields.
pub(crate) fn completion(prompt: impl Into<Value>, further: Value) -> Value {
    with(json!({"model": MODEL, "prompt": prompt.into()}), further)
}

/// An object with further fields.
pub(crate) fn with(mut body: Value, further: Value) -> Value {
    let (Value::Object(fields), Value::Object(further)) = (&mut body, further) else {
        panic!("further fields are an object")
    };
    fields.extend(further);
    body
}

/// A server, its runtime and its Worker.
pub(crate) struct Site {
    pub(crate) runtime: Runtime,
    pub(crate) server: FrontendServer,
    pub(crate) worker: WorkerHandle,
}

impl Site {
    /// A server with one Worker of `engine`, both ready.
    pub(crate) async fn start(engine: Arc<dyn LLMEngine>) -> Self {
        Self::with(config(), engine).await
    }

    /// Like [`Self::start`], with a config.
    pub(crate) async fn with(config: FrontendConfig, engine: Arc<dyn LLMEngine>) -> Self {
        Self::with_worker(config, worker_config(), engine).await
    }

    /// Like [`Self::with`], with a config for the Worker too.
    pub(crate) async fn with_worker(
        config: FrontendConfig,
        worker: WorkerConfig,
        engine: Arc<dyn LLMEngine>,
    ) -> Self {
        let runtime = Runtime::in_process();
        let metrics = runtime.metrics().clone();
        let worker = start_worker(&runtime, 1, engine, worker, metrics).await;
        let server = FrontendServer::bind(&runtime, config)
            .await
            .expect("a port is free");
        soon(server.models().any())
            .await
            .expect("the model gets ready");
        Self {
            runtime,
            server,
            worker,
        }
    }

    /// A server with one Worker of `engine`, whose model has reasoning and tool calls.
    pub(crate) async fn thinking_and_calling(engine: Arc<dyn LLMEngine>) -> Self {
        Self::with_worker(config(), thinking_and_calling(), engine).await
    }

    /// Starts another Worker, with metrics of its own.
    pub(crate) async fn join(
        &self,
        id: u64,
        engine: Arc<dyn LLMEngine>,
        config: WorkerConfig,
    ) -> WorkerHandle {
        let metrics = MetricsRegistry::default();
        start_worker(&self.runtime, id, engine, config, metrics).await
    }

    /// Stops the Worker, and starts another one in its place.
    pub(crate) async fn replace_worker(
        &mut self,
        id: u64,
        engine: Arc<dyn LLMEngine>,
        config: WorkerConfig,
    ) {
        self.worker.stop_once();
        soon(self.worker.stopped()).await;
        self.worker = self.join(id, engine, config).await;
    }

    /// Waits until the model `name` is served, or is not.
    pub(crate) async fn serves(&self, name: &str, is_wanted: bool) {
        eventually("it is served, or is not", || {
            self.server.models().get(name).is_some() == is_wanted
        })
        .await;
    }

    pub(crate) async fn connect(&self) -> Client {
        Client::connect(self.server.address()).await
    }

    /// Sends `bytes` on their own connection. Returns the answer.
    pub(crate) async fn send(&self, bytes: impl AsRef<[u8]>) -> Response {
        let mut client = self.connect().await;
        client.send(bytes).await;
        client.response().await
    }

    /// Sends a request on its own connection. The answer is still to be read.
    pub(crate) async fn begin(&self, path: &str, body: &Value) -> Client {
        let mut client = self.connect().await;
        client.send(post(path, body.to_string())).await;
        client
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.send(get(path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.send(post(path, body.to_string())).await
    }

    /// Returns the answers to a request, whole and streamed.
    pub(crate) async fn whole_and_streamed(&self, path: &str, mut body: Value) -> [Response; 2] {
        let whole = self.post(path, &body).await;
        assert_eq!(whole.status, 200, "{}", whole.text());
        body["stream"] = true.into();
        [whole, self.post(path, &body).await]
    }

    /// Checks that a good request, on its own connection, is served.
    pub(crate) async fn is_well(&self) {
        let response = self
            .post(CHAT, &chat("Hello", json!({"max_tokens": 4})))
            .await;
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(self.get("/health").await.status, 200);
    }

    /// Checks that each path refuses invalid bodies. The body limit must be 1,000 bytes.
    pub(crate) async fn refuses_what_is_no_request(&self, paths: &[&str]) {
        let deep = "[".repeat(900);
        let large = "x".repeat(1001);
        for path in paths {
            for (status, body) in [
                (400, ""),
                (400, "{"),
                (400, "[]"),
                (400, "\u{0}"),
                (400, deep.as_str()),
                (413, large.as_str()),
            ] {
                let response = self.send(post(path, body)).await;
                assert_eq!(response.status, status, "{path} {}", response.text());
                let message = &response.json()["error"]["message"];
                assert!(message.is_string(), "{path} {}", response.text());
            }
        }
    }

    /// The value of a metric; `name` includes its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.runtime.metrics().encode();
        metric(&text, name).unwrap_or_else(|| panic!("no metric {name} in {text}"))
    }

    /// Waits until the engine and the server hold no request.
    pub(crate) async fn idle(&self) {
        eventually("no request is held", || {
            self.metric("genset_worker_running_requests") == 0.0
                && self.metric("genset_http_requests_in_flight") == 0.0
        })
        .await;
    }

    /// Shuts everything down at once; requests in progress are aborted.
    pub(crate) async fn abort(self) {
        soon(self.server.shutdown(Duration::ZERO)).await;
        soon(self.worker.shutdown()).await;
        soon(self.runtime.shutdown()).await;
    }

    /// Shuts everything down; nothing may be left.
    pub(crate) async fn close(self) {
        soon(self.server.shutdown(Duration::from_secs(30))).await;
        let report = soon(self.worker.shutdown()).await;
        assert!(report.error.is_none(), "{report:?}");
        soon(self.runtime.shutdown()).await;
        assert_eq!(self.runtime.tasks(), 0);
    }
}

/// The value of a metric in the text of `/metrics`, if it is there; `name` includes its labels.
pub(crate) fn metric<T: FromStr<Err: Debug>>(text: &str, name: &str) -> Option<T> {
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map(|value| value.parse().expect("a number"))
}

/// Waits until `is_so`; fails if that never happens.
pub(crate) async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..12_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn the_harness_serves_and_leaves_nothing_behind() {
    let site = Site::start(echo()).await;
    site.is_well().await;
    site.idle().await;
    site.close().await;
}
