//! Limits on a model's requests: which wait, which are refused, and what frees a place.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use genset_backend_common::output::Finish;
use genset_backend_common::worker::WorkerHandle;
use genset_backend_common::{EngineError, LLMEngine, RequestField};
use genset_frontend::FrontendConfig;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::client::{Client, request, soon};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, chat, completion, config, encode, eventually, named,
};

const RUNNING: &str = r#"genset_frontend_model_running_requests{model="tiny"}"#;
const WAITING: &str = r#"genset_frontend_model_waiting_requests{model="tiny"}"#;

/// An engine that sends "Yes" for every permit that it is given.
fn gated() -> (Arc<Script>, Arc<Semaphore>) {
    Script::gated(Vec::new(), encode("Yes"))
}

/// A site that runs `running` requests of a model at once and lets `waiting` more wait.
async fn site(running: usize, waiting: usize, engine: Arc<dyn LLMEngine>) -> Site {
    let config = FrontendConfig {
        max_model_running_requests: NonZeroUsize::new(running).expect("some run"),
        max_model_waiting_requests: waiting,
        ..config()
    };
    Site::with(config, engine).await
}

/// A second model, which answers at once.
async fn other_model(site: &Site) -> WorkerHandle {
    let engine = Script::tokens(encode("No"));
    let worker = site.join(2, engine, named("other")).await;
    site.serves("other", true).await;
    worker
}

fn hello() -> Value {
    chat("Hello", json!({}))
}

/// Sends a request and waits until it is counted by `metric`.
async fn send(site: &Site, body: &Value, metric: &str) -> Client {
    let before = site.metric(metric);
    let client = site.begin(CHAT, body).await;
    eventually("it is counted", || site.metric(metric) > before).await;
    client
}

#[tokio::test]
async fn one_runs_one_waits_and_the_third_is_told_when_to_come_back() {
    let (engine, gate) = gated();
    let site = site(1, 1, engine.clone()).await;
    let other = other_model(&site).await;
    let mut first = send(&site, &hello(), RUNNING).await;
    let mut second = send(&site, &hello(), WAITING).await;
    assert_eq!((site.metric(RUNNING), site.metric(WAITING)), (1.0, 1.0));

    let chat_of = |model: &str| chat("Hello", json!({"model": model, "max_tokens": 4}));
    let responses = |model: &str| json!({"model": model, "input": "Hello"});
    type Body = Box<dyn Fn(&str) -> Value>;
    let routes: [(&str, Body); 4] = [
        (CHAT, Box::new(chat_of)),
        (
            COMPLETIONS,
            Box::new(|model| completion("Hello", json!({"model": model}))),
        ),
        ("/v1/responses", Box::new(responses)),
        ("/v1/messages", Box::new(chat_of)),
    ];
    for (path, body) in &routes {
        for stream in [false, true] {
            let mut refused = body(MODEL);
            refused["stream"] = stream.into();
            let response = site.post(path, &refused).await;
            assert_eq!(response.status, 429, "{path}: {}", response.text());
            assert_eq!(response.header("retry-after"), Some("1"), "{path}");
            let error = &response.json()["error"];
            assert_eq!(error["type"], "rate_limit_error", "{path}");
            let message = error["message"].as_str().unwrap_or_default();
            assert!(message.contains("of this model"), "{path}: {message}");
        }
        // A full model takes nothing from another.
        let response = site.post(path, &body("other")).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text());
    }
    // Inspecting a prompt is work too, and takes a place.
    let chat_alone = chat("Hello", json!({"model": MODEL}));
    let counting = [
        ("/v1/responses/input_tokens", responses(MODEL)),
        ("/v1/messages/count_tokens", chat_alone),
        ("/tokenize", json!({"model": MODEL, "prompt": "Hello"})),
        ("/detokenize", json!({"model": MODEL, "tokens": [1]})),
    ];
    for (path, body) in counting {
        let counted = site.post(path, &body).await;
        assert_eq!(counted.status, 429, "{path}: {}", counted.text());
    }
    assert_eq!(
        engine.requests().len(),
        1,
        "the engine never saw the others"
    );
    let metrics = site.runtime.metrics().encode();
    let failures = r#"genset_http_failures_total{endpoint="chat_completions",kind="overloaded"} 2"#;
    assert!(metrics.contains(failures), "{metrics}");

    gate.add_permits(2);
    assert_eq!(first.response().await.content(), "Yes");
    assert_eq!(second.response().await.content(), "Yes");
    site.idle().await;
    eventually("both places are free", || {
        site.metric(RUNNING) == 0.0 && site.metric(WAITING) == 0.0
    })
    .await;
    soon(other.shutdown()).await;
    let others = r#"genset_frontend_model_running_requests{model="other"}"#;
    eventually("a model that is gone has no metrics", || {
        !site.runtime.metrics().encode().contains(others)
    })
    .await;
    site.close().await;
}

