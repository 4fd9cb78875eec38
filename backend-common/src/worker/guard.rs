//! Checks the rules of one stream, item by item: [`Guard`] judges items, [`GuardedStream`] carries them.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::{Instant, Sleep};
use tracing::Span;

use super::adapter::{Abort, panic_error};
use super::admission::Permit;
use super::in_flight::{InFlight, Ticket};
use super::telemetry::{RequestEnd, Telemetry};
use crate::config::EngineConfig;
use crate::context::{CancelReason, RequestContext};
use crate::error::{EngineError, ErrorKind};
use crate::output::{Finish, FinishReason, Finished, Output, OutputStream, TokenChunk, Violation};
use crate::request::{GenerateRequest, Input};

type Item = Result<Output, EngineError>;

/// The deadline is checked after this many consecutive ready items: often enough to be enforced, rarely enough to cost nothing.
const ITEMS_BETWEEN_LIMITS: u64 = 64;

/// The kinds of output items that a request allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutputKinds {
    Tokens,
    TokensOrText,
    Embeddings,
    Scores,
}

impl OutputKinds {
    fn of(input: &Input) -> Self {
        match input {
            Input::Tokens(_) => Self::Tokens,
            Input::Text(_) | Input::Chat(_) => Self::TokensOrText,
            Input::Embed(_) => Self::Embeddings,
            Input::Score(_) => Self::Scores,
        }
    }

    fn contain(self, output: &Output) -> bool {
        match output {
            Output::Tokens(_) => matches!(self, Self::Tokens | Self::TokensOrText),
            Output::Text(_) => self == Self::TokensOrText,
            Output::Embeddings(_) => self == Self::Embeddings,
            Output::Scores(_) => self == Self::Scores,
            Output::Finished(_) => true,
        }
    }
}

/// The rules for a request's stream.
pub(super) struct Guard {
    ctx: RequestContext,
    telemetry: Telemetry,
    vocab_size: u32,
    max_tokens: u32,
    knows_prompt: bool,
    /// Prompt tokens as the engine counts them, which only its terminal says.
    counted_prompt_tokens: u32,
    answers_with: OutputKinds,
    /// Tokens from the engine, which its usage must match.
    given_tokens: u32,
    is_cut: bool,
    /// Tokens sent to the client, which are billed.
    streamed_tokens: u32,
}

impl Guard {
    pub(super) fn new(
        config: &EngineConfig,
        request: &GenerateRequest,
        ctx: RequestContext,
        telemetry: Telemetry,
    ) -> Self {
        Self {
            ctx,
            telemetry,
            vocab_size: config
                .vocab_size
                .map_or(u32::MAX, std::num::NonZeroU32::get),
            max_tokens: request.stop.max_tokens.unwrap_or(u32::MAX),
            knows_prompt: request.prompt_tokens().is_some(),
            counted_prompt_tokens: 0,
            answers_with: OutputKinds::of(&request.input),
            given_tokens: 0,
            is_cut: false,
            streamed_tokens: 0,
        }
    }

    pub(super) fn violation(&self, violation: Violation) {
        self.telemetry.violation(violation);
        if let Some(unlogged) = self.telemetry.logged.unlogged(violation.name()) {
            tracing::warn!(
                request_id = self.ctx.id(),
                rule = violation.name(),
                unlogged,
                "the engine broke the output contract: {}; further violations of this rule are only counted for a minute",
                violation.what()
            );
        }
    }

    /// Returns the error of a request whose stream cannot be repaired.
    fn broken(&self, kind: ErrorKind, violation: Violation) -> EngineError {
        self.violation(violation);
        let what = violation.what();
        let message = format!("the engine broke the output contract, rule {violation}: {what}");
        EngineError::new(kind, message).with_request_id(self.ctx.id())
    }

