//! Faults that the checks of ST catch.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use genset_backend_common::{
    EngineError, GenerateRequest, LLMEngine, Output, OutputStream, RequestContext, async_trait,
};

use super::Mutant;
use super::fault::{Fault, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[Mutant {
    name: "token-after-terminal",
    stands_for: "a scheduler that flushes its last token after it reported the finish",
    killed_by: &["ST03"],
    build: |clean, scenario| with_fault(clean, scenario, TokenAfterTerminal),
}];

struct TokenAfterTerminal;

#[async_trait]
impl Fault for TokenAfterTerminal {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let late = stream::iter([Ok(Output::from(0))]);
        Ok(OutputStream::from_raw(Box::pin(
            inner.generate(request, ctx).await?.chain(late),
        )))
    }
}
