//! [`MigratingStream`]: one answer, from any number of instances.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use genset_backend_common::log_limit::OncePerMinute;
use genset_backend_common::memory::Memory;
use genset_backend_common::{
    CancelReason, Capabilities, EngineError, ErrorKind, GenerateRequest, Output, OutputStream,
    RequestContext,
};
use genset_runtime::InstanceId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::MigrationConfig;
use super::metrics::ModelMetrics;
use super::resume::{GoesOn, Kept, Stuck, resume, without_seam};
use crate::patience::Patience;
use crate::route::{Holder, Route, Routed};

type Item = Result<Output, EngineError>;
type Moving = Pin<Box<dyn Future<Output = Result<Routed, EngineError>> + Send>>;

/// State shared by the requests of a model.
pub(super) struct Parts {
    pub(super) below: Arc<dyn Route>,
    /// The maximum number of migrations of a request.
    pub(super) limit: u32,
    pub(super) context_length_tokens: u32,
    pub(super) capabilities: Capabilities,
    pub(super) config: MigrationConfig,
    pub(super) metrics: ModelMetrics,
    pub(super) budget: Arc<Memory>,
    pub(super) nobody_comes: CancellationToken,
    /// Limits the log: when the last instance is lost, so are all of its requests.
    pub(super) logged: OncePerMinute,
}

/// An answer that survives the loss of its instance.
pub(super) struct MigratingStream {
    parts: Arc<Parts>,
    request: GenerateRequest,
    ctx: RequestContext,
    kept: Kept,
    source: Source,
    /// The instances that lost the request, oldest first.
    left: Vec<InstanceId>,
    /// Tokens that were streamed before the current instance took over.
    resumed: u32,
    moves: u32,
}

enum Source {
    At(Holder, OutputStream),
    Moving(Move),
    Ended,
}

/// A request between two instances.
struct Move {
    moving: Moving,
    /// Whether it waits until an instance is available.
    waits: bool,
    /// The error of the last instance.
    cause: EngineError,
    since: Instant,
}

impl MigratingStream {
    pub(super) fn new(
        parts: Arc<Parts>,
        request: GenerateRequest,
        ctx: RequestContext,
        kept: Kept,
        routed: Routed,
    ) -> Self {
        Self {
            parts,
            request,
            ctx,
            kept,
            source: Source::At(routed.holder, routed.outputs),
            left: Vec::new(),
            resumed: 0,
            moves: 0,
        }
    }

    /// Records an item on its way to the client.
    fn pass(&mut self, mut output: Output) -> Output {
        match &mut output {
            Output::Finished(finished) => without_seam(finished, self.resumed),
            given @ (Output::Tokens(_)
            | Output::Text(_)
            | Output::Embeddings(_)
            | Output::Scores(_)) => {
                self.kept.push(given);
            }
        }
        output
    }

    /// Handles the failure of the instance `from`: returns the terminal, or `None` if the request migrates.
    fn leave(&mut self, from: Option<InstanceId>, cause: EngineError) -> Option<Item> {
        let may_move = cause.policy().is_migratable && !cause.is_own_shortage();
        if !may_move || self.ctx.is_cancelled() {
            return Some(Err(cause));
        }
        // A layer below has already waited for an instance without success.
        let Some(from) = from else {
            self.parts.metrics.failed(Stuck::NoInstance);
            return Some(Err(cause));
        };
        if cause.kind() == ErrorKind::Disconnected {
            self.ctx.note_loss();
        }
        if self.moves >= self.parts.limit || self.ctx.has_lost_too_many() {
            return Some(Err(self.lost(Stuck::Limit, &cause)));
        }
        let context = self.parts.context_length_tokens;
        let (request, resumed) = match resume(&self.request, &self.kept, context) {
            Ok(GoesOn::As(request, resumed)) => (*request, resumed),
            Ok(GoesOn::Ends(finished)) => return Some(Ok(Output::Finished(Box::new(finished)))),
            Err(why) => return Some(Err(self.lost(why, &cause))),
        };
        self.moves += 1;
        self.resumed = resumed;
        self.left.push(from);
        tracing::info!(
            request_id = self.ctx.id(),
            model = self.request.model,
            %from,
            reason = %cause.kind(),
            tokens = resumed,
            moves = self.moves,
            error = %cause,
            "the request moves to another instance"
        );
        // Ids are unique among the requests in flight, and the lost instance may still have this one.
        let ctx = self
            .ctx
            .sibling(usize::try_from(self.moves).unwrap_or(usize::MAX));
        let waits = resumed > 0 || cause.kind().is_instance_gone();
        let search = Search {
            parts: Arc::clone(&self.parts),
            request,
            ctx,
            left: self.left.clone(),
            waits,
        };
        self.source = Source::Moving(Move {
            moving: Box::pin(search.run(None)),
            waits,
            cause,
            since: Instant::now(),
        });
        None
    }

