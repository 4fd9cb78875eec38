//! [`Caller`]: the end of a connection that asks. It opens streams and reads their items.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use genset_backend_common::inbox::{Inbox, Taken};
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{CancelReason, EngineError, ErrorKind, RequestContext, error::At};
use genset_wire::{
    Cancel, Credit, Frame, FrameKind, GoAway, HeldBytes, Leaving, RequestHead, WireError,
    decode_payload, encode_payload, encode_request,
};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use super::control::ControlRight;
use super::handshake::Role;
use super::link::{Ended, FrameSink, Link, Violation, cut};
use super::metrics::{GaugeGuard, WireMetrics};
use crate::names::{EndpointName, InstanceId};
use crate::plane::ResponseStream;

/// Items up to this size are copied out of the buffer they were read into, so that one unread item does not keep all of it.
const COPY_BYTES: usize = 4096;

/// Items up to this size need no part of the budget: a stream's credit bounds them.
const UNCOUNTED_BYTES: usize = 256;

/// How long an instance that leaves is left out, unless discovery announces it anew. Discovery has taken it off its list by
/// then, and where it has not, the instance refuses.
const LEAVING_TIME: Duration = Duration::from_secs(5);

/// The most instances of a process that are known to leave. Requests to others are refused by them.
const MAX_LEAVING: usize = 1024;

/// How long after its deadline a request is waited for: the callee's own end of it is on its way, unless nobody is awake there.
const LATE_TIME: Duration = Duration::from_secs(1);

/// What is kept of an error's message: it goes to a client and into logs.
const MAX_MESSAGE_BYTES: usize = 8 << 10;

/// Our connection to a process that serves.
pub(super) struct Caller {
    link: Arc<Link>,
    window_items: u32,
    table: Mutex<Table>,
    open: Gauge,
    control: ControlRight,
    /// Instances that take no new requests, and when they said so.
    leaving: Mutex<HashMap<InstanceId, Instant>>,
}

struct Table {
    next_id: u32,
    slots: HashMap<u32, Arc<Slot>>,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    Open,
    /// Streams that are open go on, and no new ones may be opened.
    GoingAway,
    Ended(Ended),
}

/// Where one stream's items wait for their reader.
type Slot = Inbox<Unread, Result<(), EngineError>>;

/// An item, and its part of the budget: small ones have none.
type Unread = (Bytes, Option<HeldBytes>);

impl Caller {
    pub(super) fn new(
        link: Arc<Link>,
        window_items: u32,
        metrics: &WireMetrics,
        control: ControlRight,
    ) -> Arc<Self> {
        let table = Table {
            next_id: 1,
            slots: HashMap::new(),
            state: State::Open,
        };
        Arc::new(Self {
            link,
            window_items,
            table: Mutex::new(table),
            open: metrics.streams(Role::Caller),
            control,
            leaving: Mutex::default(),
        })
    }

    /// Whether new streams may be opened.
    pub(super) fn is_open(&self) -> bool {
        let table = self.table.lock();
        matches!(table.state, State::Open) && table.next_id < u32::MAX
    }

    /// Whether an instance said lately that it takes no new requests.
    pub(super) fn is_leaving(&self, instance: InstanceId) -> bool {
        let said = self.leaving.lock().get(&instance).copied();
        said.is_some_and(|said| said.elapsed() < LEAVING_TIME)
    }

    /// An instance is announced anew: it takes requests.
    pub(super) fn announced(&self, instance: InstanceId) {
        self.leaving.lock().remove(&instance);
    }

    fn leaving(&self, instance: InstanceId) {
        tracing::debug!(peer = self.link.peer, %instance, "an instance takes no new requests");
        let mut leaving = self.leaving.lock();
        leaving.retain(|_, said| said.elapsed() < LEAVING_TIME);
        if leaving.len() < MAX_LEAVING {
            leaving.insert(instance, Instant::now());
        }
    }

