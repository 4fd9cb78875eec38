//! The load of stand-ins that report it like the real servers, as the worker publishes it.

use std::num::NonZeroU32;

use futures_util::future::join_all;
use genset_backend_common::controls::SleepLevel;
use genset_backend_common::handles::Load;
use genset_backend_common::{
    GenerateRequest, LLMEngine, OutputStream, RequestContext, StartContext,
};
use genset_engine_launcher::{LauncherConfig, LauncherEngine};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::support::{LONG, Reports, config, kill, operated, read};

async fn started(config: LauncherConfig) -> (LauncherEngine, watch::Receiver<Load>) {
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    let load = ctx.load.subscribe();
    engine.start(ctx).await.unwrap();
    (engine, load)
}

async fn stream(engine: &LauncherEngine, prompt: u32, max_tokens: u32) -> OutputStream {
    let mut request = GenerateRequest::from_tokens("m", (100..100 + prompt).collect::<Vec<_>>());
    request.stop.max_tokens = Some(max_tokens);
    request.stop.ignore_eos = true;
    request.data_parallel_rank = Some(0);
    let ctx = RequestContext::new("r");
    engine.generate(request, ctx).await.unwrap()
}

async fn until(load: &mut watch::Receiver<Load>, is_so: impl FnMut(&Load) -> bool) -> Load {
    let reached = timeout(LONG, load.wait_for(is_so)).await;
    *reached.unwrap().unwrap()
}

/// Two requests to a server that computes one at a time.
async fn one_runs_and_one_waits(config: LauncherConfig) -> Load {
    let (engine, mut load) = started(config).await;
    let total = load.borrow().kv_total_blocks;
    assert_eq!(load.borrow().kv_used_blocks, 0);
    let both = [
        stream(&engine, 40, 200).await,
        stream(&engine, 40, 200).await,
    ];
    let seen = tokio::select! {
        _ = join_all(both.map(read)) => panic!("all was over before the load was told"),
        seen = until(&mut load, |load| {
            load.waiting_requests == 1 && (load.kv_used_blocks > 0 || total == 0)
        }) => seen,
    };
    assert_eq!((seen.running_requests, seen.kv_total_blocks), (1, total));
    // Nobody reads them any more.
    until(&mut load, |load| {
        load.requests() == 0 && load.kv_used_blocks == 0
    })
    .await;
    engine.cleanup().await.unwrap();
    seen
}

const SLOW: [&str; 3] = ["--max-num-seqs=1", "--delay=0.02", "--block-size=32"];

#[tokio::test]
async fn vllm_tells_what_waits_and_its_blocks() {
    let seen = one_runs_and_one_waits(config("vllm", &SLOW)).await;
    assert_eq!(seen.kv_total_blocks, 2048);
    // One request: its prompt and its answer.
    assert!((2..=8).contains(&seen.kv_used_blocks), "{seen:?}");
}

#[tokio::test]
async fn the_ranks_of_vllm_are_one_load() {
    let flags = [&SLOW[..], &["-dp", "2"]].concat();
    let seen = one_runs_and_one_waits(config("vllm", &flags)).await;
    assert_eq!(seen.kv_total_blocks, 4096);
    assert!((2..=8).contains(&seen.kv_used_blocks), "{seen:?}");
}

#[tokio::test]
async fn sglang_tells_what_waits_and_its_tokens() {
    let mut config = config("sglang", &SLOW);
    config.kv_block_size = NonZeroU32::new(16);
    let seen = one_runs_and_one_waits(config).await;
    assert_eq!(seen.kv_total_blocks, 131_072 / 16);
    assert!((3..=15).contains(&seen.kv_used_blocks), "{seen:?}");
}

#[tokio::test]
async fn what_waits_for_room_in_llama_server_waits() {
    let (engine, mut load) = started(config("llama", &["--delay=0.02"])).await;
    assert_eq!(load.borrow().kv_total_blocks, 0);
    // The context is 256 tokens, and the slots share one cache.
    let both = [
        stream(&engine, 200, 40).await,
        stream(&engine, 200, 40).await,
    ];
    let seen = tokio::select! {
        _ = join_all(both.map(read)) => panic!("all was over before the load was told"),
        seen = until(&mut load, |load| load.waiting_requests == 1) => seen,
    };
    assert_eq!(seen.running_requests, 1);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_tells_no_blocks_has_its_requests_counted() {
    let (engine, mut load) = started(config("trtllm", &["--delay=0.02"])).await;
    let outputs = stream(&engine, 10, 100).await;
    let seen = until(&mut load, |load| load.running_requests == 1).await;
    assert_eq!((seen.waiting_requests, seen.kv_total_blocks), (0, 0));
    drop(outputs);
    until(&mut load, |load| load.requests() == 0).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_server_that_sleeps_is_full_until_it_is_awake() {
    let (engine, mut load) = started(operated("vllm", &[])).await;
    let controls = engine.controls().unwrap();
    controls.sleep(SleepLevel::KvCache).await.unwrap();
    let full = until(&mut load, |load| load.kv_used_blocks > 0).await;
    assert_eq!(full.kv_used_blocks, full.kv_total_blocks);
    controls.wake().await.unwrap();
    until(&mut load, |load| load.kv_used_blocks == 0).await;
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn the_load_of_a_server_that_died_is_not_known() {
    let mut reports = Reports::listen().await;
    let (engine, mut load) = started(config("vllm", &[&reports.flag()])).await;
    assert!(load.borrow().kv_total_blocks > 0);
    kill(reports.next("pid").await);
    until(&mut load, |load| *load == Load::default()).await;
    engine.cleanup().await.unwrap();
}
