//! LoRA adapters as models: listed with their base model, and named to the engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use genset_backend_common::worker::{WorkerConfig, WorkerHandle};
use genset_backend_common::{
    EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, OutputStream,
    RequestContext, StartContext, async_trait,
    controls::{Adapter, ControlRequest},
};
use genset_frontend::FrontendConfig;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::client::{request, soon};
use crate::messages::{VERSION, error};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, encode, eventually, named,
    worker_config,
};

/// A scripted engine with adapters, which have no effect.
struct Adapted {
    script: Arc<Script>,
    loaded: Mutex<BTreeMap<String, Adapter>>,
}

impl Adapted {
    fn new() -> Arc<Self> {
        let script = Script::tokens(encode("one"));
        Arc::new(Self {
            script: script.declaring(|can| can.adapters = true),
            loaded: Mutex::default(),
        })
    }

    /// The adapters named by its requests.
    fn named(&self) -> Vec<Option<String>> {
        let requests = self.script.requests();
        requests.into_iter().map(|it| it.adapter).collect()
    }
}

#[async_trait]
impl LLMEngine for Adapted {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.script.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.script.generate(request, ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.script.cleanup().await
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
        source: format!("/adapters/{name}"),
    }
}

fn having(names: &[&str]) -> WorkerConfig {
    WorkerConfig {
        adapters: names.iter().map(|name| adapter(name)).collect(),
        ..worker_config()
    }
}

async fn control(worker: &WorkerHandle, request: ControlRequest) {
    worker.control().control(request).await.unwrap();
}

/// The list's entry for each model: name, root and parent.
async fn listed(site: &Site) -> Vec<(String, Value, Value)> {
    let list = site.get("/v1/models").await.json();
    let models = list["data"].as_array().unwrap().iter();
    models
        .map(|model| {
            let id = model["id"].as_str().unwrap().to_owned();
            (id, model["root"].clone(), model["parent"].clone())
        })
        .collect()
}

#[tokio::test]
async fn an_adapter_is_a_model_whose_requests_name_it_to_the_engine() {
    let engine = Adapted::new();
    let site = Site::with_worker(config(), having(&["french", "org/poems"]), engine.clone()).await;
    site.serves("french", true).await;
    assert_eq!(
        listed(&site).await,
        [
            ("french".into(), json!("/adapters/french"), json!(MODEL)),
            (
                "org/poems".into(),
                json!("/adapters/org/poems"),
                json!(MODEL)
            ),
            (MODEL.into(), json!(MODEL), Value::Null),
        ]
    );
    let one = site.get("/v1/models/org/poems").await.json();
    assert_eq!(
        (&one["parent"], &one["max_model_len"]),
        (&json!(MODEL), &json!(2048))
    );
    for (name, adapter) in [
        ("french", Some("french")),
        ("org/poems", Some("org/poems")),
        (MODEL, None),
    ] {
        let asked = engine.named().len();
        let response = site
            .post(CHAT, &chat("Hello", json!({"model": name})))
            .await;
        assert_eq!((response.status, response.content()), (200, "one".into()));
        assert_eq!(response.json()["model"], name);
        let body = completion("Hello", json!({"model": name}));
        assert_eq!(site.post(COMPLETIONS, &body).await.status, 200);
        let named = engine.named();
        assert_eq!(
            named[asked..],
            [adapter, adapter].map(|it| it.map(str::to_owned))
        );
    }
    site.close().await;
}

