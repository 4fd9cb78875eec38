//! The engine behind a Worker: its probe, and how its faults reach a client.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;
#[path = "../../../backend-common/tests/door/mod.rs"]
mod door;

use std::sync::Arc;

use common::{Answer, read, script};
use door::{Door, Served};
use genset_backend_common::context::CancelReason;
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, MetricsRegistry, OutputStream, RequestContext,
};
use genset_engine_scripted::ScriptedEngine;

/// A Worker that serves a script, and the interface for requests to it.
struct Site {
    generate: Arc<dyn Generate>,
    worker: WorkerHandle,
    metrics: MetricsRegistry,
}

impl Site {
    async fn start(replies: &str) -> Self {
        let engine = Arc::new(ScriptedEngine::from_script(script(replies)));
        let served = Served::new(None);
        let config = WorkerConfig {
            canary: CanaryConfig {
                interval: None,
                ..CanaryConfig::default()
            },
            ..WorkerConfig::default()
        };
        let metrics = MetricsRegistry::default();
        let door = Arc::new(Door(served.clone()));
        let worker = Worker::new(1, engine, config, door, metrics.clone()).spawn();
        worker.ready().await.unwrap();
        let generate = served.borrow().clone().unwrap();
        Self {
            generate,
            worker,
            metrics,
        }
    }

    async fn generate(&self, text: &str) -> Result<OutputStream, EngineError> {
        let request = GenerateRequest::from_text("m", text);
        let ctx = RequestContext::new("r");
        self.generate.generate(request, ctx).await
    }

    async fn say(&self, text: &str) -> Answer {
        read(self.generate(text).await.unwrap()).await
    }

    /// How often each rule of the contract was broken; rules without a violation are left out.
    fn violations(&self) -> Vec<String> {
        let text = self.metrics.encode();
        let lines = text.lines().filter(|line| {
            line.starts_with("genset_worker_contract_violations_total{") && !line.ends_with(" 0")
        });
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

const FAULTS: &str = r#"
    [[reply]]
    match.exact = "refuse"
    fault = { action = "refuse", kind = "not_found" }

    [[reply]]
    match.exact = "panic"
    text = "a b"
    fault = { action = "panic", after_chunks = 1 }

    [[reply]]
    match.exact = "vanish"
    text = "a b"
    fault = { action = "vanish", after_chunks = 1 }

    [[reply]]
    match.exact = "fine"
    text = "a b"
"#;

/// No reply matches the Worker's "ping" prompt.
#[tokio::test]
async fn a_worker_serves_a_script_without_a_default() {
    let site = Site::start(FAULTS).await;
    assert_eq!(site.say("fine").await.text(), "a b");
    assert_eq!(site.violations(), Vec::<String>::new());
    assert_eq!(site.worker.shutdown().await.outcome.exit_code(), 0);
}

#[tokio::test]
async fn faults_reach_a_client_as_typed_errors() {
    let site = Site::start(FAULTS).await;
    let refused = site.generate("refuse").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NotFound);
    let unmatched = site.generate("something else").await.unwrap_err();
    assert_eq!(unmatched.kind(), ErrorKind::InvalidArgument);
    assert_eq!(site.violations(), Vec::<String>::new());

    let panicked = site.say("panic").await;
    assert_eq!(panicked.text(), "a");
    assert_eq!(panicked.end.unwrap_err().kind(), ErrorKind::Internal);
    let vanished = site.say("vanish").await;
    assert_eq!(vanished.text(), "a");
    assert_eq!(
        vanished.end.unwrap_err().kind(),
        ErrorKind::StreamIncomplete
    );

    let [vanish, panic] = &site.violations()[..] else {
        panic!("{:?}", site.violations())
    };
    assert!(
        vanish.contains("rule=\"ended_without_terminal\"") && vanish.ends_with(" 1"),
        "{vanish}"
    );
    assert!(
        panic.contains("rule=\"panic\"") && panic.ends_with(" 1"),
        "{panic}"
    );
    assert_eq!(site.say("fine").await.text(), "a b");
    assert_eq!(site.worker.shutdown().await.outcome.exit_code(), 0);
}

#[tokio::test]
async fn the_prompt_of_a_cancelled_request_is_counted() {
    let site = Site::start(FAULTS).await;
    let ctx = RequestContext::new("r");
    let request = GenerateRequest::from_text("m", "fine");
    let outputs = site.generate.generate(request, ctx.clone()).await.unwrap();
    ctx.cancel(CancelReason::Client);
    let answer = read(outputs).await;
    assert_eq!(answer.finished().usage.prompt_tokens, 1);
    assert_eq!(site.worker.shutdown().await.outcome.exit_code(), 0);
}
