//! [`Caller`]: the requesting end of a connection. It opens streams and reads their items.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use genset_backend_common::inbox::{Inbox, Taken};
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{CancelReason, EngineError, ErrorKind, RequestContext, error::At};
use genset_wire::{
    Cancel, Credit, Frame, FrameKind, GoAway, HeldBytes, Leaving, RequestHead, WireError,
    decode_payload, encode_payload,
};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use super::control::ControlRight;
use super::handshake::Role;
use super::link::{Ended, FrameSink, Link, Violation, cut};
use super::metrics::{GaugeGuard, WireMetrics};
use crate::names::{EndpointName, InstanceId};
use crate::plane::ResponseStream;

/// Items up to this size are copied out of the read buffer, so that one unread item does not keep all of it alive.
const COPY_BYTES: usize = 4096;

/// Items up to this size do not count against the budget: a stream's credit bounds them.
const UNCOUNTED_BYTES: usize = 256;

/// How long a leaving instance is skipped, unless discovery announces it again. By then it is unlisted; if it is not, the
/// instance refuses requests.
pub(super) const LEAVING_TIME: Duration = Duration::from_secs(5);

/// The most leaving instances of a process to remember. Other leaving instances refuse requests themselves.
const MAX_LEAVING: usize = 1024;

/// How long to wait for a request after its deadline: the callee normally ends it, unless it hangs.
const LATE_TIME: Duration = Duration::from_secs(1);

/// The maximum length of a stored error message, which goes to a client and into logs.
const MAX_MESSAGE_BYTES: usize = 8 << 10;

/// The maximum length of the names in a stored error.
const MAX_NAME_BYTES: usize = 256;

/// Our connection to a serving process.
pub(super) struct Caller {
    link: Arc<Link>,
    window_items: u32,
    table: Mutex<Table>,
    open: Gauge,
    control: ControlRight,
    leaving: Mutex<LeavingInstances>,
    /// Whether to look closer before an instance of the process counts as reachable. Set while one is leaving.
    doubt: Arc<AtomicBool>,
}

/// Instances that take no new requests.
#[derive(Default)]
struct LeavingInstances {
    /// The time of each one's announcement.
    said: HashMap<InstanceId, Instant>,
    /// The time of the last announcement.
    last: Option<Instant>,
}

/// Whether an instance that said so at this time is still leaving.
fn is_recent(said: Instant) -> bool {
    said.elapsed() < LEAVING_TIME
}

struct Table {
    next_id: u32,
    slots: HashMap<u32, Arc<Slot>>,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    Open,
    /// Open streams continue; new ones are refused.
    GoingAway,
    Ended(Ended),
}

/// The queue of a stream's items for its reader.
type Slot = Inbox<Unread, Result<(), EngineError>>;

/// An item and its share of the budget; small items have none.
type Unread = (Bytes, Option<HeldBytes>);

impl Caller {
    pub(super) fn new(
        link: Arc<Link>,
        window_items: u32,
        metrics: &WireMetrics,
        control: ControlRight,
        doubt: Arc<AtomicBool>,
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
            doubt,
        })
    }

    /// Whether new streams may be opened.
    pub(super) fn is_open(&self) -> bool {
        let table = self.table.lock();
        matches!(table.state, State::Open) && table.next_id < u32::MAX
    }

    /// Whether an instance recently announced that it takes no new requests. Ends the doubt if none did: this must be the
    /// current connection to the process, and stay it for the time of the call.
    pub(super) fn is_leaving(&self, instance: InstanceId) -> bool {
        let mut leaving = self.leaving.lock();
        if !leaving.last.is_some_and(is_recent) {
            leaving.said.clear();
            self.doubt.store(false, Ordering::Relaxed);
        }
        leaving.said.get(&instance).copied().is_some_and(is_recent)
    }

    /// An instance was announced again: it takes requests.
    pub(super) fn announced(&self, instance: InstanceId) {
        self.leaving.lock().said.remove(&instance);
    }

    fn leaving(&self, instance: InstanceId) {
        tracing::debug!(peer = self.link.peer, %instance, "an instance takes no new requests");
        let mut leaving = self.leaving.lock();
        leaving.said.retain(|_, said| is_recent(*said));
        if leaving.said.len() < MAX_LEAVING {
            let now = Instant::now();
            leaving.said.insert(instance, now);
            leaving.last = Some(now);
            // Under the lock, so that nobody who looked before ends the doubt after.
            self.doubt.store(true, Ordering::Relaxed);
        }
    }

    /// Sends a request. Resolves with the first item, or with the end of the stream if there is none.
    ///
    /// # Errors
    /// The callee's refusal; `Disconnected` if the connection ended after the request was sent, `CannotConnect` if before;
    /// `InvalidArgument` for a request larger than the callee accepts; the cancellation reason if the request was cancelled
    /// before it was sent; `DeadlineExceeded` if the deadline passed before then, or passed a second ago and the stream has not
    /// ended.
    ///
    /// # Cancel safety
    /// Dropping the future or the stream cancels the request.
    pub(super) async fn call(
        self: &Arc<Self>,
        endpoint: &EndpointName,
        instance: InstanceId,
        body: Bytes,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Bytes>, EngineError> {
        let room = self.room(&ctx).await;
        room.map_err(|error| error.or_request_id(ctx.id()))?;
        let mut head = RequestHead {
            instance: instance.0,
            credit: self.window_items,
            ..RequestHead::of(endpoint.to_string(), &ctx)
        };
        let mut response = self.open(ctx)?;
        head.control_proof = self.control.prove(&head.endpoint, response.id, &body);
        let head = encode_payload(&head).map_err(|error| {
            EngineError::invalid_argument(At::other("request"), "its headers cannot be serialized")
                .with_source(error)
        })?;
        self.link
            .outbox
            .push_parts(FrameKind::Request, response.id, &head, body)
            .map_err(|error| {
                response.is_done = true;
                self.table.lock().slots.remove(&response.id);
                EngineError::invalid_argument(At::other("request"), error)
            })?;
        std::future::poll_fn(|cx| response.poll_first(cx)).await?;
        Ok(Box::pin(response))
    }

    /// Waits until the connection has room for a request, or has ended.
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
            let error = ended_as(ErrorKind::CannotConnect, ended);
            return Err(error.or_request_id(ctx.id()));
        }
        let id = table.next_id;
        table.next_id = id.saturating_add(1);
        // One more than its credit, so that exceeding the credit shows.
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
        // Senders that wait for room find the end in the table.
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
        // The stream was dropped; its last items were still in transit.
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

    /// Ends a stream whose items exceed the memory budget. Another worker's items would not fit either.
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

