//! The adapter: every request passes through it on the way to the engine, and every item on the way back. It refuses what the
//! engine does not declare, admits requests, contains panics, enforces deadlines and the rules of a stream, and counts
//! violations.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::admission::Admission;
use super::canary::PROBE_HEADER;
use super::config::RequestLimits;
use super::guard::{Guard, GuardedStream};
use super::in_flight::InFlight;
use super::telemetry::{RequestEnd, Telemetry};
use crate::config::EngineConfig;
use crate::context::{CancelReason, RequestContext};
use crate::engine::LLMEngine;
use crate::error::EngineError;
use crate::handles::Admitted;
use crate::output::{OutputStream, Violation};
use crate::ports::Generate;
use crate::request::{GenerateRequest, Input};

/// An engine behind the adapter.
pub(super) struct Adapter {
    engine: Arc<dyn LLMEngine>,
    config: EngineConfig,
    limits: RequestLimits,
    admission: Admission,
    in_flight: InFlight,
    telemetry: Telemetry,
    tasks: TaskTracker,
}

impl Adapter {
    /// Subscribes to the number of admitted requests.
    pub(super) fn admitted(&self) -> watch::Receiver<Admitted> {
        self.admission.subscribe()
    }

    pub(super) fn new(
        engine: Arc<dyn LLMEngine>,
        config: EngineConfig,
        limits: RequestLimits,
        in_flight: InFlight,
        telemetry: Telemetry,
        tasks: TaskTracker,
    ) -> Self {
        let admission = Admission::new(limits, &telemetry);
        Self {
            engine,
            config,
            limits,
            admission,
            in_flight,
            telemetry,
            tasks,
        }
    }

    /// Limits prompt and answer together to the context, even if the operator has lowered it.
    fn bound_answer(&self, request: &mut GenerateRequest) {
        if let Input::Tokens(_) = request.input {
            let max_tokens = request.max_tokens(self.config.context_length_tokens);
            request.stop.max_tokens = Some(max_tokens);
            request.stop.min_tokens = request.stop.min_tokens.min(max_tokens);
        }
    }

    /// Returns the idle limit of an answer. Embeddings and scores arrive all at once, so only the deadline limits their wait.
    fn idle_timeout(&self, input: &Input) -> Option<Duration> {
        match input {
            Input::Tokens(_) | Input::Text(_) | Input::Chat(_) => self.limits.idle_timeout,
            Input::Embed(_) | Input::Score(_) => None,
        }
    }

    /// Returns the engine's view of the context, with deadline and prompt length.
    fn engine_context(&self, request: &GenerateRequest, ctx: &RequestContext) -> RequestContext {
        let mut ctx = ctx
            .child()
            .with_prompt_tokens(request.prompt_tokens().unwrap_or(0));
        if let (None, Some(timeout)) = (ctx.deadline(), self.limits.request_timeout) {
            let began = ctx.began().unwrap_or_else(Instant::now);
            ctx = ctx.with_deadline(began + timeout);
        }
        ctx
    }

    async fn try_generate(
        &self,
        mut request: GenerateRequest,
        ctx: &RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.config.check(&request)?;
        self.bound_answer(&mut request);
        let ctx = self.engine_context(&request, ctx);
        let unanswered = CancelOnDrop(Some(ctx.clone()));
        let ticket = self.in_flight.enter(&ctx)?;
        let permit = match ctx.header(PROBE_HEADER) {
            // A canary checks that the engine is alive, not that it has room.
            Some(_) => None,
            None => Some(self.admission.admit(&ctx).await?),
        };
        let started = Instant::now();
        let guard = Guard::new(&self.config, &request, ctx.clone(), self.telemetry.clone());
        self.telemetry.add_prompt_tokens(ctx.prompt_tokens());
        let idle_timeout = self.idle_timeout(&request.input);
        let outputs = self.call_engine(request, &ctx).await?;
        unanswered.disarm();
        let abort = Abort {
            engine: Arc::clone(&self.engine),
            ctx,
            tasks: self.tasks.clone(),
        };
        let places = (ticket, permit);
        let guarded = GuardedStream::new(
            outputs,
            guard,
            abort,
            places,
            self.in_flight.clone(),
            started,
            idle_timeout,
        );
        Ok(OutputStream::from_raw(Box::pin(guarded)))
    }