    /// Judges an item on its way to the client: passes, repairs or drops it (`None`), or turns it into an error that ends the
    /// stream.
    fn judge(&mut self, output: Output) -> Option<Item> {
        if !self.answers_with.contain(&output) {
            self.violation(Violation::WrongOutputKind);
            return None;
        }
        self.given_tokens = self.given_tokens.saturating_add(output.token_count());
        match output {
            Output::Tokens(chunk) => self.judge_tokens(chunk),
            Output::Text(chunk) => {
                self.streamed_tokens = self.streamed_tokens.saturating_add(chunk.token_count);
                (!chunk.text.is_empty() || chunk.token_count > 0).then_some(Ok(Output::Text(chunk)))
            }
            output @ (Output::Embeddings(_) | Output::Scores(_)) => Some(Ok(output)),
            Output::Finished(finished) => Some(self.judge_finished(*finished)),
        }
    }

    fn judge_tokens(&mut self, mut chunk: TokenChunk) -> Option<Item> {
        if chunk.is_empty() {
            self.violation(Violation::EmptyChunk);
            return None;
        }
        if let Err(error) = self.check_vocabulary(&chunk) {
            return Some(Err(error));
        }
        if self.streamed_tokens >= self.max_tokens {
            return Some(Ok(self.cut()));
        }
        self.truncate(&mut chunk);
        self.streamed_tokens = self.streamed_tokens.saturating_add(chunk.len());
        (!chunk.is_empty()).then_some(Ok(Output::Tokens(chunk)))
    }

    /// Returns the terminal for an engine that continues past `max_tokens`; its own is not awaited.
    fn cut(&mut self) -> Output {
        self.violation(Violation::TooManyTokens);
        self.is_cut = true;
        let finish = Finish::length().into_finished(self.ctx.prompt_tokens(), self.streamed_tokens);
        Output::Finished(Box::new(finish))
    }

    fn judge_finished(&mut self, mut finished: Finished) -> Item {
        self.check_vocabulary(&finished.last)?;
        self.check_usage(&finished);
        self.truncate(&mut finished.last);
        self.streamed_tokens = self.streamed_tokens.saturating_add(finished.last.len());
        // The client pays for what was delivered, whatever the engine reports.
        finished.usage.completion_tokens = self.streamed_tokens;
        if self.knows_prompt {
            finished.usage.prompt_tokens = self.ctx.prompt_tokens();
        } else {
            self.counted_prompt_tokens = finished.usage.prompt_tokens;
        }
        if finished.reason == FinishReason::Cancelled && !self.ctx.is_cancelled() {
            return Err(self.broken(ErrorKind::Internal, Violation::FalseCancel));
        }
        Ok(Output::Finished(Box::new(finished)))
    }

    fn check_vocabulary(&self, chunk: &TokenChunk) -> Result<(), EngineError> {
        if chunk.token_ids.iter().all(|token| *token < self.vocab_size) {
            return Ok(());
        }
        Err(self.broken(ErrorKind::Internal, Violation::TokenOutOfRange))
    }

    /// Truncates a chunk to `max_tokens`.
    fn truncate(&self, chunk: &mut TokenChunk) {
        let room = self.max_tokens.saturating_sub(self.streamed_tokens);
        if chunk.len() > room {
            self.violation(Violation::TooManyTokens);
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            chunk.token_ids.truncate(room);
            chunk.logprobs.truncate(room);
        }
    }

    fn check_usage(&self, finished: &Finished) {
        if finished.usage.completion_tokens != self.given_tokens {
            self.violation(Violation::CompletionTokensMismatch);
        }
        if self.knows_prompt && finished.usage.prompt_tokens != self.ctx.prompt_tokens() {
            self.violation(Violation::PromptTokensMismatch);
        }
    }

    /// Returns the prompt tokens as far as they are known.
    fn prompt_tokens(&self) -> u32 {
        self.ctx.prompt_tokens().max(self.counted_prompt_tokens)
    }

    /// Returns the terminal of a cancelled request.
    fn cancelled(&self) -> Item {
        Output::cancelled(&self.ctx, self.ctx.prompt_tokens(), self.streamed_tokens)
    }
}