/// Their clients read the list page by page.
#[tokio::test]
async fn anthropics_clients_get_models_in_their_format() {
    let worker = having(&["french", "org/poems"]);
    let site = Site::with_worker(config(), worker, Adapted::new()).await;
    site.serves("french", true).await;
    let get = async |path: &str| site.send(request("GET", path, VERSION, "")).await;
    for (query, ids, has_more) in [
        ("", json!(["french", "org/poems", MODEL]), false),
        ("?limit=2&beta=true", json!(["french", "org/poems"]), true),
        ("?limit=2&after_id=org%2Fpoems", json!([MODEL]), false),
        ("?limit=1&before_id=tiny", json!(["org/poems"]), true),
    ] {
        let list = get(&format!("/v1/models{query}")).await.json();
        let models = list["data"].as_array().expect("a list").iter();
        let found: Value = models.map(|model| model["id"].clone()).collect();
        assert_eq!((found, &list["has_more"]), (ids, &json!(has_more)));
    }
    let mut model = get("/v1/models/org%2Fpoems").await.json();
    let created = model["created_at"].take();
    assert!(created.as_str().is_some_and(|time| time.ends_with('Z')));
    let expected = json!({
        "type": "model", "id": "org/poems", "display_name": "org/poems", "created_at": null,
        "lifecycle": "active", "max_input_tokens": 2048,
    });
    assert_eq!(model, expected);
    for (path, status, kind, names) in [
        ("/v1/models/nobody", 404, "not_found_error", "'nobody'"),
        ("/v1/models/%ff", 400, "invalid_request_error", "UTF-8"),
        (
            "/v1/models?limit=0",
            400,
            "invalid_request_error",
            "'limit'",
        ),
    ] {
        let (got, got_kind, message) = error(&get(path).await);
        assert_eq!((got, got_kind.as_str()), (status, kind), "{message}");
        assert!(message.contains(names), "{message}");
    }
    site.close().await;
}

#[tokio::test]
async fn adapters_come_and_go_while_the_server_runs() {
    let engine = Adapted::new();
    let site = Site::with_worker(config(), worker_config(), engine.clone()).await;
    let ask = async |name: &str| {
        let body = completion("Hello", json!({"model": name}));
        site.post(COMPLETIONS, &body).await.status
    };
    assert_eq!(ask("french").await, 404);
    let base = site.server.models().get(MODEL).unwrap();
    let adapter = adapter("french");
    control(&site.worker, ControlRequest::LoadAdapter { adapter }).await;
    site.serves("french", true).await;
    assert_eq!(ask("french").await, 200);
    let name = "french".to_owned();
    control(&site.worker, ControlRequest::UnloadAdapter { name }).await;
    site.serves("french", false).await;
    // It was unloaded on purpose, so the server does not wait for it.
    assert_eq!(ask("french").await, 404);
    assert_eq!(ask(MODEL).await, 200);
    let now = site.server.models().get(MODEL).unwrap();
    assert!(Arc::ptr_eq(&base, &now), "the model was prepared again");
    site.close().await;
}

#[tokio::test]
async fn a_request_reaches_a_worker_that_has_its_adapter() {
    let engines = [Adapted::new(), Adapted::new()];
    let site = Site::with_worker(config(), having(&["a"]), engines[0].clone()).await;
    let second = site.join(2, engines[1].clone(), having(&["b"])).await;
    site.serves("b", true).await;
    for _ in 0..4 {
        for name in ["a", "b"] {
            let body = completion("Hello", json!({"model": name}));
            assert_eq!(site.post(COMPLETIONS, &body).await.status, 200);
        }
    }
    for (engine, name) in engines.iter().zip(["a", "b"]) {
        assert_eq!(engine.named(), vec![Some(name.to_owned()); 4]);
    }
    soon(second.shutdown()).await;
    site.serves("b", false).await;
    site.serves("a", true).await;
    site.close().await;
}

#[tokio::test]
async fn an_adapter_yields_to_a_model_of_its_name() {
    let engine = Adapted::new();
    let site = Site::with_worker(config(), having(&["other"]), engine.clone()).await;
    site.serves("other", true).await;
    let script = Script::tokens(encode("two"));
    let second = site.join(2, script, named("other")).await;
    let is_a_model = || {
        let model = site.server.models().get("other");
        model.is_some_and(|model| model.adapter.is_none())
    };
    eventually("the model takes the name", is_a_model).await;
    let body = completion("Hello", json!({"model": "other"}));
    assert_eq!(site.post(COMPLETIONS, &body).await.content(), "two");
    soon(second.shutdown()).await;
    eventually("the adapter has it again", || {
        let model = site.server.models().get("other");
        model.is_some_and(|model| model.adapter.is_some())
    })
    .await;
    site.close().await;
}

/// Only those who run the server see the path of its files.
#[tokio::test]
async fn others_are_not_told_where_an_adapter_lies() {
    let config = FrontendConfig {
        address: "0.0.0.0:0".parse().unwrap(),
        ..config()
    };
    let site = Site::with_worker(config, having(&["french"]), Adapted::new()).await;
    site.serves("french", true).await;
    let french = listed(&site).await.remove(0);
    assert_eq!(french, ("french".into(), json!("french"), json!(MODEL)));
    site.close().await;
}
