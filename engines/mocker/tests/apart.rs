//! Disaggregated prefill and decode: how a fetch of KV blocks ends.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{
    DrainContext, EngineError, GenerateRequest, LLMEngine, RequestContext, Role, StartContext,
    TokenId, async_trait,
    transfer::{KvBytes, KvCarrier, KvTransfers, LocalKvCarrier, TransferParams},
};
use genset_engine_mocker::{MockerArgs, MockerEngine, TimeModel};
use tokio::sync::Notify;

use crate::common::{answer, args, engine};

async fn started(role: Role, kv_transfers: KvTransfers, args: MockerArgs) -> MockerEngine {
    let engine = engine(args);
    let start = StartContext {
        role,
        kv_transfers,
        ..StartContext::detached(1)
    };
    engine.start(start).await.unwrap();
    engine
}

fn request(prompt_tokens: u32) -> GenerateRequest {
    let prompt: Vec<TokenId> = (0..prompt_tokens).collect();
    let mut request = GenerateRequest::from_tokens("m", prompt);
    request.stop.max_tokens = Some(4);
    request
}

/// The same request for a decode instance, with the blocks that a prefill instance computed.
async fn prefilled(prefill: &MockerEngine, request: &GenerateRequest) -> GenerateRequest {
    let mut second = request.clone();
    second.transfer = answer(prefill, second.clone()).await.finished.transfer;
    assert!(second.transfer.is_some());
    second
}

/// The prefill instance may be gone by then.
#[tokio::test(start_paused = true)]
async fn an_answer_whose_blocks_are_here_depends_on_nobody() {
    let carrier = LocalKvCarrier::default();
    let prefill = started(Role::Prefill, carrier.join(1), args()).await;
    let decode = started(Role::Decode, carrier.join(2), args()).await;
    // Two full blocks and the last token.
    let asked = request(33);
    let first = prefilled(&prefill, &asked).await;
    let expected = answer(&decode, first).await.tokens;
    let second = prefilled(&prefill, &asked).await;
    let deadline = Duration::from_millis(1);
    prefill.drain(DrainContext { deadline }).await.unwrap();
    prefill.cleanup().await.unwrap();
    assert_eq!(answer(&decode, second).await.tokens, expected);
    decode.cleanup().await.unwrap();
}

/// Its prompt was computed already: the step that repeats the last token for its logits is one of decode.
#[tokio::test(start_paused = true)]
async fn an_answer_whose_blocks_arrived_takes_no_time_of_a_prefill() {
    let carrier = LocalKvCarrier::default();
    let timed = || MockerArgs {
        prefill_ms: TimeModel::constant(100.0),
        decode_ms: TimeModel::constant(10.0),
        ..args()
    };
    let prefill = started(Role::Prefill, carrier.join(1), timed()).await;
    let decode = started(Role::Decode, carrier.join(2), timed()).await;
    // The first time the blocks are fetched, the second time they are there.
    for _ in 0..2 {
        let asked = prefilled(&prefill, &request(33)).await;
        let at_ms = answer(&decode, asked).await.at_ms;
        assert!((10..20).contains(&at_ms[0]), "{at_ms:?}");
        assert_eq!(at_ms[3] - at_ms[0], 30, "{at_ms:?}");
    }
    let mut alone = request(40);
    alone.transfer = Some(TransferParams::none());
    let at_ms = answer(&decode, alone).await.at_ms;
    assert_eq!(
        at_ms[0], 100,
        "a prompt that it computes itself is a prefill"
    );
    for engine in [prefill, decode] {
        engine.cleanup().await.unwrap();
    }
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
#[tokio::test(start_paused = true)]
async fn a_fetch_ends_with_the_place_it_is_for() {
    let few = MockerArgs {
        num_gpu_blocks: 16,
        ..args()
    };
    let prefill = started(Role::Prefill, KvTransfers::new(1), args()).await;
    let whole = started(Role::Aggregated, KvTransfers::new(2), args()).await;
    let stuck = Arc::new(StuckCarrier::default());
    let door = KvTransfers::new(3);
    door.connect(stuck.clone(), None);
    let decode = started(Role::Decode, door, few).await;
    let expected = answer(&whole, request(100)).await.tokens;
    let yields = prefilled(&prefill, &request(100)).await;
    let mut urgent = request(180);
    urgent.priority = 1;
    urgent.transfer = Some(TransferParams::none());
    let urgent = async {
        stuck.is_asked.notified().await;
        answer(&decode, urgent).await;
        stuck.fails.notify_one();
    };
    let (answer, ()) = tokio::join!(answer(&decode, yields), urgent);
    assert_eq!(answer.tokens, expected);
    for engine in [prefill, whole, decode] {
        engine.cleanup().await.unwrap();
    }
}
