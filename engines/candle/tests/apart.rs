//! Disaggregated prefill and decode with a real model: the answer equals the aggregated one bit for bit, and no KV block leaks.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::{
    CancelReason, DrainContext, EngineControls, EngineError, ErrorKind, GenerateRequest,
    GuidedDecoding, LLMEngine, RequestContext, Role, StartContext, TokenId, async_trait,
    controls::Adapter,
    handles::{Load, LoadPublisher},
    transfer::{KvBytes, KvCarrier, KvTransfers, LocalKvCarrier, TransferParams},
};
use genset_conformance::Answer;
use genset_devtools::synthetic::make_adapter;
use genset_devtools::tiny_chat;
use genset_engine_candle::load::Quantization;
use genset_engine_candle::{CandleArgs, CandleEngine, DeviceChoice, DtypeChoice};
use tempfile::TempDir;
use tokio::sync::Notify;

fn args() -> CandleArgs {
    CandleArgs {
        device: DeviceChoice::Cpu,
        kv_cache_memory: Some(ByteSize(8 << 20)),
        max_num_batched_tokens: Some(64),
        ..CandleArgs::default()
    }
}

/// A running engine, and its load.
struct Live {
    engine: CandleEngine,
    load: LoadPublisher,
}

impl Live {
    async fn start(role: Role, id: u64, carrier: &LocalKvCarrier, args: CandleArgs) -> Self {
        Self::start_with(role, carrier.join(id), args).await
    }

    async fn start_with(role: Role, kv_transfers: KvTransfers, args: CandleArgs) -> Self {
        let engine = CandleEngine::from_args(&args, tiny_chat::folder());
        let ctx = StartContext {
            role,
            kv_transfers,
            ..StartContext::detached(1)
        };
        let load = ctx.load.clone();
        engine.start(ctx).await.unwrap();
        Self { engine, load }
    }

    async fn answer(&self, request: GenerateRequest, id: &str) -> Result<Answer, EngineError> {
        let ctx = RequestContext::new(id);
        let outputs = self.engine.generate(request, ctx).await?;
        let answer = Answer::of(outputs.collect().await);
        match answer.error() {
            Some(error) => Err(error.clone()),
            None => Ok(answer),
        }
    }

    /// Runs the first leg; returns where the blocks are.
    async fn prefill(&self, request: &GenerateRequest, id: &str) -> (Answer, TransferParams) {
        let answer = self.answer(request.clone(), id).await.unwrap();
        let transfer = answer.finished().unwrap().transfer.clone().unwrap();
        (answer, transfer)
    }

    /// Waits until no sequence holds a block.
    async fn until_free(&self) {
        let mut load = self.load.subscribe();
        let is_free = |load: &Load| load.kv_used_blocks == 0 && load.running_requests == 0;
        let freed = load.wait_for(is_free);
        let freed = tokio::time::timeout(Duration::from_secs(60), freed);
        freed.await.unwrap().unwrap();
    }
}

/// Prompts around the boundaries of blocks and steps.
fn prompt(tokens: u32) -> Vec<TokenId> {
    (0..tokens)
        .map(|place| (place * 7 + 11) % 400 + 3)
        .collect()
}

fn request(prompt_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("tiny-chat", prompt(prompt_tokens));
    request.stop.max_tokens = Some(24);
    request.stop.ignore_eos = true;
    request
}

fn requests() -> Vec<GenerateRequest> {
    let lengths = [1, 2, 15, 16, 17, 33, 64, 65, 150];
    let mut requests: Vec<GenerateRequest> = lengths.into_iter().map(request).collect();
    let mut seeded = request(40);
    seeded.sampling.temperature = Some(0.9);
    seeded.sampling.seed = Some(7);
    seeded.sampling.top_p = Some(0.9);
    seeded.sampling.repetition_penalty = Some(1.1);
    seeded.output.logprobs = Some(3);
    requests.push(seeded);
    let mut guided = request(21);
    guided.guided = Some(GuidedDecoding::Regex("[a-c]{3,40}".into()).into());
    requests.push(guided);
    requests
}

