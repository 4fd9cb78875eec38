//! [`Fault`]: how a mutant differs from the clean engine that it wraps. Every method passes through unless overridden.

use std::sync::Arc;

use futures_util::StreamExt;
use genset_backend_common::output::{Finish, Finished};
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, Output,
    OutputStream, RequestContext, StartContext, TokenId, async_trait,
};

use super::Clean;
use crate::subject::{Scenario, Subject};

/// One fault. `inner` is the clean engine.
#[async_trait]
pub(super) trait Fault: Send + Sync + 'static {
    async fn start(
        &self,
        inner: &Arc<dyn LLMEngine>,
        ctx: StartContext,
    ) -> Result<EngineConfig, EngineError> {
        let mut config = inner.start(ctx).await?;
        self.declare(&mut config);
        Ok(config)
    }

    /// Changes the declaration of a successful start. A fault with its own `start` declares there.
    fn declare(&self, _config: &mut EngineConfig) {}

    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        inner.generate(request, ctx).await
    }

    async fn abort(&self, inner: &Arc<dyn LLMEngine>, ctx: &RequestContext) {
        inner.abort(ctx).await;
    }

    async fn drain(
        &self,
        inner: &Arc<dyn LLMEngine>,
        ctx: DrainContext,
    ) -> Result<(), EngineError> {
        inner.drain(ctx).await
    }

    async fn cleanup(&self, inner: &Arc<dyn LLMEngine>) -> Result<(), EngineError> {
        inner.cleanup().await
    }

    fn controls<'a>(&'a self, inner: &'a Arc<dyn LLMEngine>) -> Option<&'a dyn EngineControls> {
        inner.controls()
    }
}

/// A clean engine with a fault.
struct Faulty<F> {
    inner: Arc<dyn LLMEngine>,
    fault: F,
}

#[async_trait]
impl<F: Fault> LLMEngine for Faulty<F> {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.fault.start(&self.inner, ctx).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.fault.generate(&self.inner, request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.fault.abort(&self.inner, ctx).await;
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        self.fault.drain(&self.inner, ctx).await
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.fault.cleanup(&self.inner).await
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.fault.controls(&self.inner)
    }
}

/// A clean engine with `fault`; keeps the probe, if there is one.
pub(super) fn with_fault(clean: &Clean, scenario: &Scenario, fault: impl Fault) -> Subject {
    let subject = clean.build(scenario);
    Subject {
        engine: Arc::new(Faulty {
            inner: subject.engine,
            fault,
        }),
        ..subject
    }
}

/// A fault in the request that the engine receives.
pub(super) struct Asked(pub(super) fn(&mut GenerateRequest));

#[async_trait]
impl Fault for Asked {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.0(&mut request);
        inner.generate(request, ctx).await
    }
}

/// A fault in how the engine reports the end of a sequence.
pub(super) struct Ended(pub(super) fn(&mut Finished));

#[async_trait]
impl Fault for Ended {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let end = self.0;
        let outputs = inner.generate(request, ctx).await?.map(move |mut item| {
            if let Ok(Output::Finished(finished)) = &mut item {
                end(finished);
            }
            item
        });
        Ok(OutputStream::from_raw(Box::pin(outputs)))
    }
}

/// A number below 10,007 that distinguishes token sequences.
pub(super) fn digest(tokens: &[TokenId]) -> u16 {
    let sum = tokens.iter().fold(tokens.len(), |sum, token| {
        (sum * 31 + usize::try_from(*token).unwrap_or(0)) % 10_007
    });
    u16::try_from(sum % 10_007).unwrap_or(u16::MAX)
}

/// Converts a terminal back to a finish.
pub(super) fn finish_of(finished: Finished) -> Finish {
    Finish {
        reason: finished.reason,
        last: finished.last,
        stop_token: finished.stop_token,
        cached_tokens: finished.usage.cached_tokens,
        predictions: finished.usage.predictions,
        prompt_tokens: Some(finished.usage.prompt_tokens),
        transfer: finished.transfer,
    }
}
