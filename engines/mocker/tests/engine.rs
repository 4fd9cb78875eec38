//! The mocker's behaviour in time and memory, on a paused clock.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::output::Output;
use genset_backend_common::{
    DrainContext, ErrorKind, GenerateRequest, LLMEngine, RequestContext, StartContext, TokenId,
};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel, TimeModel};
use tokio::time::Instant;

use crate::common::{Answer, answer, args, engine};

async fn started(args: MockerArgs) -> (MockerEngine, StartContext) {
    let (engine, start) = (engine(args), StartContext::detached(1));
    engine.start(start.clone()).await.unwrap();
    (engine, start)
}

/// A prompt that shares its first tokens with others of the same family.
fn prompt(family: u32, tokens: u32) -> Vec<TokenId> {
    (0..tokens)
        .map(|place| (family * 97 + place) % 1000)
        .collect()
}

fn request(prompt: Vec<TokenId>, max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", prompt);
    request.stop.max_tokens = Some(max_tokens);
    request
}

#[tokio::test(start_paused = true)]
async fn a_step_takes_what_its_model_says_over_the_speedup() {
    for (speedup_ratio, expected) in [(1.0, [100, 110, 120, 130]), (10.0, [10, 11, 12, 13])] {
        let (engine, start) = started(MockerArgs {
            prefill_ms: TimeModel::constant(100.0),
            decode_ms: TimeModel::constant(10.0),
            speedup_ratio,
            ..args()
        })
        .await;
        let answer = answer(&engine, request(prompt(1, 40), 4)).await;
        assert_eq!(answer.at_ms, expected, "{speedup_ratio}");
        assert_eq!(start.health.steps(), 4);
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn prompts_are_chunked_and_cached_prompts_take_no_time() {
    let (engine, _) = started(MockerArgs {
        // A millisecond per token.
        prefill_ms: TimeModel {
            linear: 1.0,
            ..TimeModel::default()
        },
        max_num_batched_tokens: 64,
        ..args()
    })
    .await;
    let first = answer(&engine, request(prompt(1, 161), 1)).await;
    assert_eq!(
        (first.at_ms, first.finished.usage.cached_tokens),
        (vec![161], Some(0))
    );
    let again = answer(&engine, request(prompt(1, 161), 1)).await;
    assert_eq!(
        (again.at_ms, again.finished.usage.cached_tokens),
        (vec![1], Some(160))
    );

    // A prompt beside an answer is computed in chunks of the rest of the step's budget.
    let long = request(prompt(2, 1), 8);
    let late = async {
        tokio::time::sleep(Duration::from_micros(500)).await;
        answer(&engine, request(prompt(3, 126), 1)).await
    };
    let (beside, late) = tokio::join!(answer(&engine, long), late);
    let mut gaps: Vec<u128> = beside
        .at_ms
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .collect();
    gaps.sort_unstable();
    assert_eq!(gaps, [1, 1, 1, 1, 1, 64, 64], "{:?}", beside.at_ms);
    assert_eq!(late.tokens.len(), 1);
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_chunks_the_context_is_a_step() {
    let engine = engine(MockerArgs {
        enable_chunked_prefill: false,
        ..args()
    });
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(config.context_length_tokens, 512);
    let whole = answer(&engine, request(prompt(1, 500), 1000)).await;
    assert_eq!(whole.tokens.len(), 12);
    let refused = engine
        .generate(request(prompt(1, 513), 1), RequestContext::new("r"))
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ContextLengthExceeded);
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_prefix_caching_nothing_is_reused_or_published() {
    let engine = engine(MockerArgs {
        enable_prefix_caching: false,
        ..args()
    });
    let start = StartContext::detached(1);
    let config = engine.start(start.clone()).await.unwrap();
    assert!(!config.capabilities.kv_events);
    for _ in 0..2 {
        let answer = answer(&engine, request(prompt(1, 100), 2)).await;
        assert_eq!(answer.finished.usage.cached_tokens, Some(0));
    }
    assert_eq!(start.kv_events.subscribe().snapshot.last_event_id, 0);
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn more_than_fits_is_preempted_and_answers_are_the_same() {
    let tight = MockerArgs {
        num_gpu_blocks: 24,
        watermark: 0.0,
        ..args()
    };
    let (engine, _) = started(tight).await;
    let requests = || (1..5).map(|family| request(prompt(family, 20), 120));
    let alone = join_all(requests().map(|request| async {
        let (roomy, _) = started(args()).await;
        let answer = answer(&roomy, request).await;
        roomy.cleanup().await.unwrap();
        answer.tokens
    }))
    .await;
    let together = join_all(requests().map(|request| answer(&engine, request))).await;
    let together: Vec<_> = together.into_iter().map(|answer| answer.tokens).collect();
    assert_eq!(together, alone);
    let stats = engine.stats();
    assert!(stats.preemptions > 0, "{stats:?}");
    assert_eq!((stats.active_requests, stats.kv_used_blocks), (0, 0));
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn larger_priorities_are_served_first() {
    let (engine, _) = started(MockerArgs {
        max_num_seqs: 1,
        ..args()
    })
    .await;
    let ends = join_all([0, 0, 5].into_iter().map(|priority| {
        let mut request = request(prompt(1, 4), 20);
        request.priority = priority;
        let engine = &engine;
        async move { *answer(engine, request).await.at_ms.last().unwrap() }
    }))
    .await;
    assert!(ends[2] < ends[0] && ends[0] < ends[1], "{ends:?}");
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn ranks_share_the_work_have_their_own_caches_and_can_be_named() {
    let (engine, start) = started(MockerArgs {
        dp_size: 2,
        max_num_seqs: 1,
        ..args()
    })
    .await;
    let on = |rank| {
        let mut request = request(prompt(1, 33), 4);
        request.data_parallel_rank = rank;
        answer(&engine, request)
    };
    let cached = |answer: Answer| answer.finished.usage.cached_tokens;
    assert_eq!(cached(on(Some(1)).await), Some(0));
    assert_eq!(cached(on(Some(1)).await), Some(32));
    assert_eq!(cached(on(Some(0)).await), Some(0));
    // Two concurrent requests run side by side, while one rank would take them in turn.
    let (first, second) = tokio::join!(on(None), on(None));
    assert_eq!(first.at_ms, second.at_ms);
    let (first, second) = tokio::join!(on(Some(0)), on(Some(0)));
    assert!(first.at_ms.last() < second.at_ms.first());
    // Both ranks hold the same two blocks; together they are two.
    assert_eq!(start.kv_events.subscribe().snapshot.blocks.len(), 2);
    assert_eq!(start.load.subscribe().borrow().kv_total_blocks, 1024);
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_is_behind_holds_up_nobody_and_loses_nothing() {
    let (engine, _) = started(args()).await;
    let mut slow = engine
        .generate(request(prompt(1, 4), 300), RequestContext::new("slow"))
        .await
        .unwrap();
    let quick = answer(&engine, request(prompt(2, 4), 300)).await;
    assert_eq!(quick.tokens.len(), 300);
    let ahead = engine.stats().produced_tokens - 300;
    assert!(ahead < 100, "{ahead} tokens were made for nobody");
    let mut count = 0;
    while let Some(item) = slow.next().await {
        let item = item.unwrap();
        count += item.token_count();
        if let Output::Finished(finished) = item {
            assert_eq!(finished.usage.completion_tokens, 300);
        }
    }
    assert_eq!(count, 300);
    engine.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_slow_start_says_so_and_can_be_given_up() {
    let slow = engine(MockerArgs {
        startup_time: Duration::from_secs(60),
        ..args()
    });
    let start = StartContext::detached(1);
    let progress = start.progress.subscribe();
    let given_up = tokio::time::timeout(Duration::from_secs(1), slow.start(start)).await;
    given_up.unwrap_err();
    assert!(progress.borrow().stage.contains("pretending"));
    slow.cleanup().await.unwrap();

    let slow = engine(MockerArgs {
        startup_time: Duration::from_secs(60),
        ..args()
    });
    let began = Instant::now();
    slow.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 60);
    let deadline = Duration::from_secs(1);
    slow.drain(DrainContext { deadline }).await.unwrap();
    slow.cleanup().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_crash_lets_requests_move_and_is_reported() {
    let (engine, start) = started(args()).await;
    let mut outputs = engine
        .generate(request(prompt(1, 4), 300), RequestContext::new("r"))
        .await
        .unwrap();
    outputs.next().await.unwrap().unwrap();
    assert!(engine.crash("the device is lost"));
    let error = loop {
        match outputs.next().await.unwrap() {
            Ok(item) => assert!(!item.is_terminal(), "{item:?}"),
            Err(error) => break error,
        }
    };
    assert!(error.policy().is_migratable, "{error}");
    assert_eq!(start.health.died().await, "the device is lost");
    engine.cleanup().await.unwrap();
    assert!(!engine.crash("again"));
}

#[test]
fn settings_and_models_that_cannot_work_are_refused() {
    let bad = MockerArgs {
        dp_size: 0,
        ..args()
    };
    let model = MockerModel::new(10, 10);
    let error = MockerEngine::try_new(bad, model.clone()).unwrap_err();
    assert!(error.message().contains("dp_size"), "{error}");
    for model in [
        MockerModel::new(0, 10),
        MockerModel::new(10, 0),
        MockerModel {
            unused_tokens: (0..10).collect(),
            ..model
        },
    ] {
        let error = MockerEngine::try_new(args(), model).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