    /// Continues the answer at the instance that took the request.
    fn arrive(&mut self, routed: Routed, cause: &EngineError, since: Instant) {
        self.ctx.note_move();
        self.parts.metrics.moved(cause.kind(), since.elapsed());
        tracing::info!(
            request_id = self.ctx.id(),
            to = routed.holder.id().map(tracing::field::display),
            "the request goes on"
        );
        self.source = Source::At(routed.holder, routed.outputs);
    }

    /// Returns the terminal of a request that no instance took.
    fn give_up(&self, cause: &EngineError, waits: bool, last: EngineError) -> Item {
        match self.ctx.cancel_reason() {
            Some(_) => {
                let prompt = self.request.prompt_tokens().unwrap_or(0);
                Output::cancelled(&self.ctx, prompt, self.resumed)
            }
            None if self.ctx.time_left() == Some(Duration::ZERO) => {
                self.parts.metrics.failed(Stuck::Deadline);
                Err(CancelReason::Deadline
                    .to_error()
                    .with_request_id(self.ctx.id()))
            }
            None if last.may_go_elsewhere() && self.ctx.has_lost_too_many() => {
                Err(self.lost(Stuck::Limit, cause))
            }
            None if last.may_go_elsewhere()
                && (!waits || self.parts.nobody_comes.is_cancelled()) =>
            {
                self.parts.metrics.failed(Stuck::NoInstance);
                Err(cause.clone())
            }
            None if last.may_go_elsewhere() => Err(self.lost(Stuck::NoInstance, cause)),
            None => Err(last),
        }
    }

    /// Returns the error of a request that cannot migrate.
    fn lost(&self, why: Stuck, cause: &EngineError) -> EngineError {
        self.parts.metrics.failed(why);
        let what = match why {
            // The source carries the reason as a value, for the client.
            Stuck::NotResumable(why) => {
                let message = format!("{cause}; {why}; send the request again");
                return EngineError::new(cause.kind(), message)
                    .with_details(cause.details().clone())
                    .with_source(why);
            }
            // The same error as without this layer.
            Stuck::Deadline => return cause.clone(),
            Stuck::Limit if self.resumed == 0 => return cause.clone(),
            Stuck::NotKept => "there was no memory to keep it for a move".to_owned(),
            Stuck::Limit if self.moves < self.parts.limit => {
                "it has lost as many instances as its model allows".to_owned()
            }
            Stuck::Limit => format!(
                "it had moved {} times, as often as its model allows",
                self.moves
            ),
            Stuck::NoInstance => return self.nobody_took_it(cause),
        };
        EngineError::new(
            cause.kind(),
            format!("{cause}; {what}; send the request again"),
        )
        .with_details(cause.details().clone())
        .with_source(cause.clone())
    }

    /// Returns the error of a request that lost its instance and found no other. Clients read its message, which must not include
    /// the cause's text: an engine's may contain process output.
    fn nobody_took_it(&self, cause: &EngineError) -> EngineError {
        if let Some(unlogged) = self.parts.logged.unlogged("nobody took it") {
            tracing::warn!(request_id = self.ctx.id(), error = %cause, unlogged, "the request lost its instance, and no other took it; further requests are only counted for a minute");
        }
        let message = format!(
            "the request lost its instance ({}); no other instance took it within {} s; send the request again",
            cause.kind(),
            self.parts.config.wait.as_secs_f64()
        );
        EngineError::new(ErrorKind::Unavailable, message)
            .with_details(cause.details().clone())
            .with_retry_after(Duration::from_secs(1))
            .with_source(cause.clone())
    }
}

