//! [`Cutting`]: an engine whose streams break after a number of tokens, as when its worker is killed.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::unfold;
use genset_backend_common::{
    DrainContext, EngineConfig, EngineError, ErrorKind, GenerateRequest, LLMEngine, Output,
    OutputStream, RequestContext, StartContext, async_trait,
};
use parking_lot::Mutex;

/// Where answers break, in tokens from their beginning, in ascending order. All engines of a site share it.
pub(crate) type Cuts = Arc<Mutex<Vec<u32>>>;

/// Wraps another engine and breaks its streams.
pub(crate) struct Cutting {
    engine: Arc<dyn LLMEngine>,
    cuts: Cuts,
}

impl Cutting {
    pub(crate) fn new(engine: Arc<dyn LLMEngine>, cuts: Cuts) -> Self {
        Self { engine, cuts }
    }
}

/// A stream that has not reached its break yet.
struct Rest {
    outputs: OutputStream,
    given: u32,
    at: u32,
}

async fn next(mut rest: Rest) -> Option<(Result<Output, EngineError>, Rest)> {
    if rest.given >= rest.at {
        let lost = EngineError::new(ErrorKind::Disconnected, "the worker was killed");
        return Some((Err(lost), rest));
    }
    let item = rest.outputs.next().await?;
    if let Ok(output) = &item {
        rest.given += output.token_count();
    }
    Some((item, rest))
}

#[async_trait]
impl LLMEngine for Cutting {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.engine.start(ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let given = request.resumed_tokens;
        let at = self.cuts.lock().iter().copied().find(|at| *at > given);
        let outputs = self.engine.generate(request, ctx).await?;
        let Some(at) = at else {
            return Ok(outputs);
        };
        let rest = Rest { outputs, given, at };
        Ok(OutputStream::from_raw(Box::pin(unfold(rest, next))))
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.engine.abort(ctx).await;
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        self.engine.drain(ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.engine.cleanup().await
    }
}
