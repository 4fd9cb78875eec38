//! Batches whose models are not served yet, or no longer.

use std::num::NonZeroUsize;
use std::time::Duration;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, ErrorKind};
use genset_frontend::batch::BATCH_URLS;
use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::Runtime;
use serde_json::{Value, json};

use crate::batches::{batch_that, begin, begin_to, content, ended, kept_in, line, lines};
use crate::client::soon;
use crate::script::Script;
use crate::support::{
    CHAT, MODEL, Site, chat, echo, encode, eventually, start_worker, worker_config,
};
use crate::whole_bodies::reader;

#[tokio::test]
async fn a_batch_waits_for_its_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = Runtime::in_process();
    let config = FrontendConfig {
        model_linger: Duration::from_secs(3600),
        ..kept_in(folder.path(), |_| {})
    };
    let server = FrontendServer::bind(&runtime, config)
        .await
        .expect("a port");
    let worker = start_worker(
        &runtime,
        1,
        echo(),
        worker_config(),
        runtime.metrics().clone(),
    )
    .await;
    soon(server.models().any()).await.expect("a model");
    soon(worker.shutdown()).await;
    let worker = start_worker(
        &runtime,
        2,
        Script::silent(5),
        worker_config(),
        Default::default(),
    )
    .await;
    let mut site = Site {
        runtime,
        server,
        worker,
    };
    let id = begin(&site, &lines(&[line("a", "Hello")])).await;
    // It is called, its worker leaves, and another joins.
    batch_that(&site, &id, |batch| batch["status"] == "in_progress").await;
    soon(site.worker.shutdown()).await;
    let metrics = Default::default();
    site.worker = start_worker(&site.runtime, 3, echo(), worker_config(), metrics).await;
    let batch = ended(&site, &id, "completed").await;
    assert_eq!(
        batch["request_counts"],
        json!({"total": 1, "completed": 1, "failed": 0})
    );
    site.server.shutdown(Duration::from_secs(30)).await;
    soon(site.worker.shutdown()).await;
    soon(site.runtime.shutdown()).await;
}

/// Returns how many chats got this status.
fn count_of_chats(runtime: &Runtime, status: u16) -> u64 {
    let labels = format!("{{endpoint=\"chat_completions\",status=\"{status}\"}} ");
    let metrics = runtime.metrics().encode();
    let mut lines = metrics.lines();
    let count = lines.find_map(|line| {
        let line = line.strip_prefix("genset_http_requests_total")?;
        line.strip_prefix(labels.as_str())
    });
    count.map_or(0, |count| count.parse().expect("a count"))
}

#[tokio::test]
async fn a_batch_waits_for_a_model_that_is_away_for_longer_than_it_lingers() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = FrontendConfig {
        model_linger: Duration::ZERO,
        ..kept_in(folder.path(), |_| {})
    };
    let full = Script::tokens(encode("Hi"));
    full.refuse(Some(EngineError::new(ErrorKind::Overloaded, "it is full")));
    let mut site = Site::with(config, full).await;
    let mut unknown = line("b", "Hello");
    unknown["body"]["model"] = "nobody".into();
    let id = begin(&site, &lines(&[line("a", "Hello"), unknown])).await;
    let answered = |status| count_of_chats(&site.runtime, status);
    eventually("the model is asked", || answered(429) > 0).await;
    // The batch does not wait for a model that was never served.
    batch_that(&site, &id, |batch| batch["request_counts"]["failed"] == 1).await;
    let before = answered(404);
    soon(site.worker.shutdown()).await;
    eventually("the model is not there", || answered(404) > before).await;
    let metrics = Default::default();
    site.worker = start_worker(&site.runtime, 2, echo(), worker_config(), metrics).await;
    let batch = ended(&site, &id, "completed").await;
    let counts = json!({"total": 2, "completed": 1, "failed": 1});
    assert_eq!(batch["request_counts"], counts);
    site.close().await;
}

#[tokio::test]
async fn a_line_that_only_its_engine_can_read_waits_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = kept_in(folder.path(), |_| {});
    config.router.migration.wait = Duration::from_millis(1);
    let mut site = Site::with(config, reader()).await;
    site.worker.stop_once();
    eventually("the model is gone", || {
        site.server.models().get(MODEL).is_none()
    })
    .await;
    let mut its_own = line("a", "Hello");
    its_own["body"]["a_field_of_its_own"] = 1.into();
    let id = begin(&site, &lines(&[its_own])).await;
    let is_asked = || count_of_chats(&site.runtime, 503) > 0;
    eventually("the model is asked", is_asked).await;
    let metrics = Default::default();
    site.worker = start_worker(&site.runtime, 2, reader(), worker_config(), metrics).await;
    let batch = ended(&site, &id, "completed").await;
    let answers = content(&site, &batch["output_file_id"]).await;
    assert_eq!(answers[0]["response"]["body"]["object"], "its own");
    site.close().await;
}

