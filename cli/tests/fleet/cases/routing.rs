//! Routing by what is cached, with engines that really cache.

use serde_json::Value;

use crate::answers::chat;
use crate::fleet::{Fleet, LOOK_AGAIN, PEER_TIMEOUT, until_listed};
use crate::meeting::Meeting;
use crate::support::{Exchange, Server, genset, soon};
use crate::worker::Worker;

pub(crate) async fn a_prompt_goes_where_it_is_cached<M: Meeting>(fleet: Fleet<M>) {
    let _workers = tokio::join!(caching_worker(&fleet), caching_worker(&fleet));
    let frontend = fleet.frontend(&["--router-mode=kv"]).await;
    until_listed(&frontend).await;
    until_metric(&frontend, "genset_router_snapshots_total", 2.0).await;
    let prompts = ["one", "two", "three"].map(|word| format!("Count {word}. ").repeat(80));
    let mut blocks = 0;
    for prompt in &prompts {
        let (tokens, cached) = ask(&frontend, prompt).await;
        assert!(tokens > 200 && cached < 32, "{cached} of {tokens} cached");
        blocks += tokens / 16;
    }
    // They share what the template begins with; canaries are short.
    let least = f64::from(blocks - 6);
    until_metric(&frontend, "genset_router_index_blocks", least).await;
    for _ in 0..4 {
        for prompt in &prompts {
            let (tokens, cached) = ask(&frontend, prompt).await;
            assert!(cached + 32 > tokens, "{cached} of {tokens} cached");
        }
    }
}

/// A worker whose engine has a prefix cache.
async fn caching_worker<M: Meeting>(fleet: &Fleet<M>) -> Worker {
    let mut command = genset(&["run", "in=dyn", "out=candle", "--status-port=0"]);
    command.args(fleet.meeting.flags()).arg(PEER_TIMEOUT);
    let worker = Worker::spawn(command).await;
    worker.until_ready().await;
    worker
}

/// Asks for one token; returns how many the prompt has, and how many of them were cached.
async fn ask(frontend: &Server, prompt: &str) -> (u32, u32) {
    let mut body = chat(1, false);
    body["messages"][0]["content"] = prompt.into();
    let body = body.to_string();
    let path = "/v1/chat/completions";
    let exchange = Exchange::begin(frontend.address, "POST", path, &body);
    let response = exchange.await.response().await;
    assert_eq!(response.status, 200, "{}", response.body);
    let answer: Value = serde_json::from_str(&response.body).expect("JSON");
    let count = |value: &Value| {
        let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
        count.unwrap_or_else(|| panic!("no count of tokens: {}", response.body))
    };
    let usage = &answer["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    (count(&usage["prompt_tokens"]), count(cached))
}

/// Waits until the samples of a metric add up to `least`.
async fn until_metric(frontend: &Server, name: &str, least: f64) {
    soon(async {
        loop {
            let text = frontend.get("/metrics").await.body;
            let samples = text.lines().filter(|line| line.starts_with(name));
            let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            if values.sum::<f64>() >= least {
                return;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    })
    .await;
}
