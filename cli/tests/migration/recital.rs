//! [`Recital`]: an engine that recites a text, token by token, and resumes where another stopped.

use genset_backend_common::config::GuidedKind;
use genset_backend_common::output::{self, Finish, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, LLMEngine, RequestContext,
    StartContext, TokenId, async_trait,
};

use crate::site::encode;

/// Reasoning, text in between, and two calls.
const RECITED: &str = "<think>Let me see: 2 < 3.</think>Here it is, as you asked. <tool_call>{\"name\": \"weather\", \"arguments\": \
    {\"city\": \"Orléans 🦀\", \"days\": [1, 2]}}</tool_call><tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>";

/// The text that it recites if the answer is bound to a format.
const BOUND: &str = r#"{"city": "Madrid", "people": 3300000}"#;

pub(crate) struct Recital {
    free: Vec<TokenId>,
    bound: Vec<TokenId>,
}

impl Recital {
    pub(crate) fn new() -> Self {
        Self {
            free: encode(RECITED),
            bound: encode(BOUND),
        }
    }
}

#[async_trait]
impl LLMEngine for Recital {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut can = Capabilities::tokens()
            .with_point_mass_sampling()
            .with_resume();
        can.guided = [GuidedKind::JsonSchema].into();
        Ok(EngineConfig::new("recital", 2048)
            .with_vocab_size(2048)
            .with_capabilities(can))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let resumed = usize::try_from(request.resumed_tokens).unwrap();
        let recited = match request.guided {
            Some(_) => &self.bound,
            None => &self.free,
        };
        let rest: Vec<TokenId> = recited.iter().copied().skip(resumed).collect();
        Ok(output::stream(ctx, move |out| async move {
            for token in rest {
                out.token(token).await?;
            }
            Ok(Finish::stop())
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