    /// Sends a request. Resolves with the first item, or with what the stream ended with in its place.
    ///
    /// # Errors
    /// What the callee refused with; `Disconnected` when the connection ended, and `CannotConnect` when it had before the request
    /// was on its way; `InvalidArgument` for a request larger than the callee takes; why it was cancelled where that came before the
    /// request was on its way; `DeadlineExceeded` where its deadline did, or passed a second ago without an end.
    ///
    /// # Cancel safety
    /// Dropping the future or the stream cancels the request.
    pub(super) async fn call(
        self: &Arc<Self>,
        endpoint: &EndpointName,
        instance: InstanceId,
        body: &[u8],
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        self.room(&ctx).await?;
        let mut head = RequestHead {
            instance: instance.0,
            credit: self.window_items,
            ..RequestHead::of(endpoint.to_string(), &ctx)
        };
        let mut response = self.open(ctx)?;
        head.control_proof = self.control.prove(&head.endpoint, response.id, body);
        let payload = encode_request(&head, body).map_err(|error| {
            EngineError::invalid_argument(At::other("request"), "its headers cannot be serialized")
                .with_source(error)
        })?;
        self.link
            .outbox
            .push(FrameKind::Request, response.id, &payload)
            .map_err(|error| {
                response.is_done = true;
                self.table.lock().slots.remove(&response.id);
                EngineError::invalid_argument(At::other("request"), error)
            })?;
        std::future::poll_fn(|cx| response.poll_first(cx)).await?;
        Ok(Box::pin(response))
    }

