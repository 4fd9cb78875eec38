//! The sample engine: answers every prompt with rotating token ids. Copy this file to begin an engine of your own.
//!
//! It supports disaggregated prefill and decode. There are no KV blocks to move: it needs only the prompt's last token.

use std::time::Duration;

use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, EngineState, GenerateRequest, LLMEngine,
    RequestContext, Role, StartContext, async_trait, transfer::KvTransfers,
};

/// The most tokens of prompt and answer together.
pub const CONTEXT_LENGTH: u32 = 32_768;

/// What the engine is built from; with the feature `cli`, its command-line flags.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct SampleArgs {
    /// Token ids go from 0 to one below this
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 1000))]
    pub vocab_size: u32,
    /// Pause before each token, in milliseconds
    #[cfg_attr(
        feature = "cli",
        arg(long, default_value_t = 0, env = "GENSET_TOKEN_DELAY_MS")
    )]
    pub token_delay_ms: u64,
}

/// The engine. Building one is cheap; expensive work belongs in `start`.
#[derive(Debug)]
pub struct SampleEngine {
    args: SampleArgs,
    model: EngineState<Model>,
}

/// What `start` builds: for a real engine its weights, scheduler and thread.
#[derive(Debug)]
struct Model {
    vocab_size: u32,
    token_delay: Duration,
    role: Role,
    transfers: KvTransfers,
}

impl SampleEngine {
    /// Creates an engine that is not started yet.
    #[must_use]
    pub fn from_args(args: &SampleArgs) -> Self {
        let model = EngineState::new();
        Self {
            args: args.clone(),
            model,
        }
    }
}

#[async_trait]
impl LLMEngine for SampleEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let vocab_size = self.args.vocab_size;
        if vocab_size == 0 {
            let problem = "must be at least 1";
            return Err(EngineError::invalid_argument("vocab_size", problem));
        }
        ctx.progress.report("building the model", None);
        let token_delay = Duration::from_millis(self.args.token_delay_ms);
        let model = Model {
            vocab_size,
            token_delay,
            role: ctx.role,
            transfers: ctx.kv_transfers,
        };
        // There is one next token at any temperature, so these options hold trivially.
        let can = Capabilities::tokens().with_point_mass_sampling();
        let config = EngineConfig::new("sample", CONTEXT_LENGTH)
            .with_vocab_size(vocab_size)
            .with_capabilities(can.with_virtual_time().with_resume().with_roles(Role::ALL));
        self.model.start(async { Ok((model, config)) }).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let model = self.model.get()?;
        // A decode instance refuses a request that lacks the parameters of a prefill instance.
        request.blocks_to_fetch(model.role)?;
        let mut token = request.tokens()?.last().copied().unwrap_or(0);
        let max_tokens = request.max_tokens(CONTEXT_LENGTH);
        // The body returns the terminal item; `output::stream` handles usage and cancellation.
        Ok(output::stream(ctx, move |out| async move {
            for generated in 0..max_tokens {
                if !model.token_delay.is_zero() {
                    tokio::time::sleep(model.token_delay).await;
                }
                token = (token + 1) % model.vocab_size;
                if request.stop.is_stop(token, generated) {
                    return Ok(Finish::stop_token(token));
                }
                // A prefill instance yields one token, and says where its blocks are.
                if model.role == Role::Prefill && max_tokens > 1 {
                    let blocks = model.transfers.params("none".into());
                    return Ok(Finish::length().with_last(token).with_transfer(blocks));
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
