//! Numbers at the limits of their types, sent through a Worker's adapter to scheduler, model and sampler. Tests are built with
//! overflow checks, so an overflow ends in an `Internal` error here.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../../backend-common/tests/door/mod.rs"]
mod door;

use std::sync::Arc;

use door::{Door, Served};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::ports::Generate;
use genset_backend_common::worker::{Worker, WorkerConfig};
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, MetricsRegistry, Output, RequestContext,
};
use genset_devtools::tiny_chat;
use genset_engine_candle::{CandleArgs, CandleEngine};

const MOST: u32 = u32::MAX;

type Change = fn(&mut GenerateRequest);

const HOSTILE: &[(&str, Change)] = &[
    ("the largest seed", |r| {
        (r.sampling.seed, r.sampling.temperature) = (Some(u64::MAX), Some(2.0));
    }),
    ("the largest top_k", |r| {
        (r.sampling.top_k, r.sampling.temperature) = (Some(MOST), Some(1.0));
    }),
    ("the smallest top_p and temperature", |r| {
        r.sampling.top_p = Some(f32::MIN_POSITIVE);
        r.sampling.temperature = Some(f32::MIN_POSITIVE);
    }),
    ("the largest max_tokens", |r| r.stop.max_tokens = Some(MOST)),
    ("no max_tokens", |r| r.stop.max_tokens = None),
    ("min_tokens above max_tokens", |r| r.stop.min_tokens = 5),
    ("the largest min_tokens", |r| {
        (r.stop.min_tokens, r.stop.max_tokens) = (MOST, Some(MOST));
    }),
    ("a stop token that is no token", |r| {
        r.stop.stop_token_ids = [MOST].into();
    }),
    ("a bias on no token", |r| {
        r.sampling.logit_bias = [(MOST, 100.0), (0, -100.0)].into();
    }),
    ("the largest logprobs", |r| r.output.logprobs = Some(MOST)),
    ("the largest prompt_logprobs", |r| {
        r.output.prompt_logprobs = Some(MOST);
    }),
    ("the lowest priority", |r| r.priority = i32::MIN),
    ("more resumed tokens than there are", |r| {
        r.resumed_tokens = MOST;
        r.sampling.seed = Some(u64::MAX);
        r.sampling.temperature = Some(1.0);
    }),
    ("the largest rank", |r| r.data_parallel_rank = Some(MOST)),
    ("the largest penalties", |r| {
        r.sampling.repetition_penalty = Some(f32::MAX);
        r.sampling.presence_penalty = Some(2.0);
        r.sampling.frequency_penalty = Some(2.0);
    }),
    ("a prompt of one token that is none", |r| {
        *r = GenerateRequest::from_tokens("m", vec![MOST]);
    }),
    ("no prompt", |r| {
        *r = GenerateRequest::from_tokens("m", Vec::new());
    }),
];

/// How a request ended, including its stream.
async fn end(generate: &dyn Generate, request: GenerateRequest) -> Result<(), EngineError> {
    let ctx = RequestContext::new("hostile");
    let mut outputs = generate.generate(request, ctx).await?;
    while let Some(item) = outputs.next().await {
        if let Output::Finished(_) = item? {
            break;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_number_in_a_request_overflows() {
    let args = CandleArgs {
        kv_cache_memory: Some(ByteSize(8 << 20)),
        ..CandleArgs::default()
    };
    let engine = Arc::new(CandleEngine::from_args(&args, tiny_chat::folder()));
    let served = Served::new(None);
    let (door, metrics) = (Arc::new(Door(served.clone())), MetricsRegistry::default());
    // Requests that ask for all the room end soon.
    let config = WorkerConfig {
        context_length_tokens: Some(256),
        ..WorkerConfig::default()
    };
    let worker = Worker::new(1, engine, config, door, metrics).spawn();
    worker.ready().await.unwrap();
    let generate = served.borrow().clone().unwrap();
    let plain = || {
        let mut request = GenerateRequest::from_tokens("m", (1..200).collect());
        request.stop.max_tokens = Some(4);
        request
    };
    let ends = HOSTILE.iter().map(|(what, change)| {
        let mut request = plain();
        change(&mut request);
        let generate = Arc::clone(&generate);
        async move {
            if let Err(error) = end(&*generate, request).await {
                assert_ne!(error.kind(), ErrorKind::Internal, "{what}: {error}");
            }
        }
    });
    join_all(ends).await;
    end(&*generate, plain()).await.unwrap();
    assert_eq!(worker.shutdown().await.outcome.exit_code(), 0);
}
