//! The canary of a serving engine: silence counts as death, work does not.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;

use super::fakes::Call::Probe;
use super::fakes::World;
use super::fakes::{
    config, counting, ended, raw_items, served, serving, slowly, stalling, stop_cleanly,
};
use super::transcript::{Transcript, read};
use crate::card::EndpointType;
use crate::config::{Capabilities, EngineConfig, InputKind};
use crate::context::RequestContext;
use crate::error::{EngineError, ErrorKind};
use crate::output::{OutputStream, stream};
use crate::request::{GenerateRequest, Input};
use crate::worker::{CanaryConfig, Outcome, StopCause, WorkerConfig, WorkerHandle};

const INTERVAL: Duration = Duration::from_secs(30);
const TIMEOUT: Duration = Duration::from_secs(10);

fn watched() -> WorkerConfig {
    WorkerConfig {
        canary: CanaryConfig {
            interval: Some(INTERVAL),
            timeout: TIMEOUT,
            max_failures: 3,
        },
        ..config()
    }
}

fn silent(ctx: RequestContext) -> OutputStream {
    stream(ctx, |_out| std::future::pending())
}

/// Sends one request after another until the worker refuses them, because its engine counts as dead.
async fn dies_despite_requests(
    handle: &WorkerHandle,
    ask: impl AsyncFn() -> Result<OutputStream, EngineError>,
) {
    let clients = async {
        loop {
            match ask().await {
                Ok(outputs) => drop(read(outputs).await),
                Err(refused) => break refused.kind(),
            }
        }
    };
    let (report, refused) = tokio::join!(ended(handle), clients);
    assert_eq!(report.outcome, Outcome::Failed(StopCause::EngineDied));
    assert_eq!(refused, ErrorKind::EngineShutdown);
}

fn declare_whole_bodies(world: &World) {
    let can = Capabilities {
        inputs: [InputKind::Text].into(),
        whole_bodies: true,
        ..Capabilities::default()
    };
    world.declare(EngineConfig::new("m", 16).with_capabilities(can));
}