async fn both_legs_answer_as_one_instance(args: CandleArgs) {
    let carrier = LocalKvCarrier::default();
    let whole = Live::start(Role::Aggregated, 1, &carrier, args.clone()).await;
    let prefill = Live::start(Role::Prefill, 2, &carrier, args.clone()).await;
    let decode = Live::start(Role::Decode, 3, &carrier, args).await;
    for (place, request) in requests().into_iter().enumerate() {
        let id = place.to_string();
        let expected = whole.answer(request.clone(), &id).await.unwrap();
        // Twice: the second time the decode instance has cached most of the blocks.
        for _ in 0..2 {
            let (first, transfer) = prefill.prefill(&request, &id).await;
            assert_eq!(first.tokens(), expected.tokens()[..1]);
            let mut second = request.clone();
            second.transfer = Some(transfer);
            let answer = decode.answer(second, &id).await.unwrap();
            assert_eq!(answer.tokens(), expected.tokens(), "{request:?}");
            assert_eq!(answer.logprobs(), expected.logprobs());
            assert_eq!(answer.reason(), expected.reason());
        }
    }
    prefill.until_free().await;
    decode.until_free().await;
    for live in [whole, prefill, decode] {
        live.engine.cleanup().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_is_the_aggregated_one_bit_for_bit() {
    both_legs_answer_as_one_instance(args()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_it_is_with_a_cache_of_f32() {
    both_legs_answer_as_one_instance(CandleArgs {
        kv_cache_dtype: DtypeChoice::F32,
        ..args()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_another_layout_or_of_other_weights_are_refused_by_what_differs() {
    let other_layout = CandleArgs {
        kv_cache_dtype: DtypeChoice::F32,
        ..args()
    };
    let other_weights = CandleArgs {
        quantize: Quantization::None,
        ..args()
    };
    for (other, said) in [
        (other_layout, ["f16", "f32"]),
        (other_weights, ["of the weights", "those here"]),
    ] {
        let carrier = LocalKvCarrier::default();
        let prefill = Live::start(Role::Prefill, 1, &carrier, args()).await;
        let decode = Live::start(Role::Decode, 2, &carrier, other).await;
        let (_, transfer) = prefill.prefill(&request(40), "r").await;
        let mut second = request(40);
        second.transfer = Some(transfer);
        let error = decode.answer(second, "r").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at().map(|at| at.name()), Some("transfer"));
        for text in said {
            assert!(error.message().contains(text), "{error}");
        }
        // The instance can still serve a whole request.
        let mut whole = request(40);
        whole.transfer = Some(TransferParams::none());
        assert_eq!(decode.answer(whole, "r").await.unwrap().tokens().len(), 24);
        prefill.engine.abort(&RequestContext::new("r")).await;
        prefill.until_free().await;
    }
}

/// An adapter for the model, under the same name for every seed.
fn adapter(folder: &TempDir, seed: u64) -> Adapter {
    let modules = [
        ("self_attn.q_proj", [256, 256]),
        ("self_attn.v_proj", [256, 128]),
        ("mlp.down_proj", [512, 256]),
    ];
    let path = folder.path().join(seed.to_string());
    make_adapter(&path, &modules, 4, 8, seed).unwrap();
    Adapter {
        name: "a".into(),
        source: path.to_str().unwrap().into(),
    }
}

/// Operators exchange the adapter of a name on one worker after another.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_another_adapter_of_that_name_are_refused() {
    let carrier = LocalKvCarrier::default();
    let prefill = Live::start(Role::Prefill, 1, &carrier, args()).await;
    let decode = Live::start(Role::Decode, 2, &carrier, args()).await;
    let folder = tempfile::tempdir().unwrap();
    let new = adapter(&folder, 2);
    prefill
        .engine
        .load_adapter(adapter(&folder, 1))
        .await
        .unwrap();
    decode.engine.load_adapter(new.clone()).await.unwrap();
    let legs = async |id: &str| {
        let mut asked = request(40);
        asked.adapter = Some("a".into());
        let (first, transfer) = prefill.prefill(&asked, id).await;
        asked.transfer = Some(transfer);
        (first, decode.answer(asked, id).await)
    };
    let (_, answer) = legs("old").await;
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.at().map(|at| at.name()), Some("transfer"));
    prefill.engine.unload_adapter("a").await.unwrap();
    prefill.engine.load_adapter(new).await.unwrap();
    let (first, answer) = legs("new").await;
    assert_eq!(first.tokens(), answer.unwrap().tokens()[..1]);
    prefill.engine.abort(&RequestContext::new("old")).await;
    prefill.until_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn held_blocks_are_freed_however_their_request_ends() {
    let carrier = LocalKvCarrier::default();
    let brief = CandleArgs {
        kv_lease: 1.try_into().unwrap(),
        ..args()
    };
    let prefill = Live::start(Role::Prefill, 1, &carrier, brief).await;
    let decode = Live::start(Role::Decode, 2, &carrier, args()).await;
    // Their lease is over.
    let (_, late) = prefill.prefill(&request(100), "a").await;
    prefill.until_free().await;
    let mut second = request(100);
    second.transfer = Some(late);
    let error = decode.answer(second, "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StreamIncomplete, "{error}");
    decode.until_free().await;
    // The decode leg is cancelled, or its reader leaves, during the fetch.
    for is_cancelled in [true, false] {
        let (_, transfer) = prefill.prefill(&request(100), "b").await;
        let mut second = request(100);
        second.transfer = Some(transfer);
        let ctx = RequestContext::new("b");
        let mut outputs = decode.engine.generate(second, ctx.clone()).await.unwrap();
        if is_cancelled {
            ctx.cancel(CancelReason::Client);
            while outputs.next().await.is_some() {}
        }
        drop(outputs);
        prefill.until_free().await;
        decode.until_free().await;
    }
    // The prefill instance is gone.
    let (_, lost) = prefill.prefill(&request(100), "c").await;
    let deadline = Duration::from_millis(1);
    prefill
        .engine
        .drain(DrainContext { deadline })
        .await
        .unwrap();
    prefill.engine.cleanup().await.unwrap();
    let mut second = request(100);
    second.transfer = Some(lost);
    let error = decode.answer(second, "c").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StreamIncomplete, "{error}");
    decode.until_free().await;
}

/// A carrier that fetches nothing, and fails on demand.
#[derive(Debug, Default)]
struct StuckCarrier {
    is_asked: Notify,
    fails: Notify,
}

#[async_trait]
impl KvCarrier for StuckCarrier {
    async fn fetch(
        &self,
        _transfer: &TransferParams,
        _ctx: RequestContext,
    ) -> Result<KvBytes, EngineError> {
        self.is_asked.notify_one();
        self.fails.notified().await;
        Err(KvTransfers::lost("as a test has it"))
    }
}

/// A sequence that loses its place during the fetch computes its prompt itself, so the blocks may be lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_ends_with_the_place_it_is_for() {
    // 16 blocks of 16 tokens.
    let few = CandleArgs {
        kv_cache_memory: Some(ByteSize(512 << 10)),
        ..args()
    };
    let carrier = LocalKvCarrier::default();
    let whole = Live::start(Role::Aggregated, 1, &carrier, args()).await;
    let prefill = Live::start(Role::Prefill, 2, &carrier, args()).await;
    let stuck = Arc::new(StuckCarrier::default());
    let door = KvTransfers::new(3);
    door.connect(stuck.clone(), None);
    let decode = Arc::new(Live::start_with(Role::Decode, door, few).await);
    let expected = whole.answer(request(100), "whole").await.unwrap();
    let (_, transfer) = prefill.prefill(&request(100), "yields").await;
    let mut yields = request(100);
    yields.transfer = Some(transfer);
    let mut yielding = tokio::task::JoinSet::new();
    let decoding = decode.clone();
    yielding.spawn(async move { decoding.answer(yields, "yields").await });
    stuck.is_asked.notified().await;
    let mut urgent = request(180);
    urgent.priority = 1;
    urgent.transfer = Some(TransferParams::none());
    decode.answer(urgent, "urgent").await.unwrap();
    stuck.fails.notify_one();
    let answer = yielding.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!(answer.tokens(), expected.tokens());
    decode.until_free().await;
}

/// The prefill instance may be gone by then.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_whose_blocks_are_here_depends_on_nobody() {
    let carrier = LocalKvCarrier::default();
    let prefill = Live::start(Role::Prefill, 1, &carrier, args()).await;
    let decode = Live::start(Role::Decode, 2, &carrier, args()).await;
    // Two full blocks and the last token.
    let asked = request(33);
    let mut answers = Vec::new();
    for (id, is_gone) in [("a", false), ("b", true)] {
        let (_, transfer) = prefill.prefill(&asked, id).await;
        if is_gone {
            let deadline = Duration::from_millis(1);
            let ctx = DrainContext { deadline };
            prefill.engine.drain(ctx).await.unwrap();
            prefill.engine.cleanup().await.unwrap();
        }
        let mut second = asked.clone();
        second.transfer = Some(transfer);
        answers.push(decode.answer(second, id).await.unwrap().tokens());
    }
    assert_eq!(answers[0], answers[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_share_the_cache_and_leave_nothing() {
    let carrier = LocalKvCarrier::default();
    let whole = Arc::new(Live::start(Role::Aggregated, 1, &carrier, args()).await);
    let prefill = Arc::new(Live::start(Role::Prefill, 2, &carrier, args()).await);
    let decode = Arc::new(Live::start(Role::Decode, 3, &carrier, args()).await);
    let mut all = tokio::task::JoinSet::new();
    for place in 0..24 {
        let (whole, prefill, decode) = (whole.clone(), prefill.clone(), decode.clone());
        all.spawn(async move {
            let id = place.to_string();
            let request = request(20 + place * 9);
            let expected = whole.answer(request.clone(), &id).await.unwrap();
            let (_, transfer) = prefill.prefill(&request, &id).await;
            let mut second = request;
            second.transfer = Some(transfer);
            let answer = decode.answer(second, &id).await.unwrap();
            assert_eq!(answer.tokens(), expected.tokens());
        });
    }
    while let Some(ended) = all.join_next().await {
        ended.unwrap();
    }
    prefill.until_free().await;
    decode.until_free().await;
}
