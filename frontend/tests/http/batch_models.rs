//! Batches whose models are not served yet, or no longer.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{EngineError, ErrorKind};
use genset_frontend::FrontendConfig;
use genset_frontend::batch::BATCH_URLS;
use genset_runtime::Runtime;
use serde_json::{Value, json};

use crate::batches::{batch_that, begin, begin_to, content, ended, kept_in, line, lines};
use crate::client::soon;
use crate::script::Script;
use crate::support::{
    CHAT, MODEL, Site, chat, echo, encode, eventually, metric, named, worker_config,
};
use crate::whole_bodies::reader;

/// An engine that refuses every request.
fn busy() -> Arc<Script> {
    let engine = Script::tokens(encode("Hi"));
    engine.refuse(Some(EngineError::new(ErrorKind::Overloaded, "it is full")));
    engine
}

#[tokio::test]
async fn a_batch_waits_for_its_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = FrontendConfig {
        model_linger: Duration::from_secs(3600),
        ..kept_in(folder.path(), |_| {})
    };
    let mut site = Site::with(config, echo()).await;
    let brief = WorkerConfig {
        grace: Duration::ZERO,
        ..worker_config()
    };
    site.replace_worker(2, Script::silent(5), brief).await;
    let id = begin(&site, &lines(&[line("a", "Hello")])).await;
    // It is called, its worker leaves, and another joins.
    batch_that(&site, &id, |batch| batch["status"] == "in_progress").await;
    site.replace_worker(3, echo(), worker_config()).await;
    let batch = ended(&site, &id, "completed").await;
    assert_eq!(
        batch["request_counts"],
        json!({"total": 1, "completed": 1, "failed": 0})
    );
    site.close().await;
}

/// Returns how many chats got this status.
fn count_of_chats(runtime: &Runtime, status: u16) -> u64 {
    let name =
        format!("genset_http_requests_total{{endpoint=\"chat_completions\",status=\"{status}\"}}");
    metric(&runtime.metrics().encode(), &name).unwrap_or(0)
}

#[tokio::test]
async fn a_batch_waits_for_a_model_that_is_away_for_longer_than_it_lingers() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = FrontendConfig {
        model_linger: Duration::ZERO,
        ..kept_in(folder.path(), |_| {})
    };
    let mut site = Site::with(config, busy()).await;
    let mut unknown = line("b", "Hello");
    unknown["body"]["model"] = "nobody".into();
    let id = begin(&site, &lines(&[line("a", "Hello"), unknown])).await;
    let answered = |status| count_of_chats(&site.runtime, status);
    eventually("the model is asked", || answered(429) > 0).await;
    // The batch does not wait for a model that was never served.
    batch_that(&site, &id, |batch| batch["request_counts"]["failed"] == 1).await;
    let before = answered(404);
    site.worker.stop_once();
    eventually("the model is not there", || answered(404) > before).await;
    site.replace_worker(2, echo(), worker_config()).await;
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
    site.serves(MODEL, false).await;
    let mut its_own = line("a", "Hello");
    its_own["body"]["a_field_of_its_own"] = 1.into();
    let id = begin(&site, &lines(&[its_own])).await;
    let is_asked = || count_of_chats(&site.runtime, 503) > 0;
    eventually("the model is asked", is_asked).await;
    site.replace_worker(2, reader(), worker_config()).await;
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
    let mut site = Site::with(config, busy()).await;
    let second = site.join(2, echo(), named("other")).await;
    site.serves("other", true).await;
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
    let third = site.join(3, echo(), worker_config()).await;
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
    let mut site = Site::with(config, busy()).await;
    let full = busy();
    let second = site.join(2, full.clone(), named("other")).await;
    site.serves("other", true).await;
    let mut of_other = line("b", "Hello");
    of_other["body"]["model"] = "other".into();
    let id = begin(&site, &lines(&[line("a", "Hello"), of_other])).await;
    let answered = |status| count_of_chats(&site.runtime, status);
    eventually("both are asked", || answered(429) > 1).await;
    let first = std::mem::replace(&mut site.worker, second);
    soon(first.shutdown()).await;
    eventually("the model is not there", || answered(404) > 0).await;
    let third = site.join(3, echo(), worker_config()).await;
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
    let mut site = Site::with(config(), echo()).await;
    site.replace_worker(2, echo(), named("other")).await;
    site.serves(MODEL, false).await;
    let mut begun = Vec::new();
    for url in BATCH_URLS {
        let (line, endpoint) = request_to(url);
        let id = begin_to(&site, "", url, &lines(&[line])).await;
        batch_that(&site, &id, |batch| batch["status"] == "in_progress").await;
        begun.push((id, url, endpoint));
    }
    site.abort().await;

    // On the next server, the other model appears first.
    let site = Site::with_worker(config(), named("other"), echo()).await;
    for (_, _, endpoint) in &begun {
        let refused =
            format!("genset_http_requests_total{{endpoint=\"{endpoint}\",status=\"404\"}}");
        let is_refused = || site.runtime.metrics().encode().contains(&refused);
        eventually("the model is asked for", is_refused).await;
    }
    let worker = site.join(2, echo(), worker_config()).await;
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
    soon(worker.shutdown()).await;
    site.close().await;
}
