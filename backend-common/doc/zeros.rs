use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    EngineConfig, EngineError, EngineState, GenerateRequest, LLMEngine, RequestContext,
    StartContext, async_trait,
};

/// The maximum length of prompt and answer together.
const CONTEXT_LENGTH: u32 = 2048;

/// Always generates token 0.
#[derive(Default)]
pub struct Zeros {
    state: EngineState<()>,
}

#[async_trait]
impl LLMEngine for Zeros {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let config = EngineConfig::new("zeros", CONTEXT_LENGTH).with_vocab_size(1);
        self.state.start(async { Ok(((), config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        // Fails before a start and after a cleanup.
        self.state.get()?;
        let max_tokens = request.max_tokens(CONTEXT_LENGTH);
        Ok(output::stream(ctx, move |out| async move {
            for generated in 0..max_tokens {
                if request.stop.is_stop(0, generated) {
                    return Ok(Finish::stop_token(0));
                }
                out.token(0).await?;
            }
            Ok(Finish::length())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.state.take());
        Ok(())
    }
}
