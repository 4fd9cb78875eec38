//! A mocker for tests: a small cache, so that it fills up, and steps of a millisecond; and a reader of its answers.

#![allow(dead_code, reason = "each test file uses a part")]

use futures_util::StreamExt;
use genset_backend_common::output::{Finished, Output};
use genset_backend_common::{GenerateRequest, LLMEngine, RequestContext, TokenId};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel, TimeModel};
use tokio::time::Instant;

/// The settings.
pub(crate) fn args() -> MockerArgs {
    MockerArgs {
        num_gpu_blocks: 512,
        max_num_seqs: 16,
        max_num_batched_tokens: 512,
        prefill_ms: TimeModel::constant(1.0),
        decode_ms: TimeModel::constant(1.0),
        ..MockerArgs::default()
    }
}

/// An engine with a vocabulary of a thousand tokens.
pub(crate) fn engine(args: MockerArgs) -> MockerEngine {
    MockerEngine::try_new(args, MockerModel::new(1000, 4096)).unwrap()
}

/// The result of a request, and when it came, in milliseconds since it was sent.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) at_ms: Vec<u128>,
    pub(crate) finished: Finished,
}

pub(crate) async fn answer(engine: &MockerEngine, request: GenerateRequest) -> Answer {
    let began = Instant::now();
    let mut outputs = engine
        .generate(request, RequestContext::new("r"))
        .await
        .unwrap();
    let (mut tokens, mut at_ms) = (Vec::new(), Vec::new());
    loop {
        let chunk = match outputs.next().await.unwrap().unwrap() {
            Output::Tokens(chunk) => chunk,
            Output::Finished(finished) => {
                tokens.extend(finished.last.token_ids.iter());
                at_ms.resize(tokens.len(), began.elapsed().as_millis());
                return Answer {
                    tokens,
                    at_ms,
                    finished: *finished,
                };
            }
            Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => {
                panic!("an answer without tokens")
            }
        };
        tokens.extend(chunk.token_ids);
        at_ms.resize(tokens.len(), began.elapsed().as_millis());
    }
}