    /// Waits until the connection takes a request, or has ended.
    async fn room(&self, ctx: &RequestContext) -> Result<(), EngineError> {
        let outbox = &self.link.outbox;
        if outbox.has_room() {
            return Ok(());
        }
        let too_late = async {
            match ctx.deadline() {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = outbox.room() => Ok(()),
            () = ctx.cancelled() => {
                let reason = ctx.cancel_reason().unwrap_or(CancelReason::Client);
                Err(reason.to_error())
            }
            () = too_late => Err(EngineError::new(
                ErrorKind::DeadlineExceeded,
                "the deadline passed while the connection to the worker was full",
            )),
        }
    }

    fn open(self: &Arc<Self>, ctx: RequestContext) -> Result<Response, EngineError> {
        let mut table = self.table.lock();
        if let State::Ended(ended) = &table.state {
            return Err(ended_as(ErrorKind::CannotConnect, ended));
        }
        let id = table.next_id;
        table.next_id = id.saturating_add(1);
        // One more than it has credit for: then it is behind.
        let slot = Arc::new(Slot::new(self.window_items as usize + 1));
        table.slots.insert(id, Arc::clone(&slot));
        let late = ctx
            .deadline()
            .and_then(|deadline| deadline.checked_add(LATE_TIME));
        Ok(Response {
            id,
            slot,
            caller: Arc::clone(self),
            cancelled: Some(Box::pin(ctx.cancelled_owned())),
            late: late.map(|late| Box::pin(tokio::time::sleep_until(late))),
            ctx,
            first: None,
            unacknowledged: 0,
            is_done: false,
            _open: GaugeGuard::new(self.open.clone()),
        })
    }

    /// Ends every stream with `Disconnected`.
    pub(super) fn end(&self, ended: &Ended) {
        let mut table = self.table.lock();
        table.state = State::Ended(ended.clone());
        let slots = std::mem::take(&mut table.slots);
        drop(table);
        // Whoever waits to send a request finds the end in the table.
        self.link.outbox.close();
        for slot in slots.into_values() {
            slot.end_and_wake(Err(ended_as(ErrorKind::Disconnected, ended)));
        }
    }

    fn slot(&self, id: u32) -> Option<Arc<Slot>> {
        self.table.lock().slots.get(&id).cloned()
    }

    fn end_stream(&self, id: u32, end: Result<(), EngineError>) {
        let slot = self.table.lock().slots.remove(&id);
        if let Some(slot) = slot {
            slot.end_and_wake(end);
        }
    }

    fn item(&self, id: u32, payload: Bytes) -> Result<(), Violation> {
        // Nobody reads a stream that was dropped; its last items were on their way.
        let Some(slot) = self.slot(id) else {
            return Ok(());
        };
        let item = if payload.len() <= COPY_BYTES {
            Bytes::copy_from_slice(&payload)
        } else {
            payload
        };
        let held = if item.len() <= UNCOUNTED_BYTES {
            None
        } else if let Some(held) = self.link.memory.try_hold(item.len()) {
            Some(held)
        } else {
            self.give_up(id);
            return Ok(());
        };
        if slot.push_and_wake((item, held)) {
            return Err(Violation(format!(
                "stream {id} has more items than it had credit for"
            )));
        }
        Ok(())
    }

    /// Ends a stream whose items do not fit. Those of another worker would not fit either.
    fn give_up(&self, id: u32) {
        let message =
            "this process holds as many bytes of answers as it may (--wire-memory-budget)";
        let error = EngineError::new(ErrorKind::Overloaded, message)
            .with_retry_after(Duration::from_secs(1))
            .with_own_shortage();
        self.end_stream(id, Err(error));
        let cancel = Cancel {
            reason: CancelReason::Client,
            discard: true,
        };
        self.cancel(id, cancel);
    }

    fn cancel(&self, id: u32, cancel: Cancel) {
        if let Ok(payload) = encode_payload(&cancel) {
            self.link.control(FrameKind::Cancel, id, &payload);
        }
    }

    fn grant(&self, id: u32, items: u32) {
        if let Ok(payload) = encode_payload(&Credit { items }) {
            self.link.control(FrameKind::Credit, id, &payload);
        }
    }
}

/// The error of a request whose connection ended.
fn ended_as(kind: ErrorKind, ended: &Ended) -> EngineError {
    // Clients read it: a worker's address is in the log.
    EngineError::new(kind, format!("the connection to the worker ended: {ended}"))
}

/// The sink of a caller's connection.
pub(super) struct CallerSink(pub(super) Arc<Caller>);

impl FrameSink for CallerSink {
    fn frame(&self, frame: Frame) -> Result<(), Violation> {
        match frame.kind {
            FrameKind::Item => self.0.item(frame.stream, frame.payload),
            FrameKind::End => {
                self.0.end_stream(frame.stream, Ok(()));
                Ok(())
            }
            FrameKind::Error => {
                let error: WireError = decode_payload(&frame.payload)
                    .map_err(|error| Violation(format!("Error: {error}")))?;
                let message = cut(error.message, MAX_MESSAGE_BYTES);
                let error = WireError { message, ..error };
                self.0.end_stream(frame.stream, Err(error.into()));
                Ok(())
            }
            FrameKind::Leaving => {
                let leaving: Leaving = decode_payload(&frame.payload)
                    .map_err(|error| Violation(format!("Leaving: {error}")))?;
                self.0.leaving(InstanceId(leaving.instance));
                Ok(())
            }
            FrameKind::Request
            | FrameKind::Cancel
            | FrameKind::Credit
            | FrameKind::Hello
            | FrameKind::Auth
            | FrameKind::Ping
            | FrameKind::Pong
            | FrameKind::GoAway
            | FrameKind::Unknown(_) => Err(Violation(format!("{:?} from a callee", frame.kind))),
        }
    }

    /// Two ends that each wait until the other reads would wait for ever; this one always reads.
    fn is_paced(&self) -> bool {
        false
    }

    fn overloaded(&self, stream: u32) {
        if self.0.slot(stream).is_some() {
            self.0.give_up(stream);
        }
    }

