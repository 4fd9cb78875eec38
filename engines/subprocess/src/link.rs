//! [`Link`]: the connection to the process: its calls and their answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use genset_backend_common::inbox::Inbox;
use genset_backend_common::prometheus::metrics::gauge::Gauge;
use genset_backend_common::{CancelReason, EngineError, error::At};
use genset_wire::{
    Cancel, Frame, FrameKind, GoAway, GoAwayCode, MAX_HEAD_BYTES, Memory, Outbox, PayloadError,
    RequestHead, WireError, decode_payload, encode_payload,
};
use parking_lot::Mutex;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::batch::Batch;
use crate::call::Call;
use crate::config::MIN_FRAME_BYTES;
use crate::failure::ChildFailure;

/// Queued bytes above which new requests wait. Frames of open requests are queued regardless: they are few and small.
const ROOM_BYTES: usize = 1 << 20;

/// Holds the items of a call until they are read, and then how the call ended.
pub(crate) type CallInbox = Inbox<Bytes, Result<(), EngineError>>;

/// The connection, shared by the calls and the tasks that serve it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) outbox: Outbox,
    streams: Mutex<Streams>,
    /// Whether anything was received since the last check.
    heard: AtomicBool,
    trouble: Mutex<Option<ChildFailure>>,
    troubled: CancellationToken,
    /// Cancelled when nothing more will come.
    pub(crate) closed: CancellationToken,
}

#[derive(Debug, Default)]
struct Streams {
    last_id: u32,
    /// Every stream that the process has not ended. A stream without an inbox has no reader any more.
    open: HashMap<u32, Option<Arc<CallInbox>>>,
    /// The error of new calls after the end.
    dead: Option<EngineError>,
}

impl Link {
    pub(crate) fn new() -> Self {
        // The number of requests is limited where they are admitted, so memory is not limited here.
        let memory = Memory::of_process(usize::MAX, Gauge::default());
        Self {
            outbox: Outbox::new(ROOM_BYTES, MIN_FRAME_BYTES as usize, &memory),
            streams: Mutex::default(),
            heard: AtomicBool::new(false),
            trouble: Mutex::default(),
            troubled: CancellationToken::new(),
            closed: CancellationToken::new(),
        }
    }

    /// Opens a stream. `window`: the maximum number of unread items.
    ///
    /// # Errors
    /// `InvalidArgument` if the request exceeds the frame size or its head exceeds the head size; the process's failure if it
    /// has ended.
    ///
    /// # Cancel safety
    /// If the future is dropped before it returns, no request was sent.
    pub(crate) async fn call<T: Serialize>(
        self: &Arc<Self>,
        head: RequestHead,
        body: &T,
        window: u32,
    ) -> Result<Call, EngineError> {
        let head = RequestHead {
            credit: window,
            ..head
        };
        let unwritable = |error: PayloadError| {
            EngineError::internal("the request cannot be written as MessagePack").with_source(error)
        };
        let body = encode_payload(body).map_err(unwritable)?;
        let head = encode_payload(&head).map_err(unwritable)?;
        if head.len() > MAX_HEAD_BYTES {
            let problem = PayloadError::HeadTooLong;
            return Err(EngineError::invalid_argument(At::other("headers"), problem));
        }
        self.outbox.room().await;
        // One more than the credit: an inbox that is full holds an item without credit.
        let inbox = Arc::new(CallInbox::new(window as usize + 1));
        let id = self.streams.lock().open(&inbox)?;
        let call = Call::new(Arc::clone(self), id, inbox, window);
        let outbox = &self.outbox;
        let pushed = outbox.push_parts(FrameKind::Request, id, &head, body.into());
        if let Err(error) = pushed {
            self.streams.lock().open.remove(&id);
            call.forget();
            return Err(EngineError::invalid_argument(At::other("request"), error));
        }
        Ok(call)
    }

    /// Cancels a stream that has no reader any more. It stays registered until the process has ended it.
    pub(crate) fn cancel(&self, id: u32, reason: CancelReason) {
        let is_open = match self.streams.lock().open.get_mut(&id) {
            Some(inbox) => inbox.take().is_some(),
            None => false,
        };
        if is_open {
            let discard = false;
            self.send(FrameKind::Cancel, id, &Cancel { reason, discard });
        }
    }

    /// Ends every active call with `error`; the connection stays open.
    pub(crate) fn end_calls(&self, error: EngineError) {
        let ids: Vec<u32> = {
            let streams = self.streams.lock();
            for inbox in streams.open.values().flatten() {
                inbox.end_and_wake(Err(error.clone()));
            }
            streams.open.keys().copied().collect()
        };
        for id in ids {
            self.cancel(id, CancelReason::Shutdown);
        }
    }

    /// Ends all active and future calls with `error`.
    pub(crate) fn fail(&self, error: EngineError) {
        let mut streams = self.streams.lock();
        let error = streams.dead.get_or_insert(error).clone();
        for inbox in std::mem::take(&mut streams.open).values().flatten() {
            inbox.end_and_wake(Err(error.clone()));
        }
        drop(streams);
        self.closed.cancel();
        // Nobody writes any more. Calls that wait for room receive the error above.
        self.outbox.close();
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.streams.lock().dead.is_some()
    }