/// Shortens the texts of a worker's error.
fn shortened(mut error: WireError) -> WireError {
    let cut_name = |name| cut(name, MAX_NAME_BYTES);
    error.message = cut(error.message, MAX_MESSAGE_BYTES);
    error.details.at = error.details.at.map(|at| match at {
        At::Request(field) => At::Request(field),
        At::Setting(name) => At::Setting(cut_name(name)),
        At::Other(name) => At::Other(cut_name(name)),
    });
    error.details.request_id = error.details.request_id.map(cut_name);
    error
}

/// The error of a request whose connection ended.
fn ended_as(kind: ErrorKind, ended: &Ended) -> EngineError {
    // Clients read it; the log has the worker's address.
    EngineError::new(kind, format!("the connection to the worker ended: {ended}"))
}

impl FrameSink for Arc<Caller> {
    fn frame(&self, frame: Frame) -> Result<(), Violation> {
        match frame.kind {
            FrameKind::Item => self.item(frame.stream, frame.payload),
            FrameKind::End => {
                self.end_stream(frame.stream, Ok(()));
                Ok(())
            }
            FrameKind::Error => {
                let error: WireError = decode_payload(&frame.payload)
                    .map_err(|error| Violation(format!("Error: {error}")))?;
                self.end_stream(frame.stream, Err(shortened(error).into()));
                Ok(())
            }
            FrameKind::Leaving => {
                let leaving: Leaving = decode_payload(&frame.payload)
                    .map_err(|error| Violation(format!("Leaving: {error}")))?;
                self.leaving(InstanceId(leaving.instance));
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

    fn overloaded(&self, stream: u32) {
        if self.slot(stream).is_some() {
            self.give_up(stream);
        }
    }

    fn go_away(&self, go_away: GoAway) {
        tracing::debug!(
            peer = self.link.peer,
            reason = go_away.reason,
            "the peer takes no new requests"
        );
        let mut table = self.table.lock();
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
    /// Polled only while there is nothing to read. `None` after the callee was notified or has ended the stream: the end of
    /// a request cancels its own context, which would wake a listener for nothing.
    cancelled: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// When to stop waiting for the callee; `None` without a deadline, and after the stream has ended.
    late: Option<Pin<Box<Sleep>>>,
    /// The first item, which was awaited before the response existed, and whether the end came with it.
    first: Option<(Unread, bool)>,
    /// Items read for which the callee has no new credit yet.
    unacknowledged: u32,
    is_done: bool,
    _open: GaugeGuard,
}

impl Response {
    /// Resolves at the first item or the end; returns an error that came in place of the first item.
    fn poll_first(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), EngineError>> {
        let Poll::Ready(first) = self.poll_slot(cx) else {
            self.forward_cancellation(cx);
            return self.poll_late(cx).map(Err);
        };
        self.first = first?;
        Poll::Ready(Ok(()))
    }

    /// Notifies the callee if the request was cancelled here; its terminal frame still arrives.
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

    /// Resolves if the deadline has passed and the callee has not ended the stream; then ends it here.
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

    /// Forgets the stream and notifies the callee, unless it has ended.
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

    /// The next item, and whether the end came with it; `None` at the end.
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
                    .map_err(|error| error.or_request_id(self.ctx.id()))
            }
        })
    }

    /// Returns an item and grants its credit again.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_workers_error_is_long() {
        let long = "a".repeat(100_000);
        let error = EngineError::internal(&long)
            .with_at(At::other(&long))
            .with_request_id(&long);
        let error = shortened(WireError::from(&error));
        let at = error.details.at.as_ref().map(At::name);
        let id = error.details.request_id.as_deref();
        for (text, most) in [
            (Some(error.message.as_str()), MAX_MESSAGE_BYTES),
            (at, MAX_NAME_BYTES),
            (id, MAX_NAME_BYTES),
        ] {
            assert_eq!(text.map(str::len), Some(most + "...".len()));
        }
    }
}