/// Returns the body that probes an engine of whole bodies whose worker offers these APIs.
async fn probing_body(endpoint_types: Option<BTreeSet<EndpointType>>) -> Value {
    let world = World::new();
    declare_whole_bodies(&world);
    let asked = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&asked);
    world.answer_with(move |request, ctx| {
        *seen.lock() = Some(request.input.clone());
        Ok(counting(request, ctx))
    });
    let config = WorkerConfig {
        endpoint_types,
        ..config()
    };
    stop_cleanly(&serving(&world, config).await).await;
    let Some(Input::Text(body)) = asked.lock().take() else {
        panic!("no body was sent")
    };
    serde_json::from_str(&body).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_engine_of_whole_bodies_is_probed_with_one_of_the_api_that_is_offered() {
    let chat = probing_body(None).await;
    assert_eq!(chat["messages"][0]["content"], "ping");
    assert_eq!(chat["model"], "m");
    assert_eq!(chat["max_tokens"], 1);
    let completions = BTreeSet::from([EndpointType::Completions]);
    let completion = probing_body(Some(completions)).await;
    assert_eq!(completion["prompt"], "ping");
    assert!(completion.get("messages").is_none());
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_falls_silent_is_dead_after_enough_failures() {
    let (world, handle) = served(watched()).await;
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    let start = tokio::time::Instant::now();
    let report = ended(&handle).await;
    assert_eq!(report.outcome, Outcome::Failed(StopCause::EngineDied));
    assert_eq!(report.error.unwrap().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(start.elapsed(), (INTERVAL + TIMEOUT) * 3);
    assert_eq!(world.count(Probe), 1 + 3);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_fails_every_canary_is_dead_however_it_fails() {
    type Answer = fn() -> Result<OutputStream, EngineError>;
    let refuses: Answer = || Err(EngineError::internal("broken"));
    let fails: Answer = || {
        let item = Err(EngineError::internal("broken"));
        Ok(raw_items([item]))
    };
    let just_ends: Answer = || Ok(raw_items([]));
    let panics: Answer = || panic!("as planned");
    for (name, answer) in [
        ("refuses", refuses),
        ("fails", fails),
        ("just ends", just_ends),
        ("panics", panics),
    ] {
        let (world, handle) = served(watched()).await;
        world.answer_with(move |_, _| answer());
        let report = ended(&handle).await;
        assert_eq!(
            report.outcome,
            Outcome::Failed(StopCause::EngineDied),
            "{name}"
        );
        assert_eq!(world.count(Probe), 1 + 3, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_says_it_takes_no_requests_now_is_alive() {
    let (world, handle) = served(watched()).await;
    world.answer_with(|_, _| Err(EngineError::new(ErrorKind::Overloaded, "it sleeps")));
    tokio::time::sleep((INTERVAL + TIMEOUT) * 9).await;
    assert!(handle.status().borrow().is_ready());
    assert!(world.count(Probe) > 1 + 3);
    world.answer_with(|request, ctx| Ok(counting(request, ctx)));
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn requests_that_time_out_on_a_silent_engine_are_no_sign_of_life() {
    let mut config = watched();
    config.limits.request_timeout = Some(Duration::from_secs(7));
    let (world, handle) = served(config).await;
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    dies_despite_requests(&handle, || world.send("r")).await;
}

#[tokio::test(start_paused = true)]
async fn one_good_canary_forgives_the_bad_ones_before_it() {
    let (world, handle) = served(watched()).await;
    for _ in 0..3 {
        world.answer_with(|_, ctx| Ok(silent(ctx)));
        tokio::time::sleep((INTERVAL + TIMEOUT) * 2 + Duration::from_secs(1)).await;
        world.answer_with(|request, ctx| Ok(counting(request, ctx)));
        tokio::time::sleep(INTERVAL).await;
    }
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_is_not_ready_from_a_failed_canary_to_the_next_good_one() {
    let (world, handle) = served(watched()).await;
    let mut status = handle.status();
    let metrics = world.metrics.clone();
    assert!(status.borrow().is_ready());
    assert!(metrics.encode().contains("genset_worker_ready 1\n"));
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    let failed = status.wait_for(|status| status.failed_canaries == 2).await;
    assert!(!failed.unwrap().is_ready());
    assert!(metrics.encode().contains("genset_worker_ready 0\n"));
    // Still listed: requests are served, and an answer counts as a sign of life.
    assert!(handle.ready().await.is_ok());
    world.answer_with(|request, ctx| Ok(counting(request, ctx)));
    let passed = status.wait_for(|status| status.failed_canaries == 0).await;
    assert!(passed.unwrap().is_ready());
    let text = metrics.encode();
    assert!(text.contains("genset_worker_ready 1\n"), "{text}");
    assert!(
        text.contains("genset_worker_canary_failures_total 2\n"),
        "{text}"
    );
    stop_cleanly(&handle).await;
    assert!(metrics.encode().contains("genset_worker_ready 0\n"));
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_for_overload_lives() {
    let mut config = watched();
    (config.limits.max_running, config.limits.max_waiting) = (1, 0);
    (config.limits.request_timeout, config.limits.idle_timeout) = (None, None);
    let (world, handle) = stalling(config).await;
    let busy = world.send("busy").await.unwrap();
    tokio::time::sleep(INTERVAL * 20).await;
    assert!(world.count(Probe) > 10);
    handle.ready().await.unwrap();
    drop(busy);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_streams_is_not_even_probed() {
    let mut config = watched();
    config.limits.max_running = 1;
    let (world, handle) = served(config).await;
    world.answer_with(|request, ctx| Ok(slowly(request, ctx, INTERVAL / 3)));
    assert_eq!(world.ask(Some(40)).await.tokens.len(), 40);
    assert_eq!(world.count(Probe), 1);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_canary_that_waits_behind_slow_work_kills_nobody() {
    let mut config = watched();
    config.limits.max_running = 1;
    (config.limits.request_timeout, config.limits.idle_timeout) = (None, None);
    let (world, handle) = served(config).await;
    // Slower than an interval, faster than an interval plus a canary's limit: every canary is sent, and waits.
    world.answer_with(|request, ctx| Ok(slowly(request, ctx, INTERVAL + TIMEOUT / 2)));
    assert_eq!(world.ask(Some(20)).await.tokens.len(), 20);
    assert!(world.count(Probe) > 10);
    stop_cleanly(&handle).await;
}

/// A long prompt produces no item, and the canary waits behind it.
#[tokio::test(start_paused = true)]
async fn an_engine_that_computes_steps_is_alive_though_its_canaries_wait() {
    let (world, handle) = served(watched()).await;
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    for _ in 0..9 {
        tokio::time::sleep(INTERVAL).await;
        world.compute_step();
    }
    assert!(handle.status().borrow().is_ready());
    assert!(world.count(Probe) > 1 + 3);
    let report = ended(&handle).await;
    assert_eq!(report.outcome, Outcome::Failed(StopCause::EngineDied));
}

/// The step vouches for the canary sent after it; the next canary does not wait for another interval.
#[tokio::test(start_paused = true)]
async fn an_engine_that_falls_silent_after_a_step_is_dead_one_canary_later() {
    let (world, handle) = served(watched()).await;
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    let start = tokio::time::Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.compute_step();
    let report = ended(&handle).await;
    assert_eq!(report.outcome, Outcome::Failed(StopCause::EngineDied));
    assert_eq!(start.elapsed(), (INTERVAL + TIMEOUT) * 3 + TIMEOUT);
    assert_eq!(world.count(Probe), 1 + 1 + 3);
}

/// For example a handler with a lock: the canary waits behind an answer that shows nothing before its end.
#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_whole_has_its_time_and_later_ones_add_none() {
    let world = World::new();
    declare_whole_bodies(&world);
    let mut config = watched();
    config.limits.idle_timeout = None;
    config.limits.request_timeout = Some(INTERVAL * 20 + Duration::from_secs(1));
    let handle = serving(&world, config).await;
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    let ask = || {
        let body = GenerateRequest::from_text("m", "{}");
        world.generate(body, RequestContext::new("r"))
    };
    let long = read(ask().await.unwrap()).await;
    assert_eq!(long, Transcript::failed(ErrorKind::DeadlineExceeded, &[]));
    assert!(handle.status().borrow().is_ready());
    dies_despite_requests(&handle, ask).await;
}

#[tokio::test(start_paused = true)]
async fn without_an_interval_only_the_first_canary_flies() {
    let (world, handle) = served(config()).await;
    world.answer_with(|_, ctx| Ok(silent(ctx)));
    tokio::time::sleep(INTERVAL * 100).await;
    assert_eq!(world.count(Probe), 1);
    stop_cleanly(&handle).await;
}

/// Unread streams hold every slot; the engine still answers its canaries.
#[tokio::test(start_paused = true)]
async fn clients_that_read_nothing_do_not_make_the_engine_look_dead() {
    let mut config = watched();
    config.limits.max_running = 1;
    (config.limits.idle_timeout, config.limits.request_timeout) = (None, None);
    let (world, handle) = served(config).await;
    let unread = world.send("unread").await.unwrap();
    tokio::time::sleep(10 * (INTERVAL + TIMEOUT)).await;
    assert!(world.count(Probe) > 3);
    drop(unread);
    stop_cleanly(&handle).await;
}
