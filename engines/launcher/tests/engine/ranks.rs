//! Data-parallel ranks of stand-ins that report them like the real servers: how many there are, which one serves a request, and
//! what each one's cache contains.

use std::num::NonZeroU32;

use genset_backend_common::kv::{BlockHash, KvEventPublisher, hash_blocks};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, LLMEngine, RequestContext, StartContext,
};
use genset_engine_launcher::{ExtraArgs, LauncherEngine};
use tokio::time::timeout;

use crate::support::{LONG, Reports, config, read};

const BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(32).unwrap();

/// A prompt of two full blocks and a part of one.
fn prompt() -> Vec<u32> {
    (100..170).collect()
}

/// Sends a request to a rank; returns the number of prompt tokens found in its cache.
async fn ask(engine: &LauncherEngine, rank: u32) -> Result<Option<u32>, EngineError> {
    let mut request = GenerateRequest::from_tokens("m", prompt());
    request.stop.max_tokens = Some(2);
    request.data_parallel_rank = Some(rank);
    let ctx = RequestContext::new("r");
    let finished = read(engine.generate(request, ctx).await?).await.end?;
    Ok(finished.usage.cached_tokens)
}

fn blocks(cache: &KvEventPublisher) -> Vec<BlockHash> {
    let snapshot = cache.subscribe().snapshot;
    let mut blocks: Vec<_> = snapshot
        .blocks
        .into_iter()
        .map(|block| block.hash)
        .collect();
    blocks.sort();
    blocks
}

/// Waits until a cache contains these blocks.
async fn until(cache: &KvEventPublisher, expected: &[BlockHash]) {
    let mut changes = cache.subscribe();
    let reached = async {
        while blocks(cache) != expected {
            changes.next().await.unwrap();
        }
    };
    timeout(LONG, reached).await.unwrap();
}

#[tokio::test]
async fn a_rank_that_is_named_serves_and_tells_of_its_cache() {
    let mut reports = Reports::listen().await;
    let mut config = config("vllm", &["-dp", "2", &reports.flag()]);
    config.kv_block_size = Some(BLOCK_SIZE);
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    let kv_events = ctx.kv_events.clone();
    let declared = engine.start(ctx).await.unwrap();
    assert_eq!(declared.data_parallel_size, 2);
    assert!(declared.capabilities.kv_events && declared.capabilities.kv_ranks);
    // vLLM reports the blocks of all ranks.
    assert_eq!(declared.kv_total_blocks, Some(4096));

    let mut expected = hash_blocks(None, &prompt(), BLOCK_SIZE);
    expected.sort();
    let ranks = [0, 1].map(|rank| kv_events.known_rank(rank).unwrap());
    assert_eq!(ask(&engine, 1).await.unwrap(), Some(0));
    let asked = reports.next("request").await;
    assert_eq!(asked["headers"]["x-data-parallel-rank"], "1");
    until(&ranks[1], &expected).await;
    until(&kv_events, &expected).await;
    assert_eq!(blocks(&ranks[0]), []);
    assert_eq!(ask(&engine, 1).await.unwrap(), Some(64));
    assert_eq!(ask(&engine, 0).await.unwrap(), Some(0));
    until(&ranks[0], &expected).await;
    assert_eq!(blocks(&kv_events), expected);
    let error = ask(&engine, 2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    engine.cleanup().await.unwrap();
    assert_eq!(blocks(&kv_events), []);
}

/// Workers can serve a model together if their declarations differ only in the ranks.
#[tokio::test]
async fn servers_of_one_and_of_two_ranks_declare_the_same_abilities() {
    let mut declared = Vec::new();
    for ranks in ["1", "2"] {
        let mut config = config("vllm", &["-dp", ranks]);
        config.kv_block_size = Some(BLOCK_SIZE);
        let engine = LauncherEngine::new(config);
        let told = engine.start(StartContext::detached(1)).await.unwrap();
        assert!(told.capabilities.kv_events);
        declared.push(told);
        engine.cleanup().await.unwrap();
    }
    assert_eq!(declared[0].data_parallel_size, 1);
    assert_eq!(declared[0].capabilities, declared[1].capabilities);
}

#[tokio::test]
async fn trtllm_tells_of_its_cache_at_a_route() {
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("trtllm.yaml");
    let kept = "kv_cache_config: {event_buffer_max_size: 1024}";
    std::fs::write(&settings, kept).unwrap();
    let mut config = config("trtllm", &[]);
    config.extra = Some(ExtraArgs::load(&settings).unwrap());
    let engine = LauncherEngine::new(config);
    let ctx = StartContext::detached(1);
    let kv_events = ctx.kv_events.clone();
    let declared = engine.start(ctx).await.unwrap();
    assert!(declared.capabilities.kv_events);
    assert_eq!(declared.kv_block_size, Some(BLOCK_SIZE));
    ask(&engine, 0).await.unwrap();
    let mut expected = hash_blocks(None, &prompt(), BLOCK_SIZE);
    expected.sort();
    until(&kv_events, &expected).await;
    engine.cleanup().await.unwrap();
    assert_eq!(blocks(&kv_events), []);
}

#[tokio::test]
async fn sglang_gets_the_rank_in_the_body_and_its_events_are_not_followed() {
    let mut reports = Reports::listen().await;
    let engine = LauncherEngine::new(config("sglang", &["--dp-size=2", &reports.flag()]));
    let declared = engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(declared.data_parallel_size, 2);
    assert!(!declared.capabilities.kv_events && !declared.capabilities.kv_ranks);
    assert_eq!(declared.kv_total_blocks, Some(2 * 131_072));
    ask(&engine, 1).await.unwrap();
    let asked = reports.next("request").await;
    assert_eq!(asked["body"]["routed_dp_rank"], 1);
    engine.cleanup().await.unwrap();
}
