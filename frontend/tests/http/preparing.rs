//! Models that are being prepared, and those that cannot be.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::worker::{WorkerConfig, WorkerHandle};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, ModelCard, Output, RequestContext, async_trait,
};
use genset_frontend::FrontendServer;
use genset_runtime::plane::{Handler, ResponseStream};
use genset_runtime::{ArtifactRequest, EndpointName, InstanceId, Runtime, Serving, endpoints};
use serde_json::json;

use crate::batches::{batch_that, begin, ended, kept_in, line, lines};
use crate::client::{Client, post, request, soon};
use crate::script::Script;
use crate::support::{
    COMPLETIONS, MODEL, Site, TOKENIZER_FILE, completion, config, encode, eventually, named,
    start_worker, with_file, worker_config,
};

#[tokio::test]
async fn a_model_that_cannot_be_prepared_is_not_awaited_by_any_of_its_names() {
    let broken = WorkerConfig {
        aliases: vec!["gpt-4o".into()],
        ..with_file(worker_config(), TOKENIZER_FILE, "{")
    };
    let runtime = Runtime::in_process();
    let metrics = runtime.metrics().clone();
    let engine = Script::tokens(encode("one"));
    let worker = start_worker(&runtime, 1, engine, broken, metrics).await;
    let server = FrontendServer::bind(&runtime, config())
        .await
        .expect("a port");
    for name in [MODEL, "gpt-4o"] {
        let error = soon(server.models().named(name)).await.unwrap_err();
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
        let asked = completion("Hello", json!({"model": name})).to_string();
        let mut client = Client::connect(server.address()).await;
        client.send(post(COMPLETIONS, asked)).await;
        let (status, _, code, _) = client.response().await.refusal();
        assert_eq!((status, code.as_deref()), (404, Some("model_not_found")));
    }
    soon(server.shutdown(Duration::from_secs(30))).await;
    soon(worker.shutdown()).await;
    soon(runtime.shutdown()).await;
}

#[tokio::test]
async fn a_model_whose_inputs_are_all_unknown_cannot_be_prepared() {
    let site = Site::with(config(), Script::tokens(encode("one"))).await;
    let busy: Arc<dyn Handler<GenerateRequest, Output>> = Arc::new(Busy(AtomicUsize::new(0)));
    let endpoint = site.runtime.endpoint(EndpointName::default());
    let listed = endpoint.serve_as(InstanceId(2), busy).await.unwrap();
    let known = site.server.models().get(MODEL).expect("it is served");
    let mut card = ModelCard {
        name: "newer".into(),
        ..known.card.clone()
    };
    // Readers drop kinds of a newer version.
    card.capabilities.inputs.clear();
    listed.list(Some(card)).await.unwrap();
    let error = soon(site.server.models().named("newer")).await.unwrap_err();
    assert!(error.to_string().contains("inputs"), "{error}");
    drop(listed);
    site.close().await;
}

/// A worker that currently accepts no requests of any kind.
struct Busy(AtomicUsize);

impl Busy {
    fn refusal(&self) -> EngineError {
        self.0.fetch_add(1, Ordering::SeqCst);
        EngineError::new(ErrorKind::Overloaded, "come back later")
    }
}

#[async_trait]
impl Handler<ArtifactRequest, Bytes> for Busy {
    async fn handle(
        &self,
        _request: ArtifactRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        Err(self.refusal())
    }
}

