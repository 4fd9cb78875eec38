//! The engine with checkouts that `transformers` made, and with a failing model.

use futures_util::StreamExt;
use genset_backend_common::output::Finished;
use genset_backend_common::{
    ErrorKind, Output, TokenId,
    config::{Deviation, InputKind},
};

use super::loading::engine_config;
use super::*;
use crate::DeviceChoice;
use crate::load::OpenEmbedder;
use crate::load::tests::encoder;
use crate::model::embedder::StepRoom;

fn args() -> CandleArgs {
    CandleArgs {
        device: DeviceChoice::Cpu,
        ..CandleArgs::default()
    }
}

fn inputs(inputs: &[&[TokenId]]) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", Vec::new());
    let inputs: Vec<Vec<TokenId>> = inputs.iter().map(|input| input.to_vec()).collect();
    request.input = Input::Embed(inputs.into());
    request
}

async fn answer(
    engine: &EmbeddingEngine,
    request: GenerateRequest,
) -> Result<(Vec<Vec<f32>>, Finished), EngineError> {
    let mut outputs = engine.generate(request, RequestContext::new("r")).await?;
    let mut vectors = Vec::new();
    while let Some(output) = outputs.next().await {
        match output? {
            Output::Embeddings(some) => vectors.extend(some),
            Output::Finished(finished) => return Ok((vectors, *finished)),
            Output::Tokens(_) | Output::Text(_) | Output::Scores(_) => panic!("embeddings only"),
        }
    }
    panic!("no terminal");
}

#[tokio::test]
async fn a_checkout_is_served_with_its_own_length_and_vocabulary() {
    let engine = EmbeddingEngine::from_args(&args(), &encoder("bert"));
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(
        (config.model.as_str(), config.context_length_tokens),
        ("bert", 150)
    );
    assert_eq!(config.vocab_size.map(std::num::NonZeroU32::get), Some(96));
    assert!(config.capabilities.inputs.iter().eq([&InputKind::Embed]));
    let (vectors, finished) = answer(&engine, inputs(&[&[7, 8], &[9; 150]]))
        .await
        .unwrap();
    assert_eq!((vectors.len(), vectors[0].len()), (2, 48));
    assert_eq!(finished.usage.prompt_tokens, 152);
    for (bad, kind) in [
        (inputs(&[&[7; 151]]), ErrorKind::ContextLengthExceeded),
        (inputs(&[&[96]]), ErrorKind::InvalidArgument),
        (
            GenerateRequest::from_tokens("m", vec![1]),
            ErrorKind::Unsupported,
        ),
    ] {
        assert_eq!(answer(&engine, bad).await.unwrap_err().kind(), kind);
    }
    engine.cleanup().await.unwrap();
}

#[test]
fn a_vector_may_depend_on_its_batch_on_a_gpu_alone() {
    let open = OpenEmbedder::open(&encoder("bert")).unwrap();
    let room = StepRoom {
        tokens: 512,
        sequences: 4,
    };
    for is_cpu in [true, false] {
        let can = engine_config(&open, room, is_cpu).capabilities;
        assert_eq!(can.deviates(Deviation::BatchVariant), !is_cpu);
    }
}

