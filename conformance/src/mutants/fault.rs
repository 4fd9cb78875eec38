//! [`Fault`]: how a mutant differs from the clean engine that it wraps. Every method passes through unless overridden.

use std::sync::{Arc, OnceLock};

use futures_util::{Stream, StreamExt};
use genset_backend_common::output::{Finish, Finished, TokenChunk};
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, Output,
    OutputStream, RequestContext, StartContext, TokenId, async_trait,
};

use super::Clean;
use crate::subject::{Scenario, Subject};

/// The clean engine that a fault wraps.
pub type Inner = Arc<dyn LLMEngine>;

/// A request and its context.
#[derive(Debug, Clone)]
pub struct Call {
    /// The request.
    pub request: GenerateRequest,
    /// Its context.
    pub ctx: RequestContext,
    /// The declaration of the engine's first start; `None` before it.
    pub config: Option<Arc<EngineConfig>>,
}

/// One fault.
#[async_trait]
pub trait Fault: Send + Sync + 'static {
    /// In place of the clean engine's start.
    ///
    /// # Errors
    /// As [`LLMEngine::start`].
    async fn start(&self, inner: &Inner, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        inner.start(ctx).await
    }

    /// What comes before a start.
    fn begin(&self, _ctx: &StartContext) {}

    /// Changes or keeps the declaration of a successful start.
    fn declare(&self, _config: &mut EngineConfig) {}

    /// In place of the clean engine's answer.
    ///
    /// # Errors
    /// As [`LLMEngine::generate`].
    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        inner.generate(call.request, call.ctx).await
    }

    /// Changes what the clean engine is asked.
    ///
    /// # Errors
    /// Refuses the request.
    fn ask(&self, _call: &mut Call) -> Result<(), EngineError> {
        Ok(())
    }

    /// Changes the clean engine's answer to `call`.
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        outputs
    }

    /// In place of the clean engine's abort.
    async fn abort(&self, inner: &Inner, ctx: &RequestContext) {
        inner.abort(ctx).await;
    }

    /// In place of the clean engine's drain.
    ///
    /// # Errors
    /// As [`LLMEngine::drain`].
    async fn drain(&self, inner: &Inner, ctx: DrainContext) -> Result<(), EngineError> {
        inner.drain(ctx).await
    }

    /// In place of the clean engine's cleanup.
    ///
    /// # Errors
    /// As [`LLMEngine::cleanup`].
    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        inner.cleanup().await
    }

    /// In place of the clean engine's controls.
    fn controls<'a>(&'a self, inner: &'a Inner) -> Option<&'a dyn EngineControls> {
        inner.controls()
    }
}

/// A clean engine with a fault.
struct Faulty {
    inner: Inner,
    fault: Box<dyn Fault>,
    config: OnceLock<Arc<EngineConfig>>,
}

#[async_trait]
impl LLMEngine for Faulty {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.fault.begin(&ctx);
        let mut config = self.fault.start(&self.inner, ctx).await?;
        self.fault.declare(&mut config);
        self.config.get_or_init(|| Arc::new(config.clone()));
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let config = self.config.get().cloned();
        let mut call = Call {
            request,
            ctx,
            config,
        };
        self.fault.ask(&mut call)?;
        let outputs = self.fault.generate(&self.inner, call.clone()).await?;
        Ok(self.fault.answer(&call, outputs))
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

/// `subject` with `fault`; keeps the probe, if there is one.
pub fn faulty(subject: Subject, fault: impl Fault) -> Subject {
    Subject {
        engine: Arc::new(Faulty {
            inner: subject.engine,
            fault: Box::new(fault),
            config: OnceLock::new(),
        }),
        ..subject
    }
}

/// A clean engine with `fault`.
pub(super) fn with_fault(clean: &Clean, scenario: &Scenario, fault: impl Fault) -> Subject {
    faulty(clean.build(scenario), fault)
}

/// An engine with a fault in the declaration.
#[derive(Debug)]
pub struct Declares(
    /// Changes the declaration.
    pub fn(&mut EngineConfig),
);

impl Fault for Declares {
    fn declare(&self, config: &mut EngineConfig) {
        (self.0)(config);
    }
}

/// A fault in the request that the engine receives.
struct Asked(fn(&mut GenerateRequest));

impl Fault for Asked {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        (self.0)(&mut call.request);
        Ok(())
    }
}