#[async_trait]
impl Handler<GenerateRequest, Output> for Busy {
    async fn handle(
        &self,
        _request: GenerateRequest,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Output>, EngineError> {
        Err(self.refusal())
    }
}

/// Lists a worker of the model `busy` that returns no files. Waits for its second request for files: then the first failure is
/// known.
async fn list_busy(site: &Site) -> (Serving, Serving) {
    let busy = Arc::new(Busy(AtomicUsize::new(0)));
    let files: Arc<dyn Handler<ArtifactRequest, Bytes>> = busy.clone();
    let requests: Arc<dyn Handler<GenerateRequest, Output>> = busy.clone();
    let (endpoint, id) = (EndpointName::default(), InstanceId(2));
    let beside = endpoint.sibling(endpoints::ARTIFACTS).unwrap();
    let files = site.runtime.endpoint(beside).serve_as(id, files).await;
    let files = files.unwrap();
    files.list(None).await.unwrap();
    let known = site.server.models().get(MODEL).expect("it is served");
    let card = ModelCard {
        name: "busy".into(),
        ..known.card.clone()
    };
    let listed = site.runtime.endpoint(endpoint).serve_as(id, requests).await;
    let listed = listed.unwrap();
    listed.list(Some(card)).await.unwrap();
    eventually("it is asked twice", || busy.0.load(Ordering::SeqCst) >= 2).await;
    (files, listed)
}

/// Starts a worker of the model `busy` that is not busy.
async fn start_second(site: &Site) -> WorkerHandle {
    let engine = Script::tokens(encode("two"));
    site.join(3, engine, named("busy")).await
}

/// A server says that it has no place for a model, or that it does not know it, only if that is true.
#[tokio::test]
async fn a_model_is_waited_for_whose_worker_is_too_busy_to_give_its_files() {
    let mut waits_long = config();
    waits_long.router.migration.wait = Duration::from_secs(60);
    let site = Site::with(waits_long, Script::tokens(encode("one"))).await;
    let (files, listed) = list_busy(&site).await;
    let asked = completion("Hello", json!({"model": "busy"}));
    let headers = "x-request-timeout: 0.05\r\n";
    let hurried = request("POST", COMPLETIONS, headers, asked.to_string());
    let refused = site.send(hurried).await;
    assert_eq!(refused.header("retry-after"), Some("1"));
    let (status, _, code, message) = refused.refusal();
    assert_eq!((status, code), (503, None), "{message}");
    assert!(message.contains("No worker serves"), "{message}");

    let mut waiting = site.begin(COMPLETIONS, &asked).await;
    // Another worker of the model is not busy.
    let second = start_second(&site).await;
    assert_eq!(soon(waiting.response()).await.content(), "two");
    drop((files, listed));
    soon(second.shutdown()).await;
    site.close().await;
}

/// Starts a batch of a request to the model `busy` and one to another model.
async fn begin_behind_busy(site: &Site) -> String {
    let mut waits = line("a", "Hello");
    waits["body"]["model"] = "busy".into();
    begin(site, &lines(&[waits, line("b", "Hello")])).await
}

#[tokio::test]
async fn a_line_whose_model_is_being_prepared_holds_up_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut one_at_a_time = kept_in(folder.path(), |batches| {
        batches.concurrency = NonZeroUsize::MIN;
    });
    one_at_a_time.router.migration.wait = Duration::from_millis(1);
    let site = Site::with(one_at_a_time, Script::tokens(encode("one"))).await;
    let (files, listed) = list_busy(&site).await;
    let id = begin_behind_busy(&site).await;
    batch_that(&site, &id, |batch| {
        batch["request_counts"]["completed"] == 1
    })
    .await;
    let second = start_second(&site).await;
    let batch = ended(&site, &id, "completed").await;
    assert_eq!(batch["request_counts"]["completed"], 2);
    drop((files, listed));
    soon(second.shutdown()).await;
    site.close().await;
}

#[tokio::test]
async fn a_line_does_not_wait_for_a_model_that_goes_before_it_was_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = kept_in(folder.path(), |_| {});
    let site = Site::with(config, Script::tokens(encode("one"))).await;
    let (files, listed) = list_busy(&site).await;
    let id = begin_behind_busy(&site).await;
    batch_that(&site, &id, |batch| {
        batch["request_counts"]["completed"] == 1
    })
    .await;
    drop((files, listed));
    let batch = ended(&site, &id, "completed").await;
    assert_eq!(batch["request_counts"]["failed"], 1);
    site.close().await;
}
