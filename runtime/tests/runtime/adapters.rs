//! Adapters of workers: discovery is updated as they come and go, and a request goes to an instance with its adapter.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{WorkerConfig, WorkerHandle};
use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, ErrorKind, GenerateRequest, LLMEngine, OutputStream,
    RequestContext, RequestField, StartContext, async_trait,
    controls::{Adapter, ControlRequest},
    output::{self, Finish},
};
use genset_runtime::{GenerateClient, LiveModel, ModelDirectory, SelectionMode};
use parking_lot::Mutex;

use crate::support::{
    PATIENCE, ctx, finish, request, runtime, shut_down, soon, start, until, worker_config,
};

/// An engine with adapters, which records the adapters named in requests.
#[derive(Clone, Default)]
struct Adapted {
    loaded: Arc<Mutex<BTreeMap<String, Adapter>>>,
    asked: Arc<Mutex<Vec<Option<String>>>>,
}

#[async_trait]
impl LLMEngine for Adapted {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = EngineConfig::new("base", 100);
        config.capabilities.adapters = true;
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.asked.lock().push(request.adapter.clone());
        if let Some(name) = request.adapter
            && !self.loaded.lock().contains_key(&name)
        {
            let error = EngineError::not_found("it is not loaded");
            return Err(error.with_at(RequestField::Adapter));
        }
        Ok(output::stream(ctx, |out| async move {
            out.token(1).await?;
            Ok(Finish::length())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for Adapted {
    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        self.loaded.lock().insert(adapter.name.clone(), adapter);
        Ok(())
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.loaded.lock().remove(name);
        Ok(())
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        Ok(self.loaded.lock().values().cloned().collect())
    }
}

fn adapter(name: &str) -> Adapter {
    Adapter {
        name: name.into(),
        source: format!("adapters/{name}"),
    }
}

fn having(names: &[&str]) -> WorkerConfig {
    WorkerConfig {
        adapters: names.iter().map(|name| adapter(name)).collect(),
        ..worker_config(Vec::new())
    }
}

async fn load(worker: &WorkerHandle, name: &str) {
    let adapter = adapter(name);
    let load = ControlRequest::LoadAdapter { adapter };
    worker.control().control(load).await.unwrap();
}

async fn unload(worker: &WorkerHandle, name: &str) {
    let name = name.into();
    let unload = ControlRequest::UnloadAdapter { name };
    worker.control().control(unload).await.unwrap();
}

/// Waits until the model has exactly these adapters.
async fn model_with(directory: &ModelDirectory, names: &[&str]) -> LiveModel {
    let mut models = directory.subscribe();
    let has = |model: &LiveModel| model.adapters.keys().eq(names);
    let there = models.wait_for(|models| models.get("base").is_some_and(has));
    soon(there).await.unwrap().get("base").unwrap().clone()
}

/// Two workers with these adapters, their engines, and a client of both.
async fn two(adapters: [&str; 2]) -> ([WorkerHandle; 2], [Adapted; 2], GenerateClient) {
    let (runtime, _) = runtime();
    let directory = ModelDirectory::follow(&runtime);
    let engines = [Adapted::default(), Adapted::default()];
    let engine = |index: usize| Arc::new(engines[index].clone());
    let workers = [
        start(&runtime, 1, engine(0), having(&adapters[..1])).await,
        start(&runtime, 2, engine(1), having(&adapters[1..])).await,
    ];
    let names = BTreeSet::from(adapters);
    let model = model_with(&directory, &names.into_iter().collect::<Vec<_>>()).await;
    let client = client_of(&directory, &model).await;
    until(|| client.instances().len() == 2).await;
    (workers, engines, client)
}

async fn client_of(directory: &ModelDirectory, model: &LiveModel) -> GenerateClient {
    let client = directory.client(model, SelectionMode::RoundRobin, PATIENCE);
    client.await.unwrap()
}

fn naming(adapter: &str) -> GenerateRequest {
    let mut request = request(1);
    request.adapter = Some(adapter.into());
    request
}

#[tokio::test]
async fn discovery_is_told_of_adapters_as_they_come_and_go() {
    let (runtime, discovery) = runtime();
    let directory = ModelDirectory::follow(&runtime);
    let worker = start(&runtime, 1, Arc::new(Adapted::default()), having(&["a"])).await;
    let model = model_with(&directory, &["a"]).await;
    assert_eq!(model.adapters["a"], adapter("a"));
    load(&worker, "b").await;
    model_with(&directory, &["a", "b"]).await;
    unload(&worker, "a").await;
    model_with(&directory, &["b"]).await;
    // Listed again, it shows its current adapters.
    discovery.expire_leases();
    load(&worker, "c").await;
    model_with(&directory, &["b", "c"]).await;
    soon(worker.shutdown()).await;
    until(|| directory.subscribe().borrow().is_empty()).await;
    drop(directory);
    soon(runtime.shutdown()).await;
    assert_eq!(runtime.tasks(), 0);
}

#[tokio::test]
async fn a_request_goes_to_who_has_its_adapter() {
    let ([first, second], engines, client) = two(["a", "b"]).await;
    for engine in &engines {
        engine.asked.lock().clear();
    }
    for _ in 0..3 {
        for name in ["a", "b"] {
            let outputs = client.generate(naming(name), ctx()).await.unwrap();
            finish(outputs).await.unwrap();
        }
    }
    let [of_first, of_second] = engines.each_ref().map(|engine| engine.asked.lock().clone());
    assert_eq!(of_first, vec![Some("a".into()); 3]);
    assert_eq!(of_second, vec![Some("b".into()); 3]);
    let error = client.generate(naming("c"), ctx()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.at().map(|at| at.name()), Some("adapter"));
    // A connected client finds an adapter that is loaded later.
    load(&second, "a").await;
    unload(&first, "a").await;
    until(|| {
        let instances = client.instances();
        let has = |place: usize| instances[place].card.as_ref().unwrap().has_adapter("a");
        !has(0) && has(1)
    })
    .await;
    let outputs = client.generate(naming("a"), ctx()).await.unwrap();
    finish(outputs).await.unwrap();
    assert_eq!(engines[1].asked.lock().last(), Some(&Some("a".into())));
    shut_down([first, second]).await;
}

#[tokio::test]
async fn who_has_just_lost_an_adapter_leaves_its_requests_to_another() {
    let (workers, engines, client) = two(["a", "a"]).await;
    // Both records still list it.
    engines[0].loaded.lock().clear();
    for _ in 0..2 {
        let outputs = client.generate(naming("a"), ctx()).await.unwrap();
        finish(outputs).await.unwrap();
    }
    engines[1].loaded.lock().clear();
    let error = client.generate(naming("a"), ctx()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.at().map(|at| at.name()), Some("adapter"));
    shut_down(workers).await;
}

#[tokio::test]
async fn where_no_instance_is_left_nobody_says_that_an_adapter_is_unknown() {
    let (runtime, _) = runtime();
    let directory = ModelDirectory::follow(&runtime);
    let worker = start(&runtime, 1, Arc::new(Adapted::default()), having(&["a"])).await;
    let model = model_with(&directory, &["a"]).await;
    let client = client_of(&directory, &model).await;
    soon(worker.shutdown()).await;
    until(|| client.instances().is_empty()).await;
    let error = client.generate(naming("a"), ctx()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}