impl Stream for MigratingStream {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let this = &mut *self;
        loop {
            match &mut this.source {
                Source::Ended => return Poll::Ready(None),
                Source::At(holder, outputs) => match ready!(Pin::new(outputs).poll_next(cx)) {
                    Some(Ok(output)) => return Poll::Ready(Some(Ok(this.pass(output)))),
                    None => this.source = Source::Ended,
                    Some(Err(cause)) => {
                        let instance = holder.id();
                        this.source = Source::Ended;
                        if let Some(end) = this.leave(instance, cause) {
                            return Poll::Ready(Some(end));
                        }
                    }
                },
                Source::Moving(Move { moving, .. }) => {
                    let moved = ready!(moving.as_mut().poll(cx));
                    let source = std::mem::replace(&mut this.source, Source::Ended);
                    let Source::Moving(Move {
                        cause,
                        since,
                        waits,
                        ..
                    }) = source
                    else {
                        continue;
                    };
                    match moved {
                        Ok(routed) => this.arrive(routed, &cause, since),
                        Err(last) => return Poll::Ready(Some(this.give_up(&cause, waits, last))),
                    }
                }
            }
        }
    }
}

/// Returns whether an error means that no instance is available, as opposed to full instances.
pub(super) fn is_away(kind: ErrorKind) -> bool {
    kind.is_instance_gone() || kind == ErrorKind::Unavailable
}

/// Waits for an instance for a request whose answer has not begun, after the layer below reported that none is available.
///
/// # Errors
/// The last instance's refusal, the reason of the cancellation, or that the deadline passed.
pub(super) async fn await_instance(
    parts: &Arc<Parts>,
    request: GenerateRequest,
    ctx: &RequestContext,
    refusal: EngineError,
) -> Result<Routed, EngineError> {
    tracing::info!(request_id = ctx.id(), model = request.model, error = %refusal, "the request waits for an instance");
    let search = Search {
        parts: Arc::clone(parts),
        request,
        // A disconnected instance may still have the request under its own id.
        ctx: ctx.sibling(0),
        left: Vec::new(),
        waits: true,
    };
    let found = search.run(Some(refusal)).await;
    found.map_err(|last| {
        let is_late = ctx.time_left() == Some(Duration::ZERO);
        let over = is_late.then_some(CancelReason::Deadline);
        match ctx.cancel_reason().or(over) {
            Some(reason) => reason.to_error().with_request_id(ctx.id()),
            None => last,
        }
    })
}

/// The search for an instance that takes over a request.
struct Search {
    parts: Arc<Parts>,
    request: GenerateRequest,
    ctx: RequestContext,
    left: Vec<InstanceId>,
    /// Whether it waits for an instance: the answer has begun, or the old instance is gone and may be replaced.
    waits: bool,
}

impl Search {
    /// Asks the instances that did not lose the request. If none takes it, it waits and then asks all: the only instance may be
    /// back, or was only disconnected. If all were asked already and one `refused`, it starts with the wait.
    async fn run(self, mut refused: Option<EngineError>) -> Result<Routed, EngineError> {
        let mut patience = Patience::new(self.parts.config.wait, &self.ctx);
        let mut left_out = &self.left[..];
        loop {
            let answer = match refused.take() {
                Some(refusal) => Err(refusal),
                None => self.ask(left_out).await,
            };
            let error = match answer {
                // A request that crashes its instances must not reach further ones.
                Err(error) if error.may_go_elsewhere() && !self.ctx.has_lost_too_many() => error,
                decided => return decided,
            };
            let goes_on = self.waits
                && tokio::select! {
                    biased;
                    () = self.parts.nobody_comes.cancelled() => false,
                    goes_on = patience.pause(&self.ctx) => goes_on,
                };
            if !goes_on {
                return Err(error);
            }
            left_out = if left_out.is_empty() { &self.left } else { &[] };
        }
    }

    async fn ask(&self, left_out: &[InstanceId]) -> Result<Routed, EngineError> {
        let (request, ctx) = (self.request.clone(), self.ctx.clone());
        let asked = self.parts.below.route(request, ctx, left_out);
        tokio::select! {
            biased;
            error = self.ctx.over() => Err(error),
            asked = asked => asked,
            // The layers below also wait briefly for another instance.
            () = self.parts.nobody_comes.cancelled() => Err(CancelReason::Shutdown.to_error()),
        }
    }
}