/// A clean engine that receives other requests.
pub(super) fn asked(
    clean: &Clean,
    scenario: &Scenario,
    change: fn(&mut GenerateRequest),
) -> Subject {
    with_fault(clean, scenario, Asked(change))
}

/// A fault in how the engine reports the end of a sequence.
struct Ended(fn(&mut Finished));

impl Fault for Ended {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        at_end(outputs, self.0)
    }
}

/// A clean engine that reports the end of sequences otherwise.
pub(super) fn ended(clean: &Clean, scenario: &Scenario, change: fn(&mut Finished)) -> Subject {
    with_fault(clean, scenario, Ended(change))
}

/// Checks requests on the engine's side.
struct Remote<C>(C);

impl<C> Fault for Remote<C>
where
    C: Fn(&EngineConfig, &mut GenerateRequest) -> Result<(), EngineError> + Send + Sync + 'static,
{
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        match &call.config {
            Some(config) => (self.0)(config, &mut call.request),
            None => Ok(()),
        }
    }
}

/// An engine that checks requests itself by `check`, like a worker in another process.
pub(super) fn remote(
    clean: &Clean,
    scenario: &Scenario,
    check: impl Fn(&EngineConfig, &mut GenerateRequest) -> Result<(), EngineError>
    + Send
    + Sync
    + 'static,
) -> Subject {
    with_fault(clean, scenario, Remote(check)).checking_itself()
}

/// As [`remote`], with a right check after `mend` has made bad requests acceptable.
pub(super) fn mending(
    clean: &Clean,
    scenario: &Scenario,
    mend: fn(&EngineConfig, &mut GenerateRequest),
) -> Subject {
    let check = move |config: &EngineConfig, request: &mut GenerateRequest| {
        mend(config, request);
        config.check(request)
    };
    remote(clean, scenario, check)
}

/// A context of the engine's own, without the client's cancellation.
pub(super) fn deaf(ctx: &RequestContext) -> RequestContext {
    RequestContext::new(ctx.id()).with_prompt_tokens(ctx.prompt_tokens())
}

/// A stream changed by a fault.
pub(super) fn raw(
    items: impl Stream<Item = Result<Output, EngineError>> + Send + 'static,
) -> OutputStream {
    OutputStream::from_raw(Box::pin(items))
}

/// Changes the end of a sequence.
pub(super) fn at_end(
    outputs: OutputStream,
    mut change: impl FnMut(&mut Finished) + Send + 'static,
) -> OutputStream {
    raw(outputs.map(move |mut item| {
        if let Ok(Output::Finished(finished)) = &mut item {
            change(finished);
        }
        item
    }))
}

/// Changes each item of tokens.
pub(super) fn at_tokens(
    outputs: OutputStream,
    mut change: impl FnMut(&mut TokenChunk) + Send + 'static,
) -> OutputStream {
    raw(outputs.map(move |mut item| {
        if let Ok(Output::Tokens(chunk)) = &mut item {
            change(chunk);
        }
        item
    }))
}

/// Whether an item is the last of its stream: a terminal or an error.
pub(super) fn is_last(item: &Result<Output, EngineError>) -> bool {
    !matches!(item, Ok(output) if !output.is_terminal())
}

/// The number of requests that hold a clone of what the engine holds.
pub(super) fn others<T>(held: &Arc<T>) -> usize {
    Arc::strong_count(held) - 1
}

/// Drops `held` with the last item of a stream, or with the stream.
pub fn held_to_end(outputs: OutputStream, held: impl Send + 'static) -> OutputStream {
    let mut held = Some(held);
    raw(outputs.inspect(move |item| {
        if is_last(item) {
            drop(held.take());
        }
    }))
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