/// The engine's stream under guard. It holds the request's slots in the engine; dropping it frees them and notifies the engine.
pub(super) struct GuardedStream {
    outputs: Option<OutputStream>,
    guard: Guard,
    abort: Abort,
    places: Option<(Ticket, Option<Permit>)>,
    in_flight: InFlight,
    cancelled: Pin<Box<dyn Future<Output = ()> + Send>>,
    clock: Clock,
    started: Instant,
    items: u64,
    is_ended: bool,
    span: Span,
}

impl GuardedStream {
    pub(super) fn new(
        outputs: OutputStream,
        guard: Guard,
        abort: Abort,
        places: (Ticket, Option<Permit>),
        in_flight: InFlight,
        started: Instant,
        idle_timeout: Option<Duration>,
    ) -> Self {
        let cancelled = Box::pin(guard.ctx.cancelled_owned());
        // The engine may queue the request in `generate`, which does not count as silence of the stream.
        let clock = Clock::new(
            guard.ctx.deadline(),
            idle_timeout,
            progress(&in_flight, 0),
            Instant::now(),
        );
        let places = Some(places);
        let (items, is_ended) = (0, false);
        let span = guard.ctx.span();
        let outputs = Some(outputs);
        Self {
            outputs,
            guard,
            abort,
            places,
            in_flight,
            cancelled,
            clock,
            started,
            items,
            is_ended,
            span,
        }
    }

    /// Returns the engine's next item, or the reason why there is none.
    fn poll_engine(&mut self, cx: &mut Context<'_>) -> Poll<Item> {
        if self.guard.ctx.is_cancelled() {
            return Poll::Ready(self.guard.cancelled());
        }
        // An engine that is always ready never reaches the limit checks below.
        if self.items % ITEMS_BETWEEN_LIMITS == ITEMS_BETWEEN_LIMITS - 1
            && let Poll::Ready(item) = self.poll_limits(cx)
        {
            return Poll::Ready(item);
        }
        let Some(outputs) = self.outputs.as_mut() else {
            return Poll::Pending;
        };
        let polled = std::panic::catch_unwind(AssertUnwindSafe(|| Pin::new(outputs).poll_next(cx)));
        match polled {
            Ok(Poll::Ready(Some(Ok(output)))) => {
                // Only the engine's own items are a sign of life, not errors created here.
                self.in_flight.heartbeat();
                if self.is_canary() {
                    self.in_flight.canary_heartbeat();
                }
                match self.guard.judge(output) {
                    Some(item) => {
                        if self.guard.is_cut {
                            self.drop_outputs();
                            self.abort.send();
                        }
                        Poll::Ready(item)
                    }
                    None => {
                        cx.waker().wake_by_ref();
                        self.poll_limits(cx)
                    }
                }
            }
            Ok(Poll::Ready(Some(Err(error)))) => Poll::Ready(Err(self.engine_error(error))),
            // `OutputStream` yields a terminal before it ends.
            Ok(Poll::Ready(None)) => Poll::Ready(Err(CancelReason::EngineDead.to_error())),
            Ok(Poll::Pending) => self.poll_limits(cx),
            Err(panic) => {
                self.drop_outputs();
                self.guard.violation(Violation::Panic);
                Poll::Ready(Err(panic_error(&self.guard.ctx, &*panic)))
            }
        }
    }

    fn engine_error(&self, error: EngineError) -> EngineError {
        if error.kind() == ErrorKind::StreamIncomplete
            && self
                .outputs
                .as_ref()
                .is_some_and(|outputs| outputs.violation().is_some())
        {
            return self
                .guard
                .broken(ErrorKind::StreamIncomplete, Violation::EndedWithoutTerminal);
        }
        error.with_request_id(self.guard.ctx.id())
    }

