//! [`Site`]: workers, router and server in this process.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::MetricsRegistry;
use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_frontend::text::TextTokenizer;
use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::{EndpointName, ModelFolder, Runtime, RuntimeRegistrar};

use crate::cut::{Cuts, Cutting};
use crate::engines::Fleet;
use crate::requests::Request;
use crate::support::{Exchange, soon, tiny_chat};

/// Instances of a site: an answer may break twice and still has an instance to migrate to.
const WORKERS: u64 = 3;

pub(crate) struct Site {
    runtime: Runtime,
    server: FrontendServer,
    workers: Vec<WorkerHandle>,
    cuts: Cuts,
    /// Migrations up to the last answer.
    moves: Cell<usize>,
}

pub(crate) fn folder() -> ModelFolder {
    ModelFolder::load(&tiny_chat()).expect("the test model is in the repository")
}

/// The tokens of a text of the test model.
pub(crate) fn encode(text: &str) -> Vec<u32> {
    let folder = folder();
    let mut artifacts = folder.artifacts.iter();
    let file = artifacts.find(|artifact| artifact.reference.name == "tokenizer.json");
    let tokenizer = TextTokenizer::from_bytes(&file.expect("a tokenizer").content);
    tokenizer.expect("it is valid").encode(text, false).unwrap()
}

impl Site {
    /// Starts the workers of `fleet`, and a server.
    pub(crate) async fn start(fleet: Fleet) -> Self {
        let runtime = Runtime::in_process();
        let cuts = Cuts::default();
        let mut worker_config = WorkerConfig {
            model_name: Some("tiny-chat".into()),
            artifacts: folder().artifacts,
            canary: CanaryConfig {
                interval: None,
                ..CanaryConfig::default()
            },
            ..WorkerConfig::default()
        };
        (fleet.config)(&mut worker_config);
        let mut workers = Vec::new();
        for id in 1..=WORKERS {
            let registrar = RuntimeRegistrar::new(runtime.clone(), EndpointName::default());
            let engine = Arc::new(Cutting::new((fleet.engine)(), Arc::clone(&cuts)));
            let config = worker_config.clone();
            let metrics = MetricsRegistry::default();
            let worker = Worker::new(id, engine, config, Arc::new(registrar), metrics).spawn();
            soon(worker.ready()).await.expect("the worker starts");
            workers.push(worker);
        }
        let config = FrontendConfig {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            access_log: false,
            ..FrontendConfig::default()
        };
        let server = FrontendServer::bind(&runtime, config).await;
        let server = server.expect("a port is free");
        soon(server.models().any()).await.expect("the model");
        Self {
            runtime,
            server,
            workers,
            cuts,
            moves: Cell::new(0),
        }
    }

    /// The answer to a request whose answers break at `cuts`, without the fields that differ in every answer.
    pub(crate) async fn ask(&self, request: &Request, cuts: &[u32]) -> Answer {
        *self.cuts.lock() = cuts.to_vec();
        let (path, body) = (request.api.path(), request.body.to_string());
        let exchange = Exchange::begin(self.server.address(), "POST", path, &body).await;
        let response = exchange.response().await;
        self.cuts.lock().clear();
        assert_eq!(response.status, 200, "{request:?}: {}", response.body);
        let mut lines: Vec<String> = response.body.lines().map(forget).collect();
        if request.choices() > 1 {
            // In a stream, the events of each choice are in order, but the choices interleave arbitrarily.
            lines.sort_by_key(|line| number(line, "index"));
        }
        let moves = self.moves();
        Answer {
            lines,
            moves: moves - self.moves.replace(moves),
        }
    }

    /// Migrations so far, of all requests.
    fn moves(&self) -> usize {
        let text = self.runtime.metrics().encode();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("genset_migrations_total"));
        lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok())
            .sum()
    }

    /// Shuts everything down; no request may be left.
    pub(crate) async fn close(self) {
        let kept = self.runtime.metrics().encode();
        assert!(kept.contains("genset_migration_kept_bytes 0\n"), "{kept}");
        soon(self.server.shutdown(Duration::from_secs(30))).await;
        for worker in self.workers {
            let report = soon(worker.shutdown()).await;
            assert!(report.error.is_none(), "{report:?}");
        }
        soon(self.runtime.shutdown()).await;
        assert_eq!(self.runtime.tasks(), 0);
    }
}

/// The parts of an answer that are equal in two runs.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) lines: Vec<String>,
    /// How often it migrated.
    pub(crate) moves: usize,
}

impl Answer {
    /// The number of generated tokens, from its usage.
    pub(crate) fn tokens(&self) -> u32 {
        let lines = self.lines.iter();
        let counts = lines
            .flat_map(|line| ["completion_tokens", "output_tokens"].map(|name| number(line, name)));
        counts.flatten().max().expect("a usage")
    }
}

/// The number in the first field with this name.
fn number(line: &str, name: &str) -> Option<u32> {
    let (_, value) = line.split_once(&format!("\"{name}\":"))?;
    value.split([',', '}']).next()?.parse().ok()
}

/// Fields that differ between runs: ids, times, and cache hits.
const FORGOTTEN: [&str; 9] = [
    "id",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "response_id",
    "call_id",
    "cached_tokens",
    "cache_read_input_tokens",
];

/// A line without the values of [`FORGOTTEN`], which are numbers and plain strings. The Messages API counts `input_tokens`
/// without cached tokens.
fn forget(line: &str) -> String {
    const END_OF_NAME: &str = "\":";
    let is_of_messages = line.contains("cache_read_input_tokens");
    let is_forgotten =
        |name: &str| FORGOTTEN.contains(&name) || (is_of_messages && name == "input_tokens");
    let mut kept = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once(END_OF_NAME) {
        kept.push_str(before);
        kept.push_str(END_OF_NAME);
        rest = after;
        if before.rsplit('"').next().is_some_and(is_forgotten) {
            kept.push('0');
            rest = &after[after.find([',', '}']).unwrap()..];
        }
    }
    kept + rest
}
