//! [`EmbeddingEngine`]: the [`LLMEngine`] of models that compute one vector per text, or one score per pair.
//!
//! A request's inputs go to the engine thread (`thread`) together. Each step takes inputs of the waiting requests in turn
//! (`queue`) and packs them without padding; the model computes each input as a whole. `loading` loads the model.

mod loading;
mod queue;
#[cfg(test)]
mod tests;
mod thread;

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    EngineConfig, EngineError, EngineState, GenerateRequest, Input, LLMEngine, RequestContext,
    RequestField, StartContext, async_trait, request::ScorePair,
};
use tokio::sync::{mpsc, oneshot};

use self::loading::{CheckoutLoader, LoadedEmbedder};
use self::queue::Pending;
use self::thread::{Serving, Told};
use crate::CandleArgs;
use crate::engine::thread::{EngineThread, Loader};
use crate::model::embedder::WholeSequence;

/// The most vectors in one item of an answer, which keeps the items of a large request small.
const VECTORS_PER_ITEM: usize = 64;

/// Embeds token sequences with an encoder (BERT, RoBERTa, XLM-RoBERTa, ModernBERT) or a decoder whose checkout has a
/// `modules.json` (Qwen3-Embedding). An encoder with a classifier (a cross-encoder) scores pairs of texts instead: its
/// vectors have one number.
///
/// # Examples
/// ```no_run
/// use std::path::Path;
///
/// use genset_backend_common::{LLMEngine, StartContext};
/// use genset_engine_candle::{CandleArgs, EmbeddingEngine};
///
/// # async fn serve() -> Result<(), genset_backend_common::EngineError> {
/// let engine = EmbeddingEngine::from_args(&CandleArgs::default(), Path::new("bge-small-en-v1.5"));
/// let config = engine.start(StartContext::detached(1)).await?;
/// println!("{} takes inputs of {} tokens", config.model, config.context_length_tokens);
/// # Ok(())
/// # }
/// ```
pub struct EmbeddingEngine {
    loader: Arc<dyn Loader<LoadedEmbedder>>,
    state: EngineState<Serving>,
    thread: EngineThread,
}

genset_backend_common::debug_as!(|_| EmbeddingEngine { .. });

impl EmbeddingEngine {
    /// Creates an engine for the checkout folder at `model`; `start` loads it.
    /// [`OpenEmbedder::is_at`](crate::load::OpenEmbedder::is_at) tells whether a folder is for this engine.
    #[must_use]
    pub fn from_args(args: &CandleArgs, model: &Path) -> Self {
        Self::with_loader(Arc::new(CheckoutLoader::new(args, model)))
    }

    fn with_loader(loader: Arc<dyn Loader<LoadedEmbedder>>) -> Self {
        Self {
            loader,
            state: EngineState::new(),
            thread: EngineThread::default(),
        }
    }
}

#[async_trait]
impl LLMEngine for EmbeddingEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            let loader = Arc::clone(&self.loader);
            let serving = self
                .thread
                .start(ctx, move |ctx, ready| thread::serve(&*loader, ctx, ready))
                .await?;
            let config = serving.config.clone();
            Ok((serving, config))
        };
        self.state.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let (config, told) = {
            let serving = self.state.get()?;
            (serving.config.clone(), serving.told.clone())
        };
        config.check(&request)?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(0);
        let is_scored = matches!(request.input, Input::Score(_));
        let vectors = ask(&told, sequences(&request)?).await?;
        let ctx = ctx.with_prompt_tokens(prompt_tokens);
        Ok(output::stream(ctx, |out| async move {
            // The thread drops a request only when it ends by itself.
            let mut vectors = vectors
                .await
                .map_err(|_| EngineError::lost_with_engine())??;
            if is_scored {
                out.scores(vectors.into_iter().flatten().collect()).await?;
                return Ok(Finish::stop());
            }
            while !vectors.is_empty() {
                let rest = vectors.split_off(vectors.len().min(VECTORS_PER_ITEM));
                out.embeddings(std::mem::replace(&mut vectors, rest))
                    .await?;
            }
            Ok(Finish::stop())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        if let Some(serving) = self.state.take() {
            // An engine thread that ended by itself takes no command, and needs none.
            drop(serving.told.send(Told::Stop).await);
        }
        self.thread.ended().await;
        Ok(())
    }
}

/// The sequences of a request that the model computes.
fn sequences(request: &GenerateRequest) -> Result<Vec<WholeSequence>, EngineError> {
    match &request.input {
        Input::Embed(inputs) => {
            let inputs = inputs.iter().cloned();
            Ok(inputs.map(WholeSequence::of_one_text).collect())
        }
        Input::Score(pairs) => Ok(pairs.iter().map(of_pair).collect()),
        Input::Tokens(_) | Input::Text(_) | Input::Chat(_) => Err(EngineError::unsupported(
            RequestField::Prompt,
            "this engine takes inputs to embed or pairs to score only",
        )),
    }
}

fn of_pair(pair: &ScorePair) -> WholeSequence {
    WholeSequence {
        tokens: pair.token_ids.clone(),
        first_tokens: usize::try_from(pair.first_tokens).unwrap_or(usize::MAX),
    }
}

/// Sends the sequences to the engine thread. The receiver gets a vector for each.
async fn ask(
    told: &mpsc::Sender<Told>,
    sequences: Vec<WholeSequence>,
) -> Result<oneshot::Receiver<Result<Vec<Vec<f32>>, EngineError>>, EngineError> {
    let (reply, replied) = oneshot::channel();
    let add = Told::Add(Pending::new(sequences, reply));
    told.send(add)
        .await
        .map_err(|_| EngineError::engine_has_stopped())?;
    Ok(replied)
}
