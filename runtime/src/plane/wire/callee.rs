//! [`Callee`]: the serving end of a connection. Every stream is a task that requests one item from the endpoint's handler per
//! credit, and one ahead, so that a slow reader delays only its own engine request.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{AbortHandle, abortable};
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{CancelReason, EngineError, ErrorKind, RequestContext, error::At};
use genset_wire::{
    Cancel, Credit, Frame, FrameError, FrameKind, HeldBytes, PayloadError, RequestHead, WireError,
    decode_payload, decode_request, encode_payload,
};
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use super::config::WireConfig;
use super::control::ControlRight;
use super::cost::decoded_bytes;
use super::handshake::Role;
use super::link::{FrameSink, Link, StreamGuard, Violation};
use super::metrics::{CONTROL_SECRET, GaugeGuard, WireMetrics};
use crate::names::InstanceId;
use crate::plane::ErasedHandler;

/// The most credit a caller may have outstanding on a stream.
const MAX_CREDIT_ITEMS: usize = 1 << 20;

/// A handler and the runtime of its streams: not the one of links, which a request must not delay.
#[derive(Clone)]
pub(super) struct ServedHandler {
    pub(super) handler: Arc<ErasedHandler>,
    pub(super) runtime: Handle,
}

/// The handlers a process serves, by instance and full endpoint name.
pub(super) type Handlers = Arc<RwLock<HashMap<(InstanceId, String), ServedHandler>>>;

/// One caller's connection.
pub(super) struct Callee {
    link: Arc<Link>,
    handlers: Handlers,
    max_streams: usize,
    credit_timeout: Duration,
    streams: Mutex<HashMap<u32, OpenStream>>,
    tasks: TaskTracker,
    open: Gauge,
    metrics: WireMetrics,
    control: ControlRight,
}

struct OpenStream {
    ctx: RequestContext,
    credit: Arc<Semaphore>,
    task: AbortHandle,
}

impl Callee {
    pub(super) fn new(
        link: Arc<Link>,
        handlers: Handlers,
        config: &WireConfig,
        tasks: TaskTracker,
        metrics: WireMetrics,
        control: ControlRight,
    ) -> Arc<Self> {
        Arc::new(Self {
            link,
            handlers,
            max_streams: config.max_streams,
            credit_timeout: config.credit_timeout,
            streams: Mutex::default(),
            tasks,
            open: metrics.streams(Role::Callee),
            metrics,
            control,
        })
    }

    /// Whether no stream is open.
    pub(super) fn is_idle(&self) -> bool {
        self.streams.lock().is_empty()
    }

    /// Ends every stream as if its response were dropped: nobody reads them any more.
    pub(super) fn end_streams(&self) {
        let streams = std::mem::take(&mut *self.streams.lock());
        for stream in streams.into_values() {
            stream.task.abort();
        }
    }

    fn request(self: &Arc<Self>, id: u32, payload: &Bytes) -> Result<(), Violation> {
        if id == 0 {
            return Err(Violation("a request on stream 0".into()));
        }
        let parts = decode_request(payload);
        // Before the lock of the table: a large request takes a while to scan.
        let cost = parts.as_ref().map_or(0, |(_, body)| cost_of(payload, body));
        let mut streams = self.streams.lock();
        let open = streams.len();
        let Entry::Vacant(place) = streams.entry(id) else {
            return Err(Violation(format!("stream {id} was opened twice")));
        };
        let (head, body) = match parts {
            Ok(parts) => parts,
            Err(error @ PayloadError::HeadTooLong) => {
                drop(streams);
                self.refuse(
                    id,
                    &EngineError::invalid_argument(At::other("headers"), error),
                );
                return Ok(());
            }
            Err(error) => return Err(violation("Request", &error)),
        };
        if open >= self.max_streams {
            drop(streams);
            self.refuse(id, &self.too_many());
            return Ok(());
        }
        let Some(ServedHandler { handler, runtime }) = self.handler(&head) else {
            drop(streams);
            self.refuse(id, &nobody_serves(&head));
            return Ok(());
        };
        let allowed = self
            .control
            .check(&head.endpoint, id, &body, &head.control_proof);
        if let Err(error) = allowed {
            drop(streams);
            self.refuse_for(CONTROL_SECRET, id, &error);
            return Ok(());
        }
        let Some(held) = self.link.memory.try_hold(cost) else {
            drop(streams);
            self.refuse(id, &self.no_memory());
            return Ok(());
        };
        let credit = Arc::new(Semaphore::new(
            usize::try_from(head.credit)
                .unwrap_or(MAX_CREDIT_ITEMS)
                .min(MAX_CREDIT_ITEMS),
        ));
        let ctx = head.into_context();
        let stream = Stream {
            id,
            callee: Arc::clone(self),
            credit: Arc::clone(&credit),
            _open: GaugeGuard::new(self.open.clone()),
            _sends: StreamGuard::new(&self.link),
            _held: held,
        };
        let (answer, task) = abortable(stream.answer(handler, body, ctx.clone()));
        place.insert(OpenStream { ctx, credit, task });
        // Without the lock: a runtime that has ended drops the task at once, and `Stream::drop` takes the lock.
        drop(streams);
        self.tasks.spawn_on(answer, &runtime);
        Ok(())
    }