    /// Calls the engine's `generate` under the request's deadline and cancellation, and contains panics.
    async fn call_engine(
        &self,
        request: GenerateRequest,
        ctx: &RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let call = self
            .engine
            .generate(request, ctx.clone())
            .instrument(ctx.span());
        let call = AssertUnwindSafe(call).catch_unwind();
        let answer = tokio::select! {
            biased;
            answer = call => answer,
            error = ctx.over() => {
                // If it was cancelled before, that reason stays.
                ctx.cancel(CancelReason::Deadline);
                return Err(error);
            }
        };
        answer.unwrap_or_else(|panic| {
            self.telemetry.violation(Violation::Panic);
            Err(panic_error(ctx, &*panic))
        })
    }
}

/// Cancels a request that never got its stream: its caller left, or it was refused.
struct CancelOnDrop(Option<RequestContext>);

impl CancelOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(ctx) = &self.0 {
            ctx.cancel(CancelReason::Client);
        }
    }
}

/// Counts a request whose caller left before it got its stream: while it waited for a slot, or for the engine to accept it.
struct CountOnDrop<'a>(Option<(&'a Telemetry, &'a RequestContext)>);

impl CountOnDrop<'_> {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CountOnDrop<'_> {
    fn drop(&mut self) {
        if let Some((telemetry, ctx)) = self.0 {
            telemetry.request_unanswered(RequestEnd::Dropped);
            tracing::debug!(
                request_id = ctx.id(),
                "request dropped before it was answered"
            );
        }
    }
}

/// Limit of the engine's `abort`. Nothing waits for the call, but its task must end with the worker.
const ABORT_TIMEOUT: Duration = Duration::from_secs(3);

#[async_trait]
impl Generate for Adapter {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let uncounted = CountOnDrop(Some((&self.telemetry, &ctx)));
        let result = self.try_generate(request, &ctx).await;
        uncounted.disarm();
        result.map_err(|error| {
            let end = RequestEnd::Failed(error.kind());
            self.telemetry.request_unanswered(end);
            tracing::debug!(request_id = ctx.id(), kind = %error.kind(), %error, "request refused");
            error.or_request_id(ctx.id())
        })
    }
}

/// Tells the engine that an accepted request is no longer wanted.
pub(super) struct Abort {
    engine: Arc<dyn LLMEngine>,
    pub(super) ctx: RequestContext,
    tasks: TaskTracker,
}

impl Abort {
    /// Cancels the request and sends the hint without waiting. Without a runtime the hint is skipped, which is allowed.
    pub(super) fn send(&self) {
        self.ctx.cancel(CancelReason::Client);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let (engine, ctx) = (Arc::clone(&self.engine), self.ctx.clone());
        let hint = AssertUnwindSafe(async move { engine.abort(&ctx).await }).catch_unwind();
        let hint = async move { drop(tokio::time::timeout(ABORT_TIMEOUT, hint).await) };
        drop(self.tasks.spawn_on(hint, &runtime));
    }
}

/// Converts a contained panic into an error of its request; the panic's text goes only to the log.
pub(super) fn panic_error(ctx: &RequestContext, panic: &(dyn std::any::Any + Send)) -> EngineError {
    tracing::error!(
        request_id = ctx.id(),
        panic = panic_text(panic),
        "the engine panicked in a request"
    );
    let rule = Violation::Panic;
    EngineError::internal(format!(
        "the engine broke the output contract, rule {rule}: {}",
        rule.what()
    ))
    .with_request_id(ctx.id())
}

/// Returns the text of a panic, if it has one.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