    fn poll_limits(&mut self, cx: &mut Context<'_>) -> Poll<Item> {
        if self.cancelled.as_mut().poll(cx).is_ready() {
            return Poll::Ready(self.guard.cancelled());
        }
        let progress = progress(&self.in_flight, self.items);
        let Poll::Ready(message) = self.clock.poll(cx, progress) else {
            return Poll::Pending;
        };
        self.guard.ctx.cancel(CancelReason::Deadline);
        let error = EngineError::new(ErrorKind::DeadlineExceeded, message);
        Poll::Ready(Err(error.with_request_id(self.guard.ctx.id())))
    }

    fn note(&mut self, item: &Item) {
        self.clock.item_seen();
        if self.items == 0 && is_of_answer(item) {
            let after = self.started.elapsed();
            self.guard.telemetry.first_item(after);
            if !self.is_canary() {
                self.guard.telemetry.recent.first_item(after);
            }
        }
        self.items += 1;
        match item {
            Ok(Output::Finished(finished)) => {
                self.note_prompt(finished);
                self.end(RequestEnd::Finished(finished.reason));
            }
            Err(error) => self.end(RequestEnd::Failed(error.kind())),
            Ok(Output::Tokens(_) | Output::Text(_) | Output::Embeddings(_) | Output::Scores(_)) => {
            }
        }
    }

    /// Returns whether the request is a canary, which has no permit.
    fn is_canary(&self) -> bool {
        matches!(&self.places, Some((_, None)))
    }

    /// Records how much of the prompt was reused; unknown if the request was cut or cancelled.
    fn note_prompt(&self, finished: &Finished) {
        let knows = finished.reason != FinishReason::Cancelled && !self.guard.is_cut;
        if knows && !self.is_canary() {
            let usage = finished.usage;
            let cached = usage.cached_tokens.unwrap_or(0).min(usage.prompt_tokens);
            let recent = &self.guard.telemetry.recent;
            recent.prompt(usage.prompt_tokens, cached);
        }
    }

    /// Runs once: frees the slots, notifies the engine if it does not know, and counts the end.
    fn end(&mut self, end: RequestEnd) {
        if std::mem::replace(&mut self.is_ended, true) {
            return;
        }
        let ended_by_engine =
            matches!(end, RequestEnd::Finished(reason) if reason != FinishReason::Cancelled);
        if !ended_by_engine {
            self.drop_outputs();
            self.abort.send();
        }
        self.places = None;
        let (telemetry, prompt_tokens) = (&self.guard.telemetry, self.guard.prompt_tokens());
        if !self.guard.knows_prompt {
            telemetry.add_prompt_tokens(prompt_tokens);
        }
        telemetry.request_ended(end, self.guard.streamed_tokens, self.started.elapsed());
        tracing::debug!(
            request_id = self.guard.ctx.id(),
            ?end,
            prompt_tokens,
            completion_tokens = self.guard.streamed_tokens,
            duration_ms = self.started.elapsed().as_secs_f64() * 1e3,
            "request ended"
        );
    }

    /// After the terminal: polls once for an item that must not exist.
    fn poll_rest(&mut self, cx: &mut Context<'_>) {
        let Some(outputs) = self.outputs.as_mut() else {
            return;
        };
        let polled =
            std::panic::catch_unwind(AssertUnwindSafe(|| Pin::new(&mut *outputs).poll_next(cx)));
        let is_more = outputs.violation().is_some();
        match polled {
            Ok(_) if is_more => self.guard.violation(Violation::ItemAfterTerminal),
            Ok(_) => {}
            Err(_panic) => self.guard.violation(Violation::Panic),
        }
        self.drop_outputs();
    }

    /// Drops the engine's stream, and contains a panic in it.
    fn drop_outputs(&mut self) {
        let outputs = self.outputs.take();
        let dropped = std::panic::catch_unwind(AssertUnwindSafe(|| drop(outputs)));
        if dropped.is_err() {
            self.guard.violation(Violation::Panic);
        }
    }
}

