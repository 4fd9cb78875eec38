//! The metrics of stand-ins, as the worker repeats them.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    dead_code,
    reason = "a test fails by panicking, and no test file needs all of the support"
)]

mod support;

use std::time::Duration;

use futures_util::StreamExt as _;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{
    GenerateRequest, LLMEngine, MetricsRegistry, Output, RequestContext, StartContext,
};
use genset_engine_launcher::{LauncherConfig, LauncherEngine};
use tokio::time::{sleep, timeout};

use support::{LONG, Reports, config};

/// An engine that has answered a prompt of 40 tokens, and the metrics of its worker, which has a metric of its own.
async fn asked(config: LauncherConfig) -> (LauncherEngine, MetricsRegistry) {
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    let metrics = ctx.metrics.clone();
    let own: Gauge = metrics.create("genset_own", "Ours");
    own.set(3);
    engine.start(ctx).await.unwrap();
    // Only names of the server's metrics contain colons.
    until(&metrics, |text| text.contains(':')).await;
    let mut request = GenerateRequest::from_tokens("m", (100..140).collect());
    request.stop.max_tokens = Some(3);
    let ctx = RequestContext::new("r");
    let mut outputs = engine.generate(request, ctx).await.unwrap();
    while let Some(item) = timeout(LONG, outputs.next()).await.unwrap() {
        if let Output::Finished(_) = item.unwrap() {
            return (engine, metrics);
        }
    }
    panic!("no terminal")
}

/// Waits until `/metrics` meets the condition, and returns it.
async fn until(metrics: &MetricsRegistry, is_so: impl Fn(&str) -> bool) -> String {
    let reached = async {
        loop {
            let text = metrics.encode();
            if is_so(&text) {
                return text;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LONG, reached).await.unwrap()
}

#[tokio::test]
async fn the_servers_metrics_are_there_for_operators_until_it_dies() {
    let mut reports = Reports::listen().await;
    let (engine, metrics) = asked(config("vllm", &[&reports.flag()])).await;
    let pid = reports.next("pid").await.to_string();
    let counted = "vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 40.0\n";
    let text = until(&metrics, |text| text.contains(counted)).await;
    for line in [
        "# TYPE vllm:num_requests_running gauge\n",
        "# TYPE vllm:prompt_tokens counter\n",
        "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0.0\n",
        "vllm:iteration_tokens_total_bucket{le=\"8.0\",engine=\"0\",model_name=\"m\"} 1\n",
        "process_resident_memory_bytes{server=\"vllm\"} 1048576000.0\n",
        "genset_own 3\n",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    assert!(!text.contains("_created"), "{text}");
    assert!(text.ends_with("\n# EOF\n"), "{text}");
    let public = metrics.encode_public();
    assert!(
        public.contains("genset_own 3\n") && !public.contains("vllm"),
        "{public}"
    );

    let mut kill = std::process::Command::new("kill");
    assert!(kill.args(["-KILL", &pid]).status().unwrap().success());
    let text = until(&metrics, |text| !text.contains("vllm")).await;
    assert!(text.contains("genset_own 3\n"), "{text}");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn sglang_and_llama_server_are_started_with_metrics() {
    for (api, counted) in [
        (
            "sglang",
            "sglang:prompt_tokens_total{model_name=\"m\"} 40.0\n",
        ),
        ("llama", "llamacpp:prompt_tokens_total 40.0\n"),
    ] {
        let (engine, metrics) = asked(config(api, &[])).await;
        until(&metrics, |text| text.contains(counted)).await;
        engine.cleanup().await.unwrap();
        assert!(!metrics.encode().contains(counted), "{api}");
    }
}

/// If metrics are invalid, what can be parsed is shown; if none arrive, the last ones stay. Nobody waits.
async fn goes_on(fault: &str) {
    let (engine, metrics) = asked(config("vllm", &["--fault", fault])).await;
    let is_told = fault == "metrics-garbage";
    let is_so = |text: &str| is_told != text.contains("vllm:prompt_tokens");
    let text = until(&metrics, is_so).await;
    assert!(text.contains("genset_own 3\n"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert_eq!(text.matches("# EOF").count(), 1, "{text}");
    assert!(!text.contains("genset_worker_ready"), "{text}");
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn metrics_that_cannot_be_read_leave_ours() {
    let faults = ["metrics-garbage", "metrics-huge", "metrics-hang"];
    futures_util::future::join_all(faults.map(goes_on)).await;
}