    /// Sends a frame that is small enough to fit.
    pub(crate) fn send<T: Serialize>(&self, kind: FrameKind, stream: u32, payload: &T) {
        if let Ok(payload) = encode_payload(payload)
            && let Err(error) = self.outbox.push(kind, stream, &payload)
        {
            tracing::error!(?kind, stream, %error, "a frame was not sent");
        }
    }

    pub(crate) fn go_away(&self, code: GoAwayCode, reason: impl Into<String>) {
        let reason = reason.into();
        self.send(FrameKind::GoAway, 0, &GoAway { code, reason });
    }

    /// Sends a heartbeat, unless the outbox is full: the frames in it serve as one.
    pub(crate) fn ping(&self) {
        if self.outbox.has_room() && self.outbox.push(FrameKind::Ping, 0, b"").is_err() {
            tracing::error!("an empty frame is over the process's limit");
        }
    }

    /// Whether anything was received since the last call.
    pub(crate) fn was_heard(&self) -> bool {
        self.heard.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn hear(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// Records a failure of the process; the first one counts.
    pub(crate) fn report(&self, failure: ChildFailure) {
        self.trouble.lock().get_or_insert(failure);
        self.troubled.cancel();
    }

    /// Waits until a failure is recorded.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future loses nothing.
    pub(crate) async fn trouble(&self) -> ChildFailure {
        self.troubled.cancelled().await;
        self.trouble
            .lock()
            .clone()
            .unwrap_or(ChildFailure::ClosedSocket)
    }

    /// Handles a frame from the process.
    ///
    /// # Errors
    /// The rule that the frame violates.
    pub(crate) fn arrived(&self, frame: Frame) -> Result<(), ChildFailure> {
        let Frame {
            kind,
            stream,
            payload,
        } = frame;
        match kind {
            FrameKind::Item if stream == 0 => self.arrived_batch(payload),
            FrameKind::Item => self.streams.lock().item(stream, payload),
            FrameKind::End => self.streams.lock().end(stream, Ok(())),
            FrameKind::Error => {
                let error: WireError = decode_payload(&payload).map_err(|error| {
                    ChildFailure::protocol(format!("Error frame: {}", error.detail()))
                })?;
                self.streams.lock().end(stream, Err(error.into()))
            }
            // If the outbox is full, the frames in it already show the process that we are alive.
            FrameKind::Ping if !self.outbox.has_room() => Ok(()),
            FrameKind::Ping => self
                .outbox
                .push(FrameKind::Pong, 0, &payload)
                .map_err(|error| ChildFailure::protocol(format!("Ping frame: {error}"))),
            FrameKind::Pong | FrameKind::Leaving | FrameKind::Unknown(_) => Ok(()),
            FrameKind::GoAway => {
                let reason = decode_payload(&payload).map(|go_away: GoAway| go_away.reason);
                tracing::info!(reason = reason.ok(), "the engine's process is going away");
                Ok(())
            }
            FrameKind::Hello
            | FrameKind::Request
            | FrameKind::Cancel
            | FrameKind::Credit
            | FrameKind::Auth => Err(ChildFailure::protocol(format!(
                "it sent a {kind:?} frame, which an engine's process may not send after its Hello"
            ))),
        }
    }

    fn arrived_batch(&self, payload: Bytes) -> Result<(), ChildFailure> {
        let malformed =
            |_| ChildFailure::protocol("a batch that is no list of [stream, item] pairs");
        let batch = Batch::try_new(payload).map_err(malformed)?;
        let mut streams = self.streams.lock();
        for pair in batch {
            let (stream, item) = pair.map_err(malformed)?;
            match item {
                Some(item) => streams.item(stream, item)?,
                None => streams.end(stream, Ok(()))?,
            }
        }
        Ok(())
    }
}

impl Streams {
    fn open(&mut self, inbox: &Arc<CallInbox>) -> Result<u32, EngineError> {
        if let Some(error) = &self.dead {
            return Err(error.clone());
        }
        // Ids wrap around after 2^32 requests; skip those still open.
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            if !self.open.contains_key(&self.last_id) {
                self.open.insert(self.last_id, Some(Arc::clone(inbox)));
                return Ok(self.last_id);
            }
        }
    }

    fn item(&mut self, stream: u32, item: Bytes) -> Result<(), ChildFailure> {
        let Some(inbox) = self.open.get(&stream) else {
            return self.not_open(stream);
        };
        // A stream without an inbox has no reader any more: its Cancel is on the way.
        let Some(inbox) = inbox else { return Ok(()) };
        if inbox.push_and_wake(item) {
            let what = format!("an item without credit on stream {stream}");
            return Err(ChildFailure::protocol(what));
        }
        Ok(())
    }

    fn end(&mut self, stream: u32, how: Result<(), EngineError>) -> Result<(), ChildFailure> {
        let Some(inbox) = self.open.remove(&stream) else {
            return self.not_open(stream);
        };
        if let Some(inbox) = inbox {
            inbox.end_and_wake(how);
        }
        Ok(())
    }

    fn not_open(&self, stream: u32) -> Result<(), ChildFailure> {
        if self.dead.is_some() {
            return Ok(());
        }
        let what = format!("a frame for stream {stream}, which is not open");
        Err(ChildFailure::protocol(what))
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use futures_util::FutureExt as _;
    use genset_backend_common::ErrorKind;

    use super::*;

    async fn open(link: &Arc<Link>) -> Call {
        link.call(RequestHead::default(), &(), 2).await.unwrap()
    }

    /// The number of bytes that waited for the socket.
    async fn written(link: &Link) -> usize {
        let mut bytes = Vec::new();
        let mut batch = link.outbox.take(BytesMut::new()).await;
        batch.write_to(&mut bytes, || ()).await.unwrap();
        bytes.len()
    }

    fn item(stream: u32) -> Frame {
        let payload = Bytes::from_static(&[1]);
        Frame {
            kind: FrameKind::Item,
            stream,
            payload,
        }
    }

    #[tokio::test]
    async fn frames_for_streams_that_are_not_open_break_the_protocol() {
        let link = Arc::new(Link::new());
        assert!(link.arrived(item(1)).is_err());
        let call = open(&link).await;
        link.arrived(item(1)).unwrap();
        drop(call);
        link.arrived(item(1)).unwrap();
        let end = Frame {
            kind: FrameKind::End,
            ..item(1)
        };
        link.arrived(end.clone()).unwrap();
        assert!(link.arrived(end).is_err());
    }

    #[tokio::test]
    async fn more_items_than_credit_break_the_protocol() {
        let link = Arc::new(Link::new());
        let _call = open(&link).await;
        let failed = (0..5).find_map(|_| link.arrived(item(1)).err());
        assert!(failed.is_some_and(|failure| failure.to_string().contains("without credit")));
    }

    #[tokio::test]
    async fn a_stream_that_has_ended_is_given_no_credit() {
        let link = Arc::new(Link::new());
        let mut call = open(&link).await;
        written(&link).await;
        link.arrived(item(1)).unwrap();
        assert!(call.undecoded().await.unwrap().is_some());
        assert!(written(&link).await > 0);
        link.arrived(item(1)).unwrap();
        let kind = FrameKind::End;
        link.arrived(Frame { kind, ..item(1) }).unwrap();
        assert!(call.undecoded().await.unwrap().is_some());
        assert!(call.undecoded().await.unwrap().is_none());
        assert!(written(&link).now_or_never().is_none());
    }

    #[tokio::test]
    async fn pings_without_end_that_nobody_reads_the_answers_of_fill_nothing() {
        let link = Arc::new(Link::new());
        let ping = Frame {
            kind: FrameKind::Ping,
            stream: 0,
            payload: Bytes::from(vec![0; 60_000]),
        };
        for _ in 0..1000 {
            link.arrived(ping.clone()).unwrap();
            link.ping();
        }
        let waiting = written(&link).await;
        assert!((1 << 20..2 << 20).contains(&waiting), "{waiting}");
        // A process that reads again is answered again.
        link.arrived(ping).unwrap();
        assert!(written(&link).await > 60_000);
    }

    #[tokio::test]
    async fn a_request_that_waits_for_room_ends_with_the_process() {
        let link = Arc::new(Link::new());
        let payload = vec![0; 60_000];
        while link.outbox.has_room() {
            link.outbox.push(FrameKind::Credit, 1, &payload).unwrap();
        }
        let mut waiting = std::pin::pin!(link.call(RequestHead::default(), &(), 2));
        assert!(waiting.as_mut().now_or_never().is_none());
        link.fail(ChildFailure::Killed.to_error(&[]));
        let ended = waiting.now_or_never().unwrap().err();
        let message = ended.as_ref().map(EngineError::message);
        assert_eq!(message, Some(ChildFailure::Killed.to_string().as_str()));
        assert!(link.streams.lock().open.is_empty());
        // Later calls do not wait either.
        let later = link.call(RequestHead::default(), &(), 2);
        assert!(later.now_or_never().unwrap().is_err());
    }

    #[tokio::test]
    async fn a_request_over_the_limit_is_refused_and_leaves_no_stream() {
        let link = Arc::new(Link::new());
        let refused = link
            .call(RequestHead::default(), &vec![u64::MAX; 10_000], 2)
            .await;
        assert_eq!(
            refused.err().and_then(|error| error.at().cloned()),
            Some(At::other("request"))
        );
        assert!(link.streams.lock().open.is_empty());
    }

    #[tokio::test]
    async fn a_request_whose_head_is_over_its_limit_is_refused_and_leaves_no_stream() {
        let link = Arc::new(Link::new());
        let head = RequestHead {
            id: "x".repeat(MAX_HEAD_BYTES),
            ..RequestHead::default()
        };
        let error = link.call(head, &(), 2).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.at(), Some(&At::other("headers")));
        assert!(link.streams.lock().open.is_empty() && link.outbox.is_empty());
    }
}