    fn handler(&self, head: &RequestHead) -> Option<ServedHandler> {
        let key = (InstanceId(head.instance), head.endpoint.clone());
        self.handlers.read().get(&key).cloned()
    }

    fn too_many(&self) -> EngineError {
        let message = format!(
            "this connection has {} streams open, the most it may have",
            self.max_streams
        );
        EngineError::new(ErrorKind::Overloaded, message).with_retry_after(Duration::from_secs(1))
    }

    fn no_memory(&self) -> EngineError {
        let message =
            "this process holds as many bytes of requests as it may (--wire-memory-budget)";
        EngineError::new(ErrorKind::Overloaded, message).with_retry_after(Duration::from_secs(1))
    }

    fn refuse(&self, id: u32, error: &EngineError) {
        self.refuse_for(error.kind().name(), id, error);
    }

    fn refuse_for(&self, reason: &'static str, id: u32, error: &EngineError) {
        if self.metrics.refused(reason) {
            tracing::warn!(peer = self.link.peer, %error, "a request was refused; further ones for this reason are counted only");
        }
        self.send_error(id, error);
    }

    fn send_error(&self, id: u32, error: &EngineError) {
        let payload = encode_payload(&WireError::from(error)).unwrap_or_default();
        if self
            .link
            .outbox
            .push(FrameKind::Error, id, &payload)
            .is_err()
        {
            // If the details exceed the peer's frame limit, send the kind alone.
            let brief = EngineError::new(error.kind(), "the error's details are too long to send");
            let payload = encode_payload(&WireError::from(&brief)).unwrap_or_default();
            self.link.control(FrameKind::Error, id, &payload);
        }
    }

    fn cancel(&self, id: u32, payload: &Bytes) -> Result<(), Violation> {
        let cancel: Cancel =
            decode_payload(payload).map_err(|error| violation("Cancel", &error))?;
        let mut streams = self.streams.lock();
        if cancel.discard {
            // The stream may have just ended.
            if let Some(stream) = streams.remove(&id) {
                drop(streams);
                stream.ctx.cancel(cancel.reason);
                stream.task.abort();
            }
        } else if let Some(stream) = streams.get(&id) {
            stream.ctx.cancel(cancel.reason);
        }
        Ok(())
    }

    fn credit(&self, id: u32, payload: &Bytes) -> Result<(), Violation> {
        let credit: Credit =
            decode_payload(payload).map_err(|error| violation("Credit", &error))?;
        let items = usize::try_from(credit.items).unwrap_or(usize::MAX);
        let streams = self.streams.lock();
        let Some(stream) = streams.get(&id) else {
            return Ok(());
        };
        if stream.credit.available_permits().saturating_add(items) > MAX_CREDIT_ITEMS {
            return Err(Violation(format!(
                "stream {id} was given credit for more than {MAX_CREDIT_ITEMS} items"
            )));
        }
        stream.credit.add_permits(items);
        Ok(())
    }
}

impl FrameSink for Arc<Callee> {
    fn frame(&self, frame: Frame) -> Result<(), Violation> {
        match frame.kind {
            FrameKind::Request => self.request(frame.stream, &frame.payload),
            FrameKind::Cancel => self.cancel(frame.stream, &frame.payload),
            FrameKind::Credit => self.credit(frame.stream, &frame.payload),
            FrameKind::Item
            | FrameKind::End
            | FrameKind::Error
            | FrameKind::Hello
            | FrameKind::Auth
            | FrameKind::Ping
            | FrameKind::Pong
            | FrameKind::GoAway
            | FrameKind::Leaving
            | FrameKind::Unknown(_) => Err(Violation(format!("{:?} from a caller", frame.kind))),
        }
    }

