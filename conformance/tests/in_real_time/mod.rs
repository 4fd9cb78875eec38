//! [`InRealTime`]: an engine whose waits take real time.

use std::sync::Arc;

use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, LLMEngine, OutputStream, RequestContext,
    StartContext, async_trait,
};

/// An engine that does not declare that its waits follow tokio's clock.
pub(crate) struct InRealTime(pub(crate) Arc<dyn LLMEngine>);

#[async_trait]
impl LLMEngine for InRealTime {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = self.0.start(ctx).await?;
        config.capabilities.virtual_time = false;
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.0.generate(request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.0.abort(ctx).await;
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}