impl Stream for GuardedStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let this = &mut *self;
        let _span = this.span.clone().entered();
        if this.is_ended {
            this.poll_rest(cx);
            return Poll::Ready(None);
        }
        let Poll::Ready(item) = this.poll_engine(cx) else {
            return Poll::Pending;
        };
        this.note(&item);
        Poll::Ready(Some(item))
    }
}

impl Drop for GuardedStream {
    fn drop(&mut self) {
        self.end(RequestEnd::Dropped);
        self.drop_outputs();
    }
}

/// Returns whether an item is part of an answer: neither an error nor the end of a cancelled request.
fn is_of_answer(item: &Item) -> bool {
    match item {
        Ok(Output::Finished(finished)) => finished.reason != FinishReason::Cancelled,
        Ok(Output::Tokens(_) | Output::Text(_) | Output::Embeddings(_) | Output::Scores(_)) => true,
        Err(_) => false,
    }
}

/// Returns a counter that changes while the engine makes progress for a request with `items` items: reported steps. Before the
/// first item, when the request may be queued in the engine, answers to others count too.
fn progress(in_flight: &InFlight, items: u64) -> u64 {
    let answers = if items == 0 { in_flight.answers() } else { 0 };
    in_flight.steps().wrapping_add(answers)
}

/// The deadline and the idle limit of one stream, on one timer that is reset only when it fires.
struct Clock {
    sleep: Option<Pin<Box<Sleep>>>,
    deadline: Option<Instant>,
    idle: Option<Duration>,
    was_active: bool,
    /// The engine's [`progress`] when the timer last fired.
    progress: u64,
}

impl Clock {
    fn new(deadline: Option<Instant>, idle: Option<Duration>, progress: u64, now: Instant) -> Self {
        let next = Self::next(deadline, idle, now);
        let sleep = next.map(|at| Box::pin(tokio::time::sleep_until(at)));
        Self {
            sleep,
            deadline,
            idle,
            was_active: false,
            progress,
        }
    }

    fn next(deadline: Option<Instant>, idle: Option<Duration>, now: Instant) -> Option<Instant> {
        let idle = idle.map(|idle| now + idle);
        deadline.into_iter().chain(idle).min()
    }

    fn item_seen(&mut self) {
        self.was_active = true;
    }

    /// Returns a message when a limit has passed. An engine with new `progress` is not silent: the request is queued, or its
    /// prompt is being computed.
    fn poll(&mut self, cx: &mut Context<'_>, progress: u64) -> Poll<String> {
        let Some(sleep) = self.sleep.as_mut() else {
            return Poll::Pending;
        };
        while sleep.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if self.deadline.is_some_and(|deadline| now >= deadline) {
                return Poll::Ready("the request's deadline passed before it finished".into());
            }
            let has_progressed = std::mem::replace(&mut self.progress, progress) != progress;
            let was_active = std::mem::take(&mut self.was_active) || has_progressed;
            if let Some(idle) = self.idle
                && !was_active
            {
                return Poll::Ready(format!(
                    "the engine was silent for {} s",
                    idle.as_secs_f64()
                ));
            }
            let Some(next) = Self::next(self.deadline, self.idle, now) else {
                return Poll::Pending;
            };
            sleep.as_mut().reset(next);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handles::MetricsRegistry;

    #[tokio::test(start_paused = true)]
    async fn a_rule_that_is_always_broken_is_logged_once_a_minute() {
        let telemetry = Telemetry::register(&MetricsRegistry::default());
        let config = EngineConfig::new("m", 64);
        let request = GenerateRequest::from_tokens("m", vec![1]);
        for _ in 0..3 {
            let ctx = RequestContext::new("r");
            let guard = Guard::new(&config, &request, ctx, telemetry.clone());
            guard.violation(Violation::EmptyChunk);
        }
        tokio::time::advance(Duration::from_secs(60)).await;
        let unlogged = telemetry.logged.unlogged(Violation::EmptyChunk.name());
        assert_eq!(unlogged, Some(2));
    }
}
