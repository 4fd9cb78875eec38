//! [`Queueing`]: requests for which no instance has a place wait here, and not at their clients.
//!
//! The layer is above the choice of an instance and knows none. It learns that all are full when the layer below says
//! `Overloaded`, which that does only when every candidate refused. Then one request at a time, the first in order, is tried
//! again: when an answer has ended, and now and then for answers that other frontends were given.

mod metrics;
mod order;

#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, GenerateRequest, Output, OutputStream, RequestContext,
};
use genset_runtime::InstanceId;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::metrics::ModelMetrics;
use self::order::{Entry, Refusal, Turn, Waiting};
use crate::route::{Route, Routed};

pub(crate) use self::metrics::QueueMetrics;

/// How often the first request is tried again while no answer ends here: others may have freed a place.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// A layer at which requests wait while every instance is full: by priority, then by deadline, then in the order of their arrival.
///
/// A request that would not be served before its deadline, by the rate at which those before it are, is refused at once and told
/// when to come again.
pub(crate) struct Queueing {
    below: Arc<dyn Route>,
    queue: Arc<Queue>,
}

impl Queueing {
    /// Lets at most `max_waiting` requests for `below` wait.
    pub(crate) fn new(
        below: Arc<dyn Route>,
        max_waiting: usize,
        model: &str,
        metrics: &QueueMetrics,
    ) -> Self {
        let queue = Queue {
            max_waiting,
            waiting: Mutex::default(),
            freed: Notify::new(),
            metrics: metrics.of(model),
        };
        Self {
            below,
            queue: Arc::new(queue),
        }
    }

    /// Tries the request whenever it is the first in the queue.
    async fn wait(
        &self,
        ticket: &Ticket,
        request: GenerateRequest,
        ctx: &RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        loop {
            ticket.first(ctx).await?;
            let tried = (self.below).route(request.clone(), ctx.clone(), left_out);
            match tried.await {
                Err(error) if is_full(&error, ctx) => ticket.pause(ctx).await?,
                Ok(routed) => {
                    ticket.served();
                    return Ok(routed);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Whether every instance is full.
fn is_full(error: &EngineError, ctx: &RequestContext) -> bool {
    error.kind() == ErrorKind::Overloaded && !ctx.is_cancelled()
}

#[async_trait]
impl Route for Queueing {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        if self.queue.waiting.lock().is_empty() {
            let tried = (self.below).route(request.clone(), ctx.clone(), left_out);
            match tried.await {
                Err(error) if is_full(&error, &ctx) => {}
                other => return Ok(self.queue.freeing(other?)),
            }
        }
        let ticket = self.queue.enter(request.priority, &ctx)?;
        let routed = self.wait(&ticket, request, &ctx, left_out).await?;
        Ok(self.queue.freeing(routed))
    }

    fn cached_tokens(&self, request: &GenerateRequest) -> u32 {
        self.below.cached_tokens(request)
    }
}

#[async_trait]
impl Generate for Queueing {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Ok(self.route(request, ctx, &[]).await?.outputs)
    }
}

/// The requests of a model that wait.
struct Queue {
    max_waiting: usize,
    waiting: Mutex<Waiting>,
    /// An answer has ended: there may be a place.
    freed: Notify,
    metrics: ModelMetrics,
}

impl Queue {
    /// Takes a request in. Where there are too many, the last of all is refused, which may be another.
    fn enter(self: &Arc<Self>, priority: i32, ctx: &RequestContext) -> Result<Ticket, EngineError> {
        let mut waiting = self.waiting.lock();
        let turn = waiting.turn(priority, ctx.deadline());
        let now = Instant::now();
        let wait = waiting.expected_wait(turn, now);
        if let (Some(wait), Some(left)) = (wait, ctx.time_left())
            && wait > left
        {
            return Err(self.refuse(Refusal::Deadline, Some(wait)));
        }
        if waiting.len() >= self.max_waiting {
            let wait = waiting.expected_wait(Turn::LAST, now);
            let refusal = self.refuse(Refusal::Full, wait);
            match waiting.take_last_behind(turn) {
                Some(last) => last.refuse(refusal),
                None => return Err(refusal),
            }
        }
        let entry = waiting.add(turn);
        self.metrics.waiting(waiting.len());
        drop(waiting);
        Ok(Ticket {
            queue: Arc::clone(self),
            turn,
            entry,
            entered: now,
        })
    }

    fn refuse(&self, refusal: Refusal, wait: Option<Duration>) -> EngineError {
        self.metrics.refused(refusal);
        let message = match refusal {
            Refusal::Full => format!(
                "every instance is full, and {} requests wait already; try again later",
                self.max_waiting
            ),
            Refusal::Deadline => {
                "every instance is full, and the request's deadline would pass before its turn; try again later".to_owned()
            }
        };
        let wait = wait.unwrap_or_default().max(Duration::from_secs(1));
        EngineError::new(ErrorKind::Overloaded, message).with_retry_after(wait)
    }

    /// An answer whose end frees a place.
    fn freeing(self: &Arc<Self>, routed: Routed) -> Routed {
        let outputs = Freeing {
            outputs: routed.outputs,
            queue: Arc::clone(self),
        };
        Routed {
            outputs: OutputStream::from_raw(Box::pin(outputs)),
            ..routed
        }
    }
}

/// A request's place in the queue, until it is dropped.
struct Ticket {
    queue: Arc<Queue>,
    turn: Turn,
    entry: Arc<Entry>,
    entered: Instant,
}

impl Ticket {
    /// Waits until the request is the first.
    async fn first(&self, ctx: &RequestContext) -> Result<(), EngineError> {
        loop {
            if let Some(refusal) = self.entry.refusal() {
                return Err(refusal);
            }
            if self.queue.waiting.lock().is_first(self.turn) {
                return Ok(());
            }
            self.until(ctx, self.entry.woken()).await?;
        }
    }

    /// Waits until it may be worth another try.
    async fn pause(&self, ctx: &RequestContext) -> Result<(), EngineError> {
        let worth_it = async {
            tokio::select! {
                () = self.queue.freed.notified() => {}
                () = self.entry.woken() => {}
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
            }
        };
        self.until(ctx, worth_it).await
    }

    /// Waits for `what`, as long as the request is wanted.
    async fn until(
        &self,
        ctx: &RequestContext,
        what: impl Future<Output = ()>,
    ) -> Result<(), EngineError> {
        let deadline = async {
            match ctx.deadline() {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = ctx.cancelled() => {
                let reason = ctx.cancel_reason().unwrap_or(CancelReason::Client);
                Err(reason.to_error())
            }
            () = deadline => Err(CancelReason::Deadline.to_error()),
            () = what => Ok(()),
        }
    }

    /// An instance took the request.
    fn served(&self) {
        let now = Instant::now();
        self.queue.waiting.lock().served(now);
        self.queue.metrics.served(now.duration_since(self.entered));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut waiting = self.queue.waiting.lock();
        waiting.remove(self.turn);
        self.queue.metrics.waiting(waiting.len());
    }
}

/// An answer. Its end is told to the queue.
struct Freeing {
    outputs: OutputStream,
    queue: Arc<Queue>,
}

impl Stream for Freeing {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.outputs).poll_next(cx)
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        self.queue.freed.notify_one();
    }
}