#[tokio::test]
async fn lines_that_wait_for_a_model_hold_up_none_of_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = FrontendConfig {
        model_linger: Duration::ZERO,
        ..kept_in(folder.path(), |batches| {
            batches.concurrency = NonZeroUsize::MIN;
        })
    };
    let full = Script::tokens(encode("Hi"));
    full.refuse(Some(EngineError::new(ErrorKind::Overloaded, "it is full")));
    let mut site = Site::with(config, full).await;
    let other = WorkerConfig {
        model_name: Some("other".into()),
        ..worker_config()
    };
    let metrics = Default::default();
    let second = start_worker(&site.runtime, 2, echo(), other, metrics).await;
    eventually("both are served", || site.server.models().all().len() == 2).await;
    let mut of_other = line("b", "Hello");
    of_other["body"]["model"] = "other".into();
    let id = begin(&site, &lines(&[line("a", "Hello"), of_other])).await;
    let is_asked = || count_of_chats(&site.runtime, 429) > 0;
    eventually("the first model is asked", is_asked).await;
    let first = std::mem::replace(&mut site.worker, second);
    soon(first.shutdown()).await;
    batch_that(&site, &id, |batch| {
        batch["request_counts"]["completed"] == 1
    })
    .await;
    let metrics = Default::default();
    let third = start_worker(&site.runtime, 3, echo(), worker_config(), metrics).await;
    let batch = ended(&site, &id, "completed").await;
    assert_eq!(batch["request_counts"]["completed"], 2);
    soon(third.shutdown()).await;
    site.close().await;
}

#[tokio::test]
async fn a_line_goes_on_when_its_model_is_there_however_long_others_wait() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = FrontendConfig {
        model_linger: Duration::ZERO,
        ..kept_in(folder.path(), |_| {})
    };
    let busy = || {
        let script = Script::tokens(encode("Hi"));
        script.refuse(Some(EngineError::new(ErrorKind::Overloaded, "it is full")));
        script
    };
    let mut site = Site::with(config, busy()).await;
    let other = WorkerConfig {
        model_name: Some("other".into()),
        ..worker_config()
    };
    let full = busy();
    let metrics = Default::default();
    let second = start_worker(&site.runtime, 2, full.clone(), other, metrics).await;
    eventually("both are served", || site.server.models().all().len() == 2).await;
    let mut of_other = line("b", "Hello");
    of_other["body"]["model"] = "other".into();
    let id = begin(&site, &lines(&[line("a", "Hello"), of_other])).await;
    let answered = |status| count_of_chats(&site.runtime, status);
    eventually("both are asked", || answered(429) > 1).await;
    let first = std::mem::replace(&mut site.worker, second);
    soon(first.shutdown()).await;
    eventually("the model is not there", || answered(404) > 0).await;
    let metrics = Default::default();
    let third = start_worker(&site.runtime, 3, echo(), worker_config(), metrics).await;
    batch_that(&site, &id, |batch| {
        batch["request_counts"]["completed"] == 1
    })
    .await;
    full.refuse(None);
    ended(&site, &id, "completed").await;
    soon(third.shutdown()).await;
    site.close().await;
}

/// A request to one of the batch endpoints, and its endpoint's name in metrics.
fn request_to(url: &str) -> (Value, &'static str) {
    let prompt = json!({"model": MODEL, "prompt": "Hello", "max_tokens": 4});
    let input = json!({"model": MODEL, "input": "Hello"});
    let (body, endpoint) = match url {
        CHAT => (chat("Hello", json!({})), "chat_completions"),
        "/v1/completions" => (prompt, "completions"),
        "/v1/embeddings" => (input, "embeddings"),
        "/v1/responses" => (input, "responses"),
        "/v1/messages" => (chat("Hello", json!({"max_tokens": 4})), "messages"),
        other => panic!("what is asked of {other}?"),
    };
    let line = json!({"custom_id": "a", "method": "POST", "url": url, "body": body});
    (line, endpoint)
}

#[tokio::test]
async fn after_a_restart_batches_of_every_endpoint_wait_for_their_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = || FrontendConfig {
        model_linger: Duration::from_secs(3600),
        ..kept_in(folder.path(), |_| {})
    };
    let other = || WorkerConfig {
        model_name: Some("other".into()),
        ..worker_config()
    };
    let mut site = Site::with(config(), echo()).await;
    soon(site.worker.shutdown()).await;
    let metrics = Default::default();
    site.worker = start_worker(&site.runtime, 2, echo(), other(), metrics).await;
    eventually("the model is gone", || {
        site.server.models().get(MODEL).is_none()
    })
    .await;
    let mut begun = Vec::new();
    for url in BATCH_URLS {
        let (line, endpoint) = request_to(url);
        let id = begin_to(&site, "", url, &lines(&[line])).await;
        batch_that(&site, &id, |batch| batch["status"] == "in_progress").await;
        begun.push((id, url, endpoint));
    }
    soon(site.server.shutdown(Duration::ZERO)).await;
    soon(site.worker.shutdown()).await;
    soon(site.runtime.shutdown()).await;

    // On the next server, the other model appears first.
    let site = Site::with_worker(config(), other(), echo()).await;
    for (_, _, endpoint) in &begun {
        let refused =
            format!("genset_http_requests_total{{endpoint=\"{endpoint}\",status=\"404\"}}");
        let is_refused = || site.runtime.metrics().encode().contains(&refused);
        eventually("the model is asked for", is_refused).await;
    }
    let metrics = Default::default();
    let worker = start_worker(&site.runtime, 2, echo(), worker_config(), metrics).await;
    for (id, url, _) in begun {
        let batch = ended(&site, &id, "completed").await;
        if url == "/v1/embeddings" {
            // The model only generates.
            let errors = content(&site, &batch["error_file_id"]).await;
            assert_eq!(errors[0]["response"]["status_code"], 400, "{}", errors[0]);
        } else {
            assert_eq!(batch["request_counts"]["completed"], 1, "{url} {batch}");
        }
    }
    soon(site.server.shutdown(Duration::from_secs(30))).await;
    soon(worker.shutdown()).await;
    soon(site.worker.shutdown()).await;
    soon(site.runtime.shutdown()).await;
}
