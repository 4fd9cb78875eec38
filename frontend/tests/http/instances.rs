//! Several Workers behind one server: selection, retries, models that come and go.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::worker::WorkerConfig;
use genset_backend_common::{
    EngineError, ErrorKind, MetricsRegistry, RequestField, Role, card::EndpointType,
};
use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::Runtime;
use genset_runtime::discovery::MemoryDiscovery;
use genset_runtime::plane::MemoryPlane;
use serde_json::json;

use crate::client::{Client, get, post, request, soon};
use crate::script::Script;
use crate::support::{
    CHAT, COMPLETIONS, MODEL, Site, TOKENIZER_FILE, chat, completion, config, encode, eventually,
    named, start_worker, with_file, worker_config,
};

/// Texts that distinguish two engines.
fn one_and_two() -> [Arc<Script>; 2] {
    ["one", "two"].map(|text| Script::tokens(encode(text)))
}

async fn ask(site: &Site) -> (u16, String) {
    let response = site
        .post(COMPLETIONS, &completion("Hello", json!({})))
        .await;
    let text = if response.status == 200 {
        response.content()
    } else {
        response.refusal().3
    };
    (response.status, text)
}

#[tokio::test]
async fn requests_take_turns_and_pass_by_a_refusal() {
    let [one, two] = one_and_two();
    let mut waits_little = config();
    waits_little.router.migration.wait = Duration::from_millis(1);
    let site = Site::with(waits_little, one.clone()).await;
    let second = site.join(2, two.clone(), worker_config()).await;
    for _ in 0..10 {
        ask(&site).await;
    }
    eventually("both are known", || !two.requests().is_empty()).await;
    assert!(!one.requests().is_empty());

    for kind in [
        ErrorKind::Overloaded,
        ErrorKind::Unavailable,
        ErrorKind::EngineShutdown,
    ] {
        one.refuse(Some(EngineError::new(kind, "not now")));
        for _ in 0..4 {
            assert_eq!(ask(&site).await, (200, "two".into()), "{kind}");
        }
    }
    two.refuse(Some(EngineError::new(ErrorKind::Overloaded, "full")));
    let response = site
        .post(COMPLETIONS, &completion("Hello", json!({})))
        .await;
    assert!(matches!(response.status, 429 | 503), "{}", response.text());
    assert_eq!(response.header("retry-after"), Some("1"));

    // An error that is the request's own fault is not retried elsewhere.
    let bad = EngineError::invalid_argument(RequestField::Prompt, "is no good");
    one.refuse(Some(bad.clone()));
    two.refuse(Some(bad));
    let before = one.requests().len() + two.requests().len();
    assert_eq!(ask(&site).await.0, 400);
    assert_eq!(one.requests().len() + two.requests().len(), before + 1);
    soon(second.shutdown()).await;
    site.close().await;
}

