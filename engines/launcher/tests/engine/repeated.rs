//! The metrics of stand-ins, as the worker repeats them.

use std::time::Duration;

use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{LLMEngine, MetricsRegistry, StartContext};
use genset_engine_launcher::{LauncherConfig, LauncherEngine};
use tokio::time::{sleep, timeout};

use crate::support::{LONG, Reports, answer, config, kill, request};

/// An engine that has answered a prompt of 40 tokens, and the handles of its worker, which has a metric of its own.
async fn asked(config: LauncherConfig) -> (LauncherEngine, StartContext) {
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    let own: Gauge = ctx.metrics.create("genset_own", "Ours");
    own.set(3);
    engine.start(ctx.clone()).await.unwrap();
    // Only names of the server's metrics contain colons.
    until(&ctx.metrics, |text| text.contains(':')).await;
    let prompt: Vec<u32> = (100..140).collect();
    answer(&engine, request(&prompt, 3)).await.end.unwrap();
    (engine, ctx)
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
    let (engine, ctx) = asked(config("vllm", &[&reports.flag()])).await;
    let metrics = &ctx.metrics;
    let pid = reports.next("pid").await;
    let counted = "vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 40.0\n";
    let text = until(metrics, |text| text.contains(counted)).await;
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

    kill(pid);
    let text = until(metrics, |text| !text.contains("vllm")).await;
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
        let (engine, ctx) = asked(config(api, &[])).await;
        until(&ctx.metrics, |text| text.contains(counted)).await;
        engine.cleanup().await.unwrap();
        assert!(!ctx.metrics.encode().contains(counted), "{api}");
    }
}

/// If metrics are invalid, what can be parsed is shown; if none arrive, the last ones stay. They are no load. Nobody waits.
async fn goes_on(fault: &str) {
    let (engine, ctx) = asked(config("vllm", &["--fault", fault])).await;
    let (metrics, mut load) = (&ctx.metrics, ctx.load.subscribe());
    let is_told = fault == "metrics-garbage";
    let is_so = |text: &str| is_told != text.contains("vllm:prompt_tokens");
    let text = until(metrics, is_so).await;
    assert!(text.contains("genset_own 3\n"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert_eq!(text.matches("# EOF").count(), 1, "{text}");
    assert!(!text.contains("genset_worker_ready"), "{text}");
    let unknown = timeout(LONG, load.wait_for(|load| load.kv_total_blocks == 0));
    drop(unknown.await.unwrap().unwrap());
    answer(&engine, request(&[1, 2], 3)).await.end.unwrap();
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn metrics_that_hang_or_cannot_be_read_leave_ours_and_are_no_load() {
    let faults = ["metrics-garbage", "metrics-huge", "metrics-hang"];
    futures_util::future::join_all(faults.map(goes_on)).await;
}
