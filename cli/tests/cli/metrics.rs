//! Running processes expose exactly the metrics that `docs/guide/metrics.md` lists. Also tests the other paths of a status port.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::fleet::Fleet;
use crate::support::{Response, Server, repository, soon, until};

/// Documented metrics that no process of this test can expose, and why.
const NOT_SHOWN_HERE: [(&str, &str); 20] = [
    (
        "genset_model_server_cache_config_info",
        "only with an engine that declares a KV cache; backend-common tests it",
    ),
    (
        "genset_http_key_requests_total",
        "only with API keys; the frontend's tests have some",
    ),
    (
        "genset_http_key_tokens_total",
        "only with API keys; the frontend's tests have some",
    ),
    ("genset_router_decision_seconds", KV),
    ("genset_router_choices_total", KV),
    ("genset_router_predicted_cached_tokens_total", KV),
    ("genset_router_actual_cached_tokens_total", KV),
    ("genset_router_index_blocks", KV),
    ("genset_router_snapshots_total", KV),
    ("genset_router_odd_events_total", KV),
    ("genset_router_lag_events", KV),
    ("genset_router_lag_seconds", KV),
    ("genset_router_waiting_requests", QUEUE),
    ("genset_router_wait_seconds", QUEUE),
    ("genset_router_queue_refusals_total", QUEUE),
    ("genset_disaggregated_requests_total", APART),
    ("genset_disaggregated_whole_requests_total", APART),
    ("genset_disaggregated_leg_failures_total", APART),
    (
        "genset_migrations_total",
        "only when a request has moved; the tests of fleets move some",
    ),
    (
        "genset_migration_failures_total",
        "only when a request was lost; the router's tests lose some",
    ),
];

const APART: &str = "only with prefill and decode workers; the tests of fleets have some";
const KV: &str = "only with --router-mode kv; the router's tests have all";
const QUEUE: &str = "only with --router-queue; the router's tests have all";

/// A row of the reference: type and labels.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) kind: String,
    pub(crate) labels: BTreeSet<String>,
}

/// The tables of the reference, by the metric's name in queries.
pub(crate) fn documented() -> BTreeMap<String, Row> {
    let path = repository("docs/guide/metrics.md");
    let text = std::fs::read_to_string(path).expect("the reference of metrics");
    text.lines().filter_map(row).collect()
}

fn row(line: &str) -> Option<(String, Row)> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [_, name, kind, labels, _unit, _meaning, _] = cells[..] else {
        return None;
    };
    let name = name.strip_prefix('`')?.strip_suffix('`')?;
    let labels = labels.split(',').map(|label| label.trim().replace('`', ""));
    let row = Row {
        kind: kind.to_owned(),
        labels: labels.filter(|label| !label.is_empty()).collect(),
    };
    Some((name.to_owned(), row))
}

/// The metrics in an OpenMetrics text, by the metric's name in queries.
fn scraped(text: &str) -> BTreeMap<String, Row> {
    let mut rows = BTreeMap::new();
    for line in text.lines() {
        let Some(typed) = line.strip_prefix("# TYPE ") else {
            continue;
        };
        let (family, kind) = typed.split_once(' ').expect("a name and a type");
        let name = match kind {
            "counter" => format!("{family}_total"),
            _ => family.to_owned(),
        };
        let samples = text.lines().filter(|line| line.starts_with(family));
        let labels = samples.flat_map(labels_of).collect();
        let kind = kind.to_owned();
        rows.insert(name, Row { kind, labels });
    }
    rows
}