    fn is_paced(&self) -> bool {
        true
    }

    fn overloaded(&self, stream: u32) {
        // An open stream continues: its second `Request` would be a violation if it were read.
        if !self.streams.lock().contains_key(&stream) {
            self.refuse(stream, &self.no_memory());
        }
    }
}

/// The estimated memory of a request until its stream ends: its bytes, their decoded form, and the stream itself.
fn cost_of(payload: &Bytes, body: &Bytes) -> usize {
    const STREAM_BYTES: usize = 4096;
    let most = payload.len().saturating_mul(4).max(decoded_bytes(body));
    most.saturating_add(STREAM_BYTES)
}

fn violation(frame: &str, error: &dyn std::fmt::Display) -> Violation {
    Violation(format!("{frame}: {error}"))
}

fn nobody_serves(head: &RequestHead) -> EngineError {
    let message = format!(
        "this process does not serve {} as instance {}",
        head.endpoint,
        InstanceId(head.instance)
    );
    EngineError::new(ErrorKind::CannotConnect, message)
}

/// A request in progress.
struct Stream {
    id: u32,
    callee: Arc<Callee>,
    credit: Arc<Semaphore>,
    _open: GaugeGuard,
    _sends: StreamGuard,
    _held: HeldBytes,
}

impl Stream {
    async fn answer(self, handler: Arc<ErasedHandler>, body: Bytes, ctx: RequestContext) {
        let ended = self.send_items(&handler, body, ctx).await;
        // Remove the stream and push its end in one step: in between, the connection would look idle and be closed.
        let mut streams = self.callee.streams.lock();
        if streams.remove(&self.id).is_none() {
            return;
        }
        match ended {
            Ok(()) => self.callee.link.control(FrameKind::End, self.id, &[]),
            Err(error) => self.callee.send_error(self.id, &error),
        }
    }

    /// Sends items as the caller grants credit. Requests one item ahead, so that the end of a response or an error
    /// needs no credit.
    async fn send_items(
        &self,
        handler: &ErasedHandler,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<(), EngineError> {
        let mut items = handler.bytes().handle(body, ctx.clone()).await?;
        while let Some(item) = items.next().await {
            let item = item?;
            self.wait_for_room(&ctx).await?;
            self.callee
                .link
                .outbox
                .push_bytes(FrameKind::Item, self.id, item)
                .map_err(|error| too_long(&error))?;
        }
        Ok(())
    }

    /// Waits until the caller has room for an item, within a time limit: others need the memory of this request.
    async fn wait_for_room(&self, ctx: &RequestContext) -> Result<(), EngineError> {
        let outbox = &self.callee.link.outbox;
        if outbox.has_room()
            && let Ok(permit) = self.credit.try_acquire()
        {
            permit.forget();
            return Ok(());
        }
        let room = async {
            if let Ok(permit) = self.credit.acquire().await {
                permit.forget();
            }
            outbox.room().await;
        };
        let limit = self.callee.credit_timeout;
        let patience = ctx.time_left().map_or(limit, |left| left.min(limit));
        tokio::select! {
            biased;
            () = room => Ok(()),
            () = ctx.cancelled() => {
                let reason = ctx.cancel_reason().unwrap_or(CancelReason::Client);
                Err(reason.to_error())
            }
            () = tokio::time::sleep(patience) => Err(EngineError::new(
                ErrorKind::DeadlineExceeded,
                format!("the caller took no item for {} s", patience.as_secs_f64()),
            )),
        }
    }
}

impl Drop for Stream {
    /// Ends the stream even if the handler panicked or its runtime has ended.
    fn drop(&mut self) {
        let mut streams = self.callee.streams.lock();
        if streams.remove(&self.id).is_some() {
            let error = if std::thread::panicking() {
                EngineError::internal("the endpoint's handler panicked")
            } else {
                EngineError::engine_shutdown("the runtime that served the endpoint has ended")
            };
            self.callee.send_error(self.id, &error);
        }
    }
}

fn too_long(error: &FrameError) -> EngineError {
    EngineError::internal(format!(
        "an item of the response is too large for the caller: {error}"
    ))
}