#[tokio::test]
async fn a_cross_encoder_scores_pairs_and_does_nothing_else() {
    let engine = EmbeddingEngine::from_args(&args(), &encoder("bert-scores"));
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    assert!(config.capabilities.inputs.iter().eq([&InputKind::Score]));
    let pair = |tokens: usize, first_tokens| ScorePair {
        token_ids: vec![7; tokens],
        first_tokens,
    };
    let score = async |pairs: &[ScorePair]| -> Result<(Vec<f32>, u32), EngineError> {
        let mut request = GenerateRequest::from_tokens("m", Vec::new());
        request.input = Input::Score(pairs.to_vec().into());
        let mut outputs = engine.generate(request, RequestContext::new("r")).await?;
        let mut scores = Vec::new();
        while let Some(output) = outputs.next().await {
            match output? {
                Output::Scores(some) => scores.extend(some),
                Output::Finished(finished) => return Ok((scores, finished.usage.prompt_tokens)),
                other @ (Output::Tokens(_) | Output::Text(_) | Output::Embeddings(_)) => {
                    panic!("{other:?}")
                }
            }
        }
        panic!("no terminal");
    };
    let pairs = [pair(3, 2), pair(150, 20), pair(3, 1), pair(1, 1)];
    let (together, tokens) = score(&pairs).await.unwrap();
    assert_eq!((together.len(), tokens), (4, 157));
    for (pair, among_others) in pairs.into_iter().zip(together) {
        let (alone, _) = score(&[pair]).await.unwrap();
        assert_eq!(alone, [among_others]);
    }
    for (bad, kind) in [
        (pair(151, 1), ErrorKind::ContextLengthExceeded),
        (pair(0, 0), ErrorKind::InvalidArgument),
        (pair(2, 3), ErrorKind::InvalidArgument),
    ] {
        let refused = score(&[bad]).await.unwrap_err();
        assert_eq!(refused.kind(), kind);
    }
    let refused = answer(&engine, inputs(&[&[7]])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_step_bounds_inputs_where_the_operator_says_so() {
    let few = CandleArgs {
        max_num_batched_tokens: Some(20),
        ..args()
    };
    let engine = EmbeddingEngine::from_args(&few, &encoder("bert"));
    let config = engine.start(StartContext::detached(1)).await.unwrap();
    assert_eq!(config.context_length_tokens, 20);
    let longest: &[TokenId] = &[7; 20];
    let (vectors, _) = answer(&engine, inputs(&[longest; 9])).await.unwrap();
    assert!(vectors.iter().all(|vector| *vector == vectors[0]));
    engine.cleanup().await.unwrap();
}

/// Loads a model that fails on token 1, panics on token 2, and fails forever after token 3.
struct FailingLoader;

impl Loader<LoadedEmbedder> for FailingLoader {
    fn load(
        &self,
        _start: &StartContext,
        _was_given_up: &dyn Fn() -> bool,
    ) -> Result<LoadedEmbedder, EngineError> {
        let mut config = EngineConfig::new("failing", 100);
        config.capabilities.inputs = [InputKind::Embed].into();
        let mut is_broken = false;
        Ok(LoadedEmbedder {
            model: Box::new(move |inputs| {
                let has = |token| inputs.iter().any(|input| input.tokens.contains(&token));
                is_broken |= has(3);
                if is_broken || has(1) {
                    return Err("no".into());
                }
                assert!(!has(2), "two");
                Ok(vec![vec![1.0]; inputs.len()])
            }),
            config,
            room: StepRoom {
                tokens: 100,
                sequences: 4,
            },
            max_waiting: 8,
        })
    }
}

#[tokio::test]
async fn a_failed_step_ends_its_request_and_a_model_that_computes_no_more_the_engine() {
    let engine = EmbeddingEngine::with_loader(Arc::new(FailingLoader));
    let start = StartContext::detached(1);
    engine.start(start.clone()).await.unwrap();
    for failing in [1, 2] {
        let error = answer(&engine, inputs(&[&[failing]])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(start.health.dead_reason().is_none());
        assert!(answer(&engine, inputs(&[&[7]])).await.is_ok());
    }
    assert_eq!(start.health.steps(), 2);
    assert!(answer(&engine, inputs(&[&[3]])).await.is_err());
    let late = answer(&engine, inputs(&[&[7]])).await.unwrap_err();
    assert!(late.policy().is_retryable, "{late}");
    assert!(start.health.dead_reason().is_some());
    engine.cleanup().await.unwrap();
}

/// Whether the thread ended before or after it took the request, another instance may answer it.
#[tokio::test]
async fn a_thread_that_has_ended_is_no_fault_of_the_request() {
    let (told, commands) = mpsc::channel(1);
    drop(commands);
    let error = ask(&told, Vec::new()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::EngineShutdown);
    assert!(EngineError::lost_with_engine().policy().is_retryable);
}