#[tokio::test]
async fn those_that_wait_come_in_their_turn() {
    let (engine, gate) = gated();
    let site = site(1, 8, engine.clone()).await;
    let mut clients = vec![send(&site, &hello(), RUNNING).await];
    for seed in 0..4 {
        let body = chat("Hello", json!({"seed": seed}));
        clients.push(send(&site, &body, WAITING).await);
    }
    for client in &mut clients {
        gate.add_permits(1);
        assert_eq!(client.response().await.status, 200);
    }
    let seeds = engine.requests();
    let seeds = seeds.iter().map(|request| request.sampling.seed);
    let in_turn = [None, Some(0), Some(1), Some(2), Some(3)];
    assert_eq!(seeds.collect::<Vec<_>>(), in_turn);
    site.close().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place_whether_it_runs_or_waits() {
    let (engine, gate) = gated();
    let site = site(1, 1, engine.clone()).await;
    let running = send(&site, &chat("Hello", json!({"stream": true})), RUNNING).await;
    let waiting = send(&site, &hello(), WAITING).await;
    drop(waiting);
    eventually("nobody waits", || site.metric(WAITING) == 0.0).await;
    let mut next = send(&site, &hello(), WAITING).await;
    assert_eq!(site.post(CHAT, &hello()).await.status, 429);
    drop(running);
    eventually("the next one runs", || site.metric(WAITING) == 0.0).await;
    gate.add_permits(1);
    assert_eq!(next.response().await.content(), "Yes");
    site.idle().await;
    assert_eq!(site.metric(RUNNING), 0.0);
    site.close().await;
}

#[tokio::test]
async fn an_error_frees_the_place_before_and_after_the_first_byte() {
    let engine = Script::failing(vec![100], EngineError::internal("broken"));
    let site = site(1, 0, engine.clone()).await;
    for stream in [false, true, false] {
        let response = site
            .post(CHAT, &chat("Hello", json!({"stream": stream})))
            .await;
        assert_eq!(response.status, if stream { 200 } else { 500 });
        site.idle().await;
        eventually("the place is free", || site.metric(RUNNING) == 0.0).await;
    }
    engine.refuse(Some(EngineError::invalid_argument(
        RequestField::Prompt,
        "is no good",
    )));
    // Refused by the engine, by the template, by the card.
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for further in [
        json!({}),
        json!({"messages": [{"role": "wizard", "content": ""}]}),
        json!({"tools": [tool]}),
    ] {
        let status = site.post(CHAT, &chat("Hello", further)).await.status;
        assert_eq!(status, 400);
        eventually("the place is free", || site.metric(RUNNING) == 0.0).await;
    }
    site.close().await;
}

#[tokio::test]
async fn a_deadline_that_passes_while_a_request_waits_ends_it() {
    let (engine, gate) = gated();
    let site = site(1, 1, engine.clone()).await;
    let mut first = send(&site, &hello(), RUNNING).await;
    let headers = "x-request-timeout: 0.05\r\n";
    let late = request("POST", CHAT, headers, hello().to_string());
    let (status, ..) = site.send(late).await.refusal();
    assert_eq!(status, 504);
    eventually("nobody waits", || site.metric(WAITING) == 0.0).await;
    assert_eq!(engine.requests().len(), 1);
    gate.add_permits(1);
    assert_eq!(first.response().await.status, 200);
    site.close().await;
}

/// Waiting requests were accepted: a draining server answers them.
#[tokio::test]
async fn those_that_wait_when_the_server_drains_are_answered() {
    let (engine, gate) = gated();
    let site = site(1, 1, engine).await;
    let mut first = send(&site, &hello(), RUNNING).await;
    let mut second = send(&site, &hello(), WAITING).await;
    site.server.drain();
    assert_eq!(site.post(CHAT, &hello()).await.status, 503);
    gate.add_permits(2);
    assert_eq!(first.response().await.content(), "Yes");
    assert_eq!(second.response().await.content(), "Yes");
    assert!(soon(site.server.shutdown(Duration::from_secs(30))).await);
    soon(site.worker.shutdown()).await;
    soon(site.runtime.shutdown()).await;
}

/// A head that is too large is refused; the largest allowed one is served.
#[tokio::test]
async fn a_head_may_be_only_so_large() {
    let config = FrontendConfig {
        max_header_bytes: 10_000,
        ..config()
    };
    let site = Site::with(config, Script::tokens(encode("Yes"))).await;
    let body = hello().to_string();
    let padded = |bytes: usize| format!("x-padding: {}\r\n", "a".repeat(bytes));
    let send = async |headers: String| site.send(request("POST", CHAT, &headers, &body)).await;
    assert_eq!(send(padded(9000)).await.status, 200);
    assert_eq!(send(padded(30_000)).await.status, 431);
    assert_eq!(send("x-a: b\r\n".repeat(101)).await.status, 431);
    site.is_well().await;
    site.close().await;
}

/// Two at once: the first waits, and the others pass it one after another.
#[tokio::test]
async fn a_request_has_so_many_choices_under_way_and_no_more() {
    const CHOICES: usize = 40;
    let gate = Arc::new(Semaphore::new(0));
    let (active, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let (opener, highest) = (Arc::clone(&gate), Arc::clone(&most));
    let engine = Script::new(move |request, out| {
        let (gate, active, most) = (Arc::clone(&gate), Arc::clone(&active), Arc::clone(&most));
        async move {
            most.fetch_max(active.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let choice = request.sampling.seed.unwrap_or(0);
            if choice == 0
                && let Ok(permit) = gate.acquire().await
            {
                permit.forget();
            }
            for _ in 0..=choice {
                out.token(encode("a")[0]).await?;
            }
            active.fetch_sub(1, Ordering::SeqCst);
            Ok(Finish::length())
        }
    });
    let config = FrontendConfig {
        max_running_choices: NonZeroUsize::new(2).expect("two"),
        max_choices: 10,
        ..config()
    };
    let site = Site::with(config, engine.clone()).await;
    for stream in [false, true] {
        let before = engine.requests().len();
        let mut body = completion(vec!["Hi"; 4], json!({"n": 10, "stream": stream}));
        // The seeds of each prompt's choices count from here.
        body["seed"] = 0.into();
        let mut client = site.begin(COMPLETIONS, &body).await;
        // The first choice of each of the four prompts waits, and is released once all before the next one have begun.
        for begun in [11, 21, 31, CHOICES] {
            let has_begun = || engine.requests().len() - before >= begun;
            eventually("those beside it go by", has_begun).await;
            opener.add_permits(1);
        }
        let response = client.response().await;
        assert_eq!(response.status, 200, "{}", response.text());
        for index in 0..CHOICES {
            let text = match stream {
                true => response.streamed(index).0,
                false => {
                    let choice = &response.json()["choices"][index];
                    assert_eq!(choice["index"], index);
                    choice["text"].as_str().unwrap_or_default().to_owned()
                }
            };
            let tokens = index % 10 + 1;
            assert_eq!(
                text.matches('a').count(),
                tokens,
                "{index}, streamed: {stream}"
            );
        }
    }
    assert_eq!(highest.load(Ordering::SeqCst), 2);
    site.close().await;
}