    fn go_away(&self, go_away: GoAway) {
        tracing::debug!(
            peer = self.0.link.peer,
            reason = go_away.reason,
            "the peer takes no new requests"
        );
        let mut table = self.0.table.lock();
        if matches!(table.state, State::Open) {
            table.state = State::GoingAway;
        }
    }
}

/// The response to one request, read from its slot.
struct Response {
    id: u32,
    slot: Arc<Slot>,
    caller: Arc<Caller>,
    ctx: RequestContext,
    /// Asked only while nothing is there to read; `None` once the callee was told, or has ended the stream. A request's own
    /// end cancels its context: whoever still listened then would be woken for nothing.
    cancelled: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// When the callee is waited for no longer; `None` without a deadline, and once the stream has ended.
    late: Option<Pin<Box<Sleep>>>,
    /// The first item, which was waited for before there was a response, and whether the end was there, too.
    first: Option<(Unread, bool)>,
    /// Items read for which the callee has no new credit yet.
    unacknowledged: u32,
    is_done: bool,
    _open: GaugeGuard,
}

impl Response {
    /// Resolves once there is an item, or the end; an error in the place of the first item is taken.
    fn poll_first(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), EngineError>> {
        let Poll::Ready(first) = self.poll_slot(cx) else {
            self.forward_cancellation(cx);
            return self.poll_late(cx).map(Err);
        };
        self.first = first?;
        Poll::Ready(Ok(()))
    }

    /// Tells the callee when the request was cancelled here; its terminal still comes.
    fn forward_cancellation(&mut self, cx: &mut Context<'_>) {
        if let Some(cancelled) = &mut self.cancelled
            && cancelled.as_mut().poll(cx).is_ready()
        {
            self.cancelled = None;
            let reason = self.ctx.cancel_reason().unwrap_or(CancelReason::Client);
            let cancel = Cancel {
                reason,
                discard: false,
            };
            self.caller.cancel(self.id, cancel);
        }
    }

    /// Resolves when the deadline has passed and the callee has not ended the stream; it is ended here then.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<EngineError> {
        let Some(late) = &mut self.late else {
            return Poll::Pending;
        };
        ready!(late.as_mut().poll(cx));
        self.late = None;
        self.cancelled = None;
        self.leave(CancelReason::Deadline);
        let error = CancelReason::Deadline.to_error();
        Poll::Ready(error.with_request_id(self.ctx.id()))
    }

    /// Forgets the stream, unless it has ended, and tells the callee.
    fn leave(&mut self, reason: CancelReason) {
        if std::mem::replace(&mut self.is_done, true) {
            return;
        }
        let was_open = self.caller.table.lock().slots.remove(&self.id).is_some();
        if was_open {
            let cancel = Cancel {
                reason,
                discard: true,
            };
            self.caller.cancel(self.id, cancel);
        }
    }

    /// The next item, and whether the end is there, too; `None` at the end.
    fn poll_slot(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<(Unread, bool)>, EngineError>> {
        if self.is_done {
            return Poll::Ready(Ok(None));
        }
        Poll::Ready(match ready!(self.slot.poll_take(cx)) {
            Taken::Item {
                item, has_ended, ..
            } => Ok(Some((item, has_ended))),
            Taken::End(end) => {
                self.is_done = true;
                self.cancelled = None;
                self.late = None;
                end.map(|()| None)
            }
        })
    }

    /// Hands on an item, and gives its credit back.
    fn read(&mut self, ((item, _held), has_ended): (Unread, bool)) -> Bytes {
        if has_ended {
            self.cancelled = None;
            self.late = None;
        } else {
            self.acknowledge();
        }
        item
    }

    fn acknowledge(&mut self) {
        self.unacknowledged += 1;
        if self.unacknowledged >= self.caller.window_items / 2 {
            self.caller.grant(self.id, self.unacknowledged);
            self.unacknowledged = 0;
        }
    }
}

impl Stream for Response {
    type Item = Result<Bytes, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let item = match this.first.take() {
            Some(first) => Poll::Ready(Ok(Some(first))),
            None => this.poll_slot(cx),
        };
        let item = item.map_ok(|item| item.map(|item| this.read(item)));
        // A slow reader may never find its inbox empty.
        if item.is_pending() || this.ctx.is_cancelled() {
            this.forward_cancellation(cx);
        }
        match item {
            Poll::Ready(item) => Poll::Ready(item.transpose()),
            Poll::Pending => this.poll_late(cx).map(|error| Some(Err(error))),
        }
    }
}

impl Drop for Response {
    fn drop(&mut self) {
        self.leave(self.ctx.cancel_reason().unwrap_or(CancelReason::Client));
    }
}
