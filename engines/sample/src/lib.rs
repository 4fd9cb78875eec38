//! The sample engine: answers every prompt with rotating token ids. Copy this file to begin an engine of your own.

use std::time::Duration;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, GenerateRequest, LLMEngine,
    RequestContext, StartContext, async_trait,
};

/// What the engine is built from; with the feature `cli`, its command-line flags.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct SampleArgs {
    /// Token ids go from 0 to one below this
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..)))]
    pub vocab_size: u32,
    /// Pause before each token, in milliseconds
    #[cfg_attr(
        feature = "cli",
        arg(long, default_value_t = 0, env = "GENSET_TOKEN_DELAY_MS")
    )]
    pub token_delay_ms: u64,
}

impl Default for SampleArgs {
    fn default() -> Self {
        Self {
            vocab_size: 1000,
            token_delay_ms: 0,
        }
    }
}

/// The engine. Building one is cheap; what costs belongs in `start`.
#[derive(Debug)]
pub struct SampleEngine {
    args: SampleArgs,
    model: EngineState<Model>,
}

/// What `start` builds: for a real engine weights, a scheduler, a thread.
#[derive(Debug)]
struct Model {
    vocab_size: u32,
    token_delay: Duration,
}

impl Model {
    fn next_token(&self, last: u32) -> u32 {
        (last + 1) % self.vocab_size
    }
}

impl SampleEngine {
    /// An engine that is not started yet.
    #[must_use]
    pub fn from_args(args: &SampleArgs) -> Self {
        Self {
            args: args.clone(),
            model: EngineState::new(),
        }
    }
}

#[async_trait]
impl LLMEngine for SampleEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let SampleArgs {
            vocab_size,
            token_delay_ms,
        } = self.args;
        if vocab_size == 0 {
            return Err(EngineError::invalid_argument(
                "vocab_size",
                "must be at least 1",
            ));
        }
        ctx.progress.report("building the model", None);
        let token_delay = Duration::from_millis(token_delay_ms);
        self.model
            .start(async {
                Ok(Model {
                    vocab_size,
                    token_delay,
                })
            })
            .await?;
        let can = Capabilities::tokens()
            .with_point_mass_sampling()
            .with_virtual_time()
            .with_resume();
        Ok(EngineConfig::new("sample", 32_768)
            .with_vocab_size(vocab_size)
            .with_capabilities(can))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let model = self.model.get()?;
        let prompt = request.tokens()?;
        let (prompt_len, mut token) = (prompt.len() as u64, prompt.last().copied().unwrap_or(0));
        let room = u32::try_from(32_768_u64.saturating_sub(prompt_len)).unwrap_or(0);
        let max_tokens = request.stop.max_tokens.unwrap_or(room).min(room);
        Ok(output::stream(ctx, move |out| async move {
            for generated in 0..max_tokens {
                if !model.token_delay.is_zero() {
                    tokio::time::sleep(model.token_delay).await;
                }
                token = model.next_token(token);
                if request.stop.is_stop(token, generated) {
                    return Ok(Finish::stop_token(token));
                }
                out.token(token).await?;
            }
            Ok(Finish::length())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.model.take());
        Ok(())
    }
}
