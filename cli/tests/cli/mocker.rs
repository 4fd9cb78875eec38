//! `out=mocker`, started as its guide says: a worker with a settings file, and a frontend that finds it.

use serde_json::{Value, json};

use crate::fleet::Fleet;
use crate::support::{Server, done_events, finish_reason, run, soon, text_of, tiny_chat};
use crate::worker::Worker;

async fn ask(server: &Server) -> Vec<Value> {
    ask_with(server, json!({})).await
}

async fn ask_with(server: &Server, genset: Value) -> Vec<Value> {
    let body = json!({
        "genset": genset,
        "model": "tiny-chat",
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_tokens": 24,
        "messages": [{"role": "user", "content": "a question of some length, so that it has a few blocks ".repeat(8)}],
    });
    let answer = server.post("/v1/chat/completions", &body.to_string()).await;
    assert_eq!(answer.status, 200);
    done_events(&answer.response().await.body)
}

/// A worker with these settings, and a frontend that knows what it has.
async fn started(settings: &str) -> (Fleet, Worker, Server) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mocker_args.json");
    std::fs::write(&path, settings).unwrap();
    let (model, path) = (
        tiny_chat().display().to_string(),
        path.display().to_string(),
    );
    let words = [
        "in=dyn://dynamo.mocker.generate",
        "out=mocker",
        "--model-path",
        &model,
        "--extra-engine-args",
        &path,
    ];
    let fleet = Fleet::new();
    let worker = fleet.worker_of(&words, &[]).await;
    let frontend = fleet.frontend(&[("GENSET_ROUTER_MODE", "kv")]).await;
    (fleet, worker, frontend)
}

fn usage(events: &[Value]) -> &Value {
    let last = events.last().expect("an event");
    &last["usage"]
}

#[tokio::test]
async fn the_example_of_the_guide_runs() {
    let (_fleet, worker, frontend) = started("{\"speedup_ratio\": 10.0}\n").await;

    let first = ask(&frontend).await;
    assert_eq!(finish_reason(&first), Some("length"));
    assert_eq!(usage(&first)["completion_tokens"], 24);
    assert_eq!(usage(&first)["prompt_tokens_details"]["cached_tokens"], 0);
    let again = ask(&frontend).await;
    assert_eq!(text_of(&again), text_of(&first));
    let cached = usage(&again)["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(
        cached.is_some_and(|tokens| tokens > 0 && tokens % 16 == 0),
        "{again:?}"
    );

    let metrics = worker.get("/metrics").await.body;
    // The worker's own canary has sent requests too.
    assert!(
        metrics.contains("genset_mocker_generated_tokens_total 49"),
        "{metrics}"
    );
    frontend.stop().await;
    worker.stop().await;
}

#[tokio::test]
async fn a_prompt_goes_to_the_rank_that_has_it_or_to_the_one_it_names() {
    let settings = "{\"speedup_ratio\": 10.0, \"dp_size\": 4}\n";
    let (_fleet, worker, frontend) = started(settings).await;
    let cached = |events: &[Value]| {
        let details = &usage(events)["prompt_tokens_details"];
        details["cached_tokens"].as_u64().unwrap()
    };
    let decision = |events: &[Value]| {
        let said = events.iter().find(|event| !event["genset"].is_null());
        said.expect("a decision")["genset"]["router"][0].clone()
    };
    let named = json!({"annotations": ["router"], "data_parallel_rank": 2});
    let first = ask_with(&frontend, named.clone()).await;
    assert_eq!(decision(&first)["rank"], 2, "{first:?}");
    assert_eq!(decision(&first)["candidate_count"], 1);
    assert_eq!(cached(&first), 0);
    // Its events arrive shortly.
    let asking = json!({"annotations": ["router"]});
    let again = soon(async {
        loop {
            let again = ask_with(&frontend, asking.clone()).await;
            if decision(&again)["reason"] == "overlap" {
                return again;
            }
        }
    })
    .await;
    assert_eq!(decision(&again)["candidate_count"], 4);
    assert!(cached(&again) > 0, "{again:?}");
    let elsewhere = json!({"annotations": ["router"], "data_parallel_rank": 3});
    let named = ask_with(&frontend, elsewhere).await;
    assert_eq!(decision(&named)["rank"], 3);
    frontend.stop().await;
    worker.stop().await;
}

#[tokio::test]
async fn settings_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("mocker.yaml");
    std::fs::write(&settings, "speedup: 10\n").unwrap();
    let settings = settings.display().to_string();
    let ended = run(&[
        "run",
        "in=http",
        "out=mocker",
        "--extra-engine-args",
        &settings,
    ])
    .await;
    assert_eq!(ended.code, Some(2), "{ended:?}");
    for text in [
        "--extra-engine-args",
        "mocker.yaml",
        "\"speedup\"",
        "speedup_ratio",
    ] {
        assert!(ended.stderr.contains(text), "{}", ended.stderr);
    }
}