/// The label names of a sample, without the bucket label of histograms.
fn labels_of(sample: &str) -> Vec<String> {
    let Some((_, rest)) = sample.split_once('{') else {
        return Vec::new();
    };
    let names = rest
        .split("=\"")
        .filter_map(|part| part.rsplit(['{', ',', '"']).next());
    let is_name = |name: &&str| name.starts_with(|c: char| c.is_ascii_alphabetic());
    names
        .filter(is_name)
        .filter(|name| *name != "le")
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn processes_have_the_metrics_that_are_documented_and_no_other() {
    let fleet = Fleet::new();
    let worker = fleet.worker(&[]).await;
    let frontend = fleet.frontend(&[]).await;
    frontend.stream(3).await.rest().await;
    // One that fails.
    let refused = frontend.post("/v1/chat/completions", "{}").await;
    assert_eq!(refused.response().await.status, 400);
    for address in fleet.listed_addresses() {
        // An unknown peer at the wire port is refused, and its connection is closed.
        let mut stranger = soon(TcpStream::connect(address)).await.unwrap();
        let greeting = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n";
        soon(stranger.write_all(greeting)).await.unwrap();
    }
    let not_refused = "genset_wire_refused_total{reason=\"not_our_protocol\"} 0\n";
    until(async || !worker.get("/metrics").await.body.contains(not_refused)).await;
    let mut shown = BTreeMap::new();
    shown_with(&mut shown, "genset_wire_refused_total", async || {
        worker.get("/metrics").await
    })
    .await;
    // While the model still exists.
    shown_with(&mut shown, "genset_http_failures_total", async || {
        frontend.get("/metrics").await
    })
    .await;
    worker.stop().await;
    // The frontend notices that the worker's connection is closed.
    shown_with(
        &mut shown,
        "genset_wire_ended_connections_total",
        async || frontend.get("/metrics").await,
    )
    .await;
    let documented = documented();
    for (name, why) in NOT_SHOWN_HERE {
        let row = documented.get(name);
        shown.insert(
            name.to_owned(),
            Row {
                kind: row.expect(why).kind.clone(),
                labels: row.expect(why).labels.clone(),
            },
        );
    }
    assert_eq!(shown, documented);
    frontend.stop().await;
}

/// Adds the metrics of a process once `awaited` is among them: counters change shortly after an answer.
async fn shown_with(
    shown: &mut BTreeMap<String, Row>,
    awaited: &str,
    scrape: impl AsyncFn() -> Response,
) {
    until(async || {
        shown.extend(scraped(&scrape().await.body));
        shown.contains_key(awaited)
    })
    .await;
}

/// A load balancer that sends requests to the HTTP port reads its metrics there.
#[tokio::test]
async fn a_server_with_an_engine_shows_what_load_balancers_ask_for() {
    let server = Server::start(&["out=sample", "--token-delay-ms=50"]).await;
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = server.stream(10_000).await;
        stream.first_piece().await;
        streams.push(stream);
    }
    let metrics = server.get("/metrics").await.body;
    for expected in [
        "genset_model_server_queued_requests 0",
        "genset_model_server_running_requests 2",
        "genset_model_server_kv_cache_utilization 0.0",
    ] {
        assert!(metrics.contains(&format!("\n{expected}\n")), "{metrics}");
    }
    drop(streams);
    server.stop().await;
}

/// Parsers of the older text format know no other types.
#[test]
fn every_documented_type_is_one_that_every_reader_knows() {
    for (name, row) in documented() {
        let is_known = ["counter", "gauge", "histogram"].contains(&row.kind.as_str());
        assert!(is_known, "{name} is a {}", row.kind);
        assert_eq!(name.ends_with("_total"), row.kind == "counter", "{name}");
    }
}

#[tokio::test]
async fn a_workers_health_says_what_it_is_and_since_when() {
    let fleet = Fleet::new();
    let worker = fleet.worker(&[("GENSET_COMPONENT", "blue")]).await;
    let answer = worker.get("/health").await;
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("content-type: application/json"));
    let health: Value = serde_json::from_str(&answer.body).unwrap();
    assert_eq!(health["status"], "ready");
    assert_eq!(health["state"], "serving");
    assert_eq!(health["endpoint"], "genset.blue.generate");
    assert_eq!(health["model"], "tiny-chat");
    assert_eq!(health["failed_canaries"], 0);
    let id = health["instance_id"].as_str().unwrap();
    worker.until_log(&format!("serving instance={id}")).await;
    let listed = fleet.ask(&["models"]).await;
    assert!(listed.stdout.contains(id), "{id}: {listed:?}");
    let since = health["since"].as_str().unwrap();
    assert!(since.starts_with("20") && since.ends_with('Z'), "{since}");
    assert_eq!(worker.get("/live").await.body, "live\n");
    assert_eq!(worker.get("/ready").await.body, "ready\n");
    worker.stop().await;
}
