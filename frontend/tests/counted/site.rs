//! A server with one Worker in this process, for test programs whose allocator counts.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use genset_backend_common::LLMEngine;
use genset_backend_common::worker::{CanaryConfig, Worker, WorkerConfig, WorkerHandle};
use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::{EndpointName, ModelFolder, Runtime, RuntimeRegistrar};

/// The test model's files.
pub(crate) fn folder() -> &'static ModelFolder {
    static FOLDER: OnceLock<ModelFolder> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-chat");
        ModelFolder::load(Path::new(path)).unwrap()
    })
}

pub(crate) struct Site {
    pub(crate) runtime: Runtime,
    pub(crate) server: FrontendServer,
    worker: WorkerHandle,
}

impl Site {
    /// Starts `engine` as the model `tiny`, and its server on any port.
    pub(crate) async fn start(engine: Arc<dyn LLMEngine>, config: FrontendConfig) -> Self {
        let runtime = Runtime::in_process();
        let of_worker = WorkerConfig {
            model_name: Some("tiny".into()),
            artifacts: folder().artifacts.clone(),
            grace: Duration::ZERO,
            canary: CanaryConfig {
                interval: None,
                ..CanaryConfig::default()
            },
            ..WorkerConfig::default()
        };
        let registrar = RuntimeRegistrar::new(runtime.clone(), EndpointName::default());
        let metrics = runtime.metrics().clone();
        let worker = Worker::new(1, engine, of_worker, Arc::new(registrar), metrics).spawn();
        worker.ready().await.unwrap();
        let config = FrontendConfig {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            ..config
        };
        let server = FrontendServer::bind(&runtime, config).await.unwrap();
        server.models().any().await.unwrap();
        Self {
            runtime,
            server,
            worker,
        }
    }

    pub(crate) async fn close(self) {
        self.server.shutdown(Duration::ZERO).await;
        self.worker.shutdown().await;
        self.runtime.shutdown().await;
    }
}
