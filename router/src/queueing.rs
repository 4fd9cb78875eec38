//! [`Queueing`]: requests wait here, not at their clients, while every instance is full.
//!
//! The layer sits above the choice of an instance. It learns from the error `Overloaded` that all instances are full: the layer
//! below returns it when all look full and as many as it asks then have refused. Then one request at a time is tried again, the
//! first in order: whenever an answer ends, and periodically, because other frontends' answers may have ended. When it is
//! refused, the next request that other instances may take is tried. When it is not refused within a moment, it leaves the
//! queue, and the next one is tried.

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
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, Output, OutputStream, RequestContext,
    card::DEFAULT_MIGRATION_LIMIT,
};
use genset_runtime::InstanceId;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::metrics::ModelMetrics;
use self::order::{Entry, Refusal, Restriction, Turn, Waiting};
use crate::route::{Route, Routed};

pub(crate) use self::metrics::QueueMetrics;

/// How often the first request is retried while no answer ends here: others may have freed a slot.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// How long a request that is tried delays the next one. A refusal usually arrives sooner: one round trip to each instance asked.
/// Over the wire an instance accepts a request with its first token, so without this limit requests would start one by one.
const GRACE: Duration = Duration::from_millis(20);

/// A layer at which requests wait while every instance is full: by priority, then by deadline, then by arrival.
///
/// A request whose deadline would pass before its turn, at the current rate, is refused at once, with a time to retry after.
pub(crate) struct Queueing {
    below: Arc<dyn Route>,
    queue: Arc<Queue>,
}

impl Queueing {
    /// Creates the layer over `below`, with at most `max_waiting` waiting requests.
    pub(crate) fn new(
        below: Arc<dyn Route>,
        max_waiting: usize,
        model: &str,
        metrics: &QueueMetrics,
    ) -> Self {
        let queue = Queue {
            max_waiting,
            waiting: Mutex::default(),
            metrics: metrics.of(model),
        };
        Self {
            below,
            queue: Arc::new(queue),
        }
    }

