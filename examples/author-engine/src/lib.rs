//! An engine author's crate: counts down from the prompt's last token, and shows in `tests/conformance.rs` how to use the
//! conformance kit.

use std::time::Duration;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, GenerateRequest, LLMEngine,
    RequestContext, StartContext, async_trait,
};

const CONTEXT_LENGTH: u32 = 4096;
const VOCAB_SIZE: u32 = 500;

/// Counts down, one token per millisecond.
#[derive(Debug, Default)]
pub struct Countdown {
    started: EngineState<()>,
}

#[async_trait]
impl LLMEngine for Countdown {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let config = EngineConfig::new("countdown", CONTEXT_LENGTH)
            .with_vocab_size(VOCAB_SIZE)
            .with_capabilities(Capabilities::tokens().with_virtual_time());
        self.started.start(async { Ok(((), config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.started.get()?;
        let mut token = request.tokens()?.last().copied().unwrap_or(0);
        let max_tokens = request.max_tokens(CONTEXT_LENGTH);
        Ok(output::stream(ctx, move |out| async move {
            for generated in 0..max_tokens {
                tokio::time::sleep(Duration::from_millis(1)).await;
                token = token.checked_sub(1).unwrap_or(VOCAB_SIZE - 1);
                if request.stop.is_stop(token, generated) {
                    return Ok(Finish::stop_token(token));
                }
                out.token(token).await?;
            }
            Ok(Finish::length())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.started.take());
        Ok(())
    }
}