#[tokio::test]
async fn a_draining_worker_finishes_and_the_other_takes_over() {
    let (slow, gate) = Script::gated(vec![100], Vec::new());
    let mut site = Site::start(slow.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let mut running = site.begin(CHAT, &body).await;
    eventually("it runs", || slow.active() == 1).await;

    let two = Script::tokens(encode("two"));
    let second = site.join(2, two, worker_config()).await;
    let first = std::mem::replace(&mut site.worker, second);
    first.stop();
    for _ in 0..20 {
        assert_eq!(ask(&site).await, (200, "two".into()));
    }
    assert_eq!(slow.requests().len(), 1);
    gate.add_permits(1);
    let events = running.response().await.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    assert!(soon(first.stopped()).await.error.is_none());
    assert_eq!(ask(&site).await, (200, "two".into()));
    site.close().await;
}

#[tokio::test]
async fn a_request_waits_for_a_model_whose_last_worker_has_just_gone() {
    let [one, two] = one_and_two();
    let mut waits_long = config();
    waits_long.router.migration.wait = Duration::from_secs(60);
    let mut site = Site::with(waits_long, one).await;
    site.worker.stop_once();
    site.serves(MODEL, false).await;

    // A client that sets a deadline does not wait longer.
    let body = chat("Hello", json!({}));
    let headers = "x-request-timeout: 0.05\r\n";
    let hurried = request("POST", CHAT, headers, body.to_string());
    assert_eq!(site.send(hurried).await.status, 503);

    let mut waiting = site.begin(CHAT, &body).await;
    site.worker = site.join(2, two, worker_config()).await;
    assert_eq!(waiting.response().await.status, 200);
    site.close().await;
}

#[tokio::test]
async fn models_come_and_go_with_their_workers() {
    let [one, two] = one_and_two();
    let runtime = Runtime::in_process();
    let metrics = runtime.metrics().clone();
    let of_first = MetricsRegistry::default();
    let first = start_worker(&runtime, 1, one, worker_config(), of_first).await;
    let forgetful = FrontendConfig {
        model_linger: Duration::ZERO,
        ..config()
    };
    let server = FrontendServer::bind(&runtime, forgetful)
        .await
        .expect("a port");
    let mut waits_little = config();
    waits_little.router.migration.wait = Duration::from_millis(1);
    let patient = FrontendServer::bind(&runtime, waits_little)
        .await
        .expect("a port");
    soon(server.models().any()).await.expect("a model");
    soon(patient.models().any()).await.expect("a model");
    soon(first.shutdown()).await;
    eventually("the model is gone", || server.models().get(MODEL).is_none()).await;
    let address = server.address();
    let send = |bytes: Vec<u8>| async move {
        let mut client = Client::connect(address).await;
        client.send(bytes).await;
        client.response().await
    };
    let list = send(get("/v1/models")).await.json();
    assert_eq!(list["data"], json!([]));
    let ready = send(get("/ready")).await;
    assert_eq!(ready.status, 503);
    let (status, param, code, _) = send(post(CHAT, chat("Hello", json!({})).to_string()))
        .await
        .refusal();
    assert_eq!(status, 404);
    assert_eq!(
        (param.as_deref(), code.as_deref()),
        (Some("model"), Some("model_not_found"))
    );

    // If models linger, the answer says when to retry.
    eventually("the model is gone there too", || {
        patient.models().get(MODEL).is_none()
    })
    .await;
    let mut client = Client::connect(patient.address()).await;
    client
        .send(post(CHAT, chat("Hello", json!({})).to_string()))
        .await;
    let response = client.response().await;
    assert_eq!(response.header("retry-after"), Some("1"));
    let (status, param, code, message) = response.refusal();
    assert_eq!((status, param.as_deref(), code), (503, Some("model"), None));
    assert!(message.contains("No worker serves"), "{message}");
    drop(client);
    soon(patient.shutdown(Duration::from_secs(30))).await;

    let worker = start_worker(&runtime, 1, two, worker_config(), metrics).await;
    soon(server.models().any()).await.expect("a model");
    let site = Site {
        runtime,
        server,
        worker,
    };
    assert_eq!(ask(&site).await, (200, "two".into()));
    assert_eq!(site.get("/v1/models/tiny").await.status, 200);
    site.close().await;
}

#[tokio::test]
async fn a_lost_lease_is_taken_again() {
    let discovery = MemoryDiscovery::new();
    let runtime = Runtime::new(Arc::new(discovery.clone()), Arc::new(MemoryPlane::new()));
    let metrics = runtime.metrics().clone();
    let engine = Script::tokens(encode("one"));
    let worker = start_worker(&runtime, 1, engine, worker_config(), metrics).await;
    let server = FrontendServer::bind(&runtime, config())
        .await
        .expect("a port");
    soon(server.models().any()).await.expect("a model");
    let site = Site {
        runtime,
        server,
        worker,
    };
    for _ in 0..3 {
        discovery.expire_leases();
        site.serves(MODEL, true).await;
        let mut answer = ask(&site).await;
        // Between two listings there may be no worker.
        while answer.0 != 200 {
            assert!(matches!(answer.0, 404 | 503), "{answer:?}");
            tokio::task::yield_now().await;
            answer = ask(&site).await;
        }
    }
    site.close().await;
}

#[tokio::test]
async fn aliases_and_endpoint_types_are_the_cards() {
    let config_of_worker = WorkerConfig {
        aliases: vec!["gpt-4o".into(), "org/tiny".into()],
        endpoint_types: Some(BTreeSet::from([EndpointType::Completions])),
        ..worker_config()
    };
    let engine = Script::tokens(encode("one"));
    let site = Site::with_worker(config(), config_of_worker, engine.clone()).await;
    for name in [MODEL, "gpt-4o", "org/tiny"] {
        let body = completion("Hello", json!({"model": name}));
        let response = site.post(COMPLETIONS, &body).await;
        assert_eq!(response.status, 200);
        assert_eq!(response.json()["model"], name);
        let body = chat("Hello", json!({"model": name}));
        let message = site.post(CHAT, &body).await.blames("model");
        assert!(message.contains("does not offer chat"), "{message}");
        assert_eq!(site.get(&format!("/v1/models/{name}")).await.status, 200);
        let awaited = soon(site.server.models().named(name)).await.unwrap();
        assert_eq!(awaited.card.name, MODEL);
    }
    assert!(
        engine
            .requests()
            .iter()
            .all(|request| request.model == MODEL)
    );
    site.close().await;
}

/// Two models whose workers have the same endpoint, which the `dyn://` defaults make easy.
#[tokio::test]
async fn a_request_only_reaches_workers_of_its_model() {
    let [one, two] = one_and_two();
    let site = Site::start(one).await;
    let second = site.join(2, two, named("other")).await;
    site.serves("other", true).await;
    for _ in 0..10 {
        assert_eq!(ask(&site).await, (200, "one".into()));
        let body = completion("Hello", json!({"model": "other"}));
        assert_eq!(site.post(COMPLETIONS, &body).await.content(), "two");
    }
    soon(second.shutdown()).await;
    site.close().await;
}

/// A worker that ends while it answers: the stream ends with an error, so the client knows that it is incomplete.
#[tokio::test]
async fn a_worker_stopped_in_the_middle_ends_its_streams() {
    let engine = Script::silent(100);
    let brief = WorkerConfig {
        grace: Duration::ZERO,
        ..worker_config()
    };
    let site = Site::with_worker(config(), brief, engine.clone()).await;
    let streamed = chat("Hello", json!({"stream": true}));
    let mut running = site.begin(CHAT, &streamed).await;
    let mut whole = site.begin(CHAT, &chat("Hello", json!({}))).await;
    eventually("both run", || engine.active() == 2).await;
    site.worker.stop();
    let events = running.response().await.events();
    let last = events.last().expect("an event");
    assert!(last.contains("server_error"), "{last}");
    let (status, ..) = whole.response().await.refusal();
    assert_eq!(status, 503);
    site.close().await;
}

/// The operator may lower the context; prompt and answer together stay within it.
#[tokio::test]
async fn an_answer_ends_where_the_context_does() {
    let narrow = WorkerConfig {
        context_length_tokens: Some(32),
        ..worker_config()
    };
    let site = Site::with_worker(config(), narrow, Script::tokens(vec![100; 1000])).await;
    let response = site.post(CHAT, &chat("Hello", json!({}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.json()["usage"]["total_tokens"], 32);
    site.close().await;
}

/// Its answers take turns in the engine: a request never waits for itself.
#[tokio::test]
async fn a_request_may_have_more_answers_than_the_engine_has_places() {
    let mut narrow = worker_config();
    narrow.limits.max_running = 1;
    let engine = Script::tokens(encode("Hi"));
    let site = Site::with_worker(config(), narrow, engine).await;
    for stream in [false, true] {
        let body = chat("Hello", json!({"n": 3, "stream": stream}));
        let response = site.post(CHAT, &body).await;
        assert_eq!(response.status, 200);
        let stops = response
            .text()
            .matches("\"finish_reason\":\"stop\"")
            .count();
        assert_eq!(stops, 3, "{}", response.text());
    }
    site.close().await;
}

#[tokio::test]
async fn a_model_beyond_the_most_has_to_wait_for_a_place() {
    let [one, two] = one_and_two();
    let config = FrontendConfig {
        max_models: NonZeroUsize::MIN,
        ..config()
    };
    let site = Site::with_worker(config, worker_config(), one).await;
    // A name that sorts first takes no place from a served model.
    let another = WorkerConfig {
        aliases: vec!["its-alias".into()],
        ..named("another")
    };
    let second = site.join(2, two, another).await;
    let left_out = || site.metric("genset_frontend_left_out_models");
    eventually("it is left out", || left_out() > 0.0).await;
    assert_eq!(ask(&site).await, (200, "one".into()));
    let asked = completion("Hello", json!({"model": "another"}));
    let by_alias = completion("Hello", json!({"model": "its-alias"}));
    for asked in [&asked, &by_alias] {
        let response = site.post(COMPLETIONS, asked).await;
        let (status, .., message) = response.refusal();
        assert_eq!(status, 503, "{message}");
        assert!(message.contains("--max-models"), "{message}");
    }

    site.worker.stop();
    soon(site.server.models().named("another")).await.unwrap();
    assert!(left_out() < 1.0);
    assert_eq!(site.post(COMPLETIONS, &asked).await.content(), "two");
    soon(second.shutdown()).await;
    site.close().await;
}

#[tokio::test]
async fn a_worker_whose_card_differs_is_named_with_what_differs() {
    let [one, two] = one_and_two();
    let site = Site::start(one.clone()).await;
    let detail = || async {
        let response = site.get(&format!("/v1/models/{MODEL}")).await;
        response.json()["genset"].clone()
    };
    let agreeing = detail().await;
    assert_eq!(agreeing["workers"].as_array().map(Vec::len), Some(1));
    assert_eq!(agreeing["left_out_workers"], json!([]));

    let other = WorkerConfig {
        context_length_tokens: Some(100),
        ..worker_config()
    };
    let second = site.join(2, two.clone(), other).await;
    let left_out = r#"genset_frontend_left_out_workers{model="tiny"}"#;
    eventually("it is counted", || site.metric(left_out) > 0.0).await;
    let differing = detail().await;
    assert_eq!(differing["workers"], agreeing["workers"]);
    let worker = &differing["left_out_workers"][0];
    assert_eq!(worker["instance"], "00000000000002");
    let difference = worker["differences"][0].as_str().unwrap_or_default();
    assert!(
        difference.starts_with("context_length_tokens: 100, in use: "),
        "{differing}"
    );
    for _ in 0..4 {
        assert_eq!(ask(&site).await, (200, "one".into()));
    }
    assert!(two.requests().is_empty());
    soon(second.shutdown()).await;
    eventually("it is gone", || site.metric(left_out) < 1.0).await;
    site.close().await;
}

#[tokio::test]
async fn a_model_is_told_with_the_load_of_each_of_its_workers() {
    let busy = Script::silent(100);
    let site = Site::start(busy.clone()).await;
    let body = chat("Hello", json!({"stream": true}));
    let running = site.begin(CHAT, &body).await;
    eventually("it runs", || busy.active() == 1).await;
    let idle = Script::tokens(encode("two"));
    let second = site.join(2, idle, worker_config()).await;
    let live = || site.server.models().workers(MODEL);
    eventually("both are known", || {
        live().is_some_and(|live| live.instances().len() == 2)
    })
    .await;

    let told = site.get(&format!("/v1/models/{MODEL}")).await.json();
    let told = told["genset"]["loads"].as_array().expect("a list");
    let found = told.iter().map(|told| {
        let worker = told["worker"].as_str().expect("an id");
        (worker, told["load"]["running_requests"].as_u64())
    });
    assert_eq!(
        found.collect::<Vec<_>>(),
        [("00000000000001", Some(1)), ("00000000000002", Some(0))]
    );
    drop(running);
    site.idle().await;
    soon(second.shutdown()).await;
    site.close().await;
}

/// Most workers publish another card, which at first cannot be prepared.
#[tokio::test]
async fn a_model_is_served_by_its_old_card_until_the_new_one_is_ready() {
    let broken = with_file(worker_config(), TOKENIZER_FILE, "{");
    let good = WorkerConfig {
        context_length_tokens: Some(100),
        ..worker_config()
    };
    // Also with roles, where the layers follow the workers that have them.
    for roles in [&[][..], &Role::ALL] {
        let [one, two] = one_and_two().map(|engine| {
            let roles = roles.iter().copied();
            engine.declaring(|can| can.roles.extend(roles))
        });
        let site = Site::start(one).await;
        let start = async |ids: [u64; 2], publishing: &WorkerConfig| {
            let [first, second] = ids.map(|id| site.join(id, two.clone(), publishing.clone()));
            tokio::join!(first, second)
        };
        let workers = start([2, 3], &broken).await;
        let models = site.server.models();
        eventually("it cannot be prepared", || !models.is_coming(MODEL)).await;
        for _ in 0..4 {
            assert_eq!(ask(&site).await, (200, "one".into()));
        }
        soon(workers.0.shutdown()).await;
        soon(workers.1.shutdown()).await;

        let workers = start([4, 5], &good).await;
        soon(async {
            loop {
                let (status, text) = ask(&site).await;
                assert_eq!(status, 200, "{text}");
                if text == "two" {
                    break;
                }
            }
        })
        .await;
        soon(workers.0.shutdown()).await;
        soon(workers.1.shutdown()).await;
        site.close().await;
    }
}