    /// Tries the request each time its turn comes.
    async fn wait(
        &self,
        ticket: &mut Ticket,
        request: GenerateRequest,
        ctx: &RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        loop {
            ticket.first(ctx).await?;
            let mut tried = (self.below).route(request.clone(), ctx.clone(), left_out);
            let answer = match tokio::time::timeout(GRACE, &mut tried).await {
                Ok(answer) => answer,
                Err(_) => {
                    ticket.leave();
                    tried.await
                }
            };
            match answer {
                Err(error) if is_full(&error, ctx) => {
                    ticket.come_back()?;
                    ticket.pause(ctx).await?;
                }
                Ok(routed) => {
                    ticket.served();
                    return Ok(routed);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns whether an error means that every instance is full.
fn is_full(error: &EngineError, ctx: &RequestContext) -> bool {
    let is_full = error.kind() == ErrorKind::Overloaded && !error.is_own_shortage();
    is_full && !ctx.is_cancelled()
}

#[async_trait]
impl Route for Queueing {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        // The limit covers all retries together.
        let ctx = ctx.with_loss_limit(DEFAULT_MIGRATION_LIMIT);
        let restriction = Restriction::of(&request, left_out);
        if !self.queue.waiting.lock().has_lane(&restriction) {
            let tried = (self.below).route(request.clone(), ctx.clone(), left_out);
            match tried.await {
                Err(error) if is_full(&error, &ctx) => {}
                other => return Ok(self.queue.freeing(other?)),
            }
        }
        let mut ticket = (self.queue).enter(restriction, request.priority, &ctx)?;
        let routed = self.wait(&mut ticket, request, &ctx, left_out).await?;
        Ok(self.queue.freeing(routed))
    }

    fn cached_tokens(&self, request: &GenerateRequest) -> u32 {
        self.below.cached_tokens(request)
    }
}

/// A model's waiting requests.
struct Queue {
    max_waiting: usize,
    waiting: Mutex<Waiting>,
    metrics: ModelMetrics,
}

impl Queue {
    /// Adds a request on its arrival.
    fn enter(
        self: &Arc<Self>,
        restriction: Restriction,
        priority: i32,
        ctx: &RequestContext,
    ) -> Result<Ticket, EngineError> {
        let mut waiting = self.waiting.lock();
        let turn = waiting.turn(priority, ctx.deadline());
        let now = Instant::now();
        let wait = waiting.expected_wait(&restriction, turn, now);
        if let (Some(wait), Some(left)) = (wait, ctx.time_left())
            && wait > left
        {
            return Err(self.refuse(Refusal::Deadline, Some(wait)));
        }
        let entry = self.add(&mut waiting, &restriction, turn)?;
        drop(waiting);
        Ok(Ticket {
            queue: Arc::clone(self),
            restriction,
            turn,
            entry,
            entered: now,
            left: None,
        })
    }

    /// Adds a request. If too many wait, it refuses the last one, which may be another request.
    fn add(
        &self,
        waiting: &mut Waiting,
        restriction: &Restriction,
        turn: Turn,
    ) -> Result<Arc<Entry>, EngineError> {
        if waiting.len() >= self.max_waiting {
            let now = Instant::now();
            let Some((last, wait)) = waiting.take_last_behind(turn, now) else {
                let wait = waiting.expected_wait(restriction, Turn::LAST, now);
                return Err(self.refuse(Refusal::Full, wait));
            };
            last.refuse(self.refuse(Refusal::Full, wait));
        }
        let entry = waiting.add(restriction, turn);
        self.metrics.waiting(waiting.len());
        Ok(entry)
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

    /// Wraps an answer so that its end wakes the queue.
    fn freeing(self: &Arc<Self>, routed: Routed) -> Routed {
        let outputs = Freeing {
            outputs: Some(routed.outputs),
            queue: Arc::clone(self),
        };
        Routed {
            outputs: OutputStream::from_raw(Box::pin(outputs)),
            ..routed
        }
    }
}

/// A request's place in the queue, until it leaves for an instance or is dropped.
struct Ticket {
    queue: Arc<Queue>,
    restriction: Restriction,
    turn: Turn,
    entry: Arc<Entry>,
    entered: Instant,
    /// When it left for an instance; `None` while it waits.
    left: Option<Instant>,
}

impl Ticket {
    /// Waits until the request is the first in its lane.
    async fn first(&self, ctx: &RequestContext) -> Result<(), EngineError> {
        loop {
            if let Some(refusal) = self.entry.refusal() {
                return Err(refusal);
            }
            let waiting = &self.queue.waiting;
            if waiting.lock().leads(&self.restriction, self.turn) {
                return Ok(());
            }
            self.until(ctx, self.entry.woken()).await?;
        }
    }

    /// Lets the next lane try, and waits until a retry is worthwhile.
    async fn pause(&self, ctx: &RequestContext) -> Result<(), EngineError> {
        let is_first = {
            let waiting = self.queue.waiting.lock();
            waiting.wake_next(self.turn);
            waiting.is_first(self.turn)
        };
        // Only the first request retries periodically; the others follow it.
        let interval = async {
            if is_first {
                tokio::time::sleep(RETRY_INTERVAL).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        let worth_it = async {
            tokio::select! {
                () = self.entry.woken() => {}
                () = interval => {}
            }
        };
        self.until(ctx, worth_it).await
    }

    /// Waits for `what`; fails if the request is cancelled or its deadline passes before.
    async fn until(
        &self,
        ctx: &RequestContext,
        what: impl Future<Output = ()>,
    ) -> Result<(), EngineError> {
        tokio::select! {
            biased;
            error = ctx.over() => Err(error),
            () = what => Ok(()),
        }
    }

    /// Leaves the queue for an instance, so that the next request is first.
    fn leave(&mut self) -> Instant {
        let now = Instant::now();
        self.queue.waiting.lock().served(&self.restriction, now);
        self.remove();
        self.left = Some(now);
        now
    }

    /// Handles a refusal because every instance is full: a request that had left returns to its position.
    fn come_back(&mut self) -> Result<(), EngineError> {
        let Some(left) = self.left else {
            return Ok(());
        };
        if let Some(refusal) = self.entry.refusal() {
            return Err(refusal);
        }
        let mut waiting = self.queue.waiting.lock();
        waiting.not_served(&self.restriction, left);
        self.entry = (self.queue).add(&mut waiting, &self.restriction, self.turn)?;
        self.left = None;
        Ok(())
    }

    /// Records that an instance took the request.
    fn served(&mut self) {
        let left = match self.left {
            Some(left) => left,
            None => self.leave(),
        };
        self.queue.metrics.served(left.duration_since(self.entered));
    }

    fn remove(&self) {
        let mut waiting = self.queue.waiting.lock();
        waiting.remove(&self.restriction, self.turn);
        self.queue.metrics.waiting(waiting.len());
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.left.is_none() {
            self.remove();
        }
    }
}

/// An answer whose end wakes the queue.
struct Freeing {
    /// `None` once it is dropped.
    outputs: Option<OutputStream>,
    queue: Arc<Queue>,
}

impl Stream for Freeing {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match &mut self.outputs {
            Some(outputs) => Pin::new(outputs).poll_next(cx),
            None => Poll::Ready(None),
        }
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        // Free the slot before waking a waiter.
        self.outputs = None;
        self.queue.waiting.lock().wake_first();
    }
}
