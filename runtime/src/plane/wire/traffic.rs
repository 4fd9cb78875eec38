//! [`Traffic`]: the bytes of one connection, both ways. Frames are read and written on the process's main runtime, where their
//! streams are, so a token costs no hop between threads. A main runtime that is busy with requests would look dead to
//! the peer, so the [`VitalRuntime`](crate::VitalRuntime) nudges the traffic when the main runtime does not poll it.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::BytesMut;
use futures_util::future::{BoxFuture, Fuse, FutureExt};
use genset_wire::{
    Batch, Frame, FrameDecoder, FrameKind, GoAway, GoAwayCode, HEADER_BYTES, HeldBytes,
};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::config::WireConfig;
use super::link::{Ended, FrameSink, Link, Violation, cut};
use super::transport::Io;

/// Bytes per read.
const READ_BYTES: usize = 64 << 10;

/// Frames per unit of a task's budget. A task out of budget is queued again and wakes a sleeping thread: with one unit per frame,
/// this was a tenth of the cost of a token.
const FRAMES_A_UNIT: usize = 8;

/// The maximum size of a ping in bytes; pongs echo it.
const MAX_PING_BYTES: usize = 4096;

/// The maximum length of a peer's reason, which goes into logs and errors.
const MAX_REASON_BYTES: usize = 1024;

/// Signs of life of a connection.
#[derive(Debug, Default)]
pub(super) struct Signs {
    /// The peer was heard.
    pub(super) heard: AtomicBool,
    /// Reading is paused until there is room for responses.
    pub(super) is_paused: AtomicBool,
    /// The peer accepted bytes.
    pub(super) written: AtomicBool,
    pub(super) is_writing: AtomicBool,
}

/// Reads and writes a connection to its end. One task [carries](Self::carry) it and is woken for more work. Another thread may
/// [nudge](Self::nudge) it.
pub(super) struct Traffic {
    signs: Arc<Signs>,
    /// The carrying task has run since the last [`Self::nudge`].
    was_carried: AtomicBool,
    flow: Mutex<Flow>,
}

struct Flow {
    /// Fused: a nudge may come after its end.
    run: Fuse<BoxFuture<'static, Ended>>,
    /// The waker of the carrying task.
    waker: Option<Waker>,
    /// The end of the connection, if a nudge reached it.
    ended: Option<Ended>,
}

impl Flow {
    /// Reads and writes all it can on behalf of the carrying task; ready at the end.
    fn poll(&mut self) -> Poll<Ended> {
        if let Some(ended) = self.ended.take() {
            return Poll::Ready(ended);
        }
        let waker = self.waker.as_ref().unwrap_or(Waker::noop());
        self.run.poll_unpin(&mut Context::from_waker(waker))
    }
}

impl Traffic {
    /// The traffic of a greeted connection; `decoder` holds the bytes that the peer has sent already.
    pub(super) fn new(
        link: &Arc<Link>,
        io: Io,
        decoder: FrameDecoder,
        sink: impl FrameSink + 'static,
        config: &WireConfig,
    ) -> Self {
        let signs = Arc::<Signs>::default();
        let (link, ping_interval) = (Arc::clone(link), config.ping_interval);
        let of_run = Arc::clone(&signs);
        let run = async move {
            let signs = of_run;
            let Io { reader, writer, .. } = io;
            let mut reading = Reading {
                reader,
                decoder,
                link: &link,
                sink: &sink,
                signs: &signs,
                coming: None,
                frames: 0,
            };
            let mut writing = Writing {
                writer,
                link: &link,
                signs: &signs,
            };
            let ended = tokio::select! {
                ended = reading.run() => ended,
                ended = writing.run() => ended,
            };
            if let Ended::Protocol(reason) = &ended {
                link.go_away(GoAwayCode::Protocol, reason);
            }
            // Send the last frames if the peer still reads: without them, a refusal would look like a crash. After a partial
            // batch they would make no sense.
            if !signs.is_writing.load(Ordering::Relaxed) {
                let _ = tokio::time::timeout(ping_interval, writing.finish()).await;
            }
            ended
        };
        let flow = Flow {
            run: run.boxed().fuse(),
            waker: None,
            ended: None,
        };
        Self {
            signs,
            was_carried: AtomicBool::new(false),
            flow: Mutex::new(flow),
        }
    }

    /// The observed signs of life of the peer.
    pub(super) fn signs(&self) -> &Signs {
        &self.signs
    }

    /// Carries the connection to its end.
    ///
    /// # Cancel safety
    /// Another call resumes where this one was dropped.
    pub(super) async fn carry(&self) -> Ended {
        poll_fn(|cx| {
            self.was_carried.store(true, Ordering::Relaxed);
            let mut flow = self.flow.lock();
            if !flow
                .waker
                .as_ref()
                .is_some_and(|it| it.will_wake(cx.waker()))
            {
                flow.waker = Some(cx.waker().clone());
            }
            flow.poll()
        })
        .await
    }

    /// Whether the carrying task has run since the last call. If it has not, writes pending frames and reads what
    /// is available.
    pub(super) fn nudge(&self) -> bool {
        if self.was_carried.swap(false, Ordering::Relaxed) {
            return true;
        }
        // The holder of the lock does the work.
        let Some(mut flow) = self.flow.try_lock() else {
            return true;
        };
        // Twice: a writer yields once before it writes.
        for _ in 0..2 {
            if let Poll::Ready(ended) = flow.poll() {
                flow.ended = Some(ended);
                break;
            }
        }
        false
    }

    /// Wakes the carrying task, if the lock is free.
    pub(super) fn wake(&self) {
        if let Some(waker) = self
            .flow
            .try_lock()
            .as_ref()
            .and_then(|it| it.waker.as_ref())
        {
            waker.wake_by_ref();
        }
    }

    /// Closes the connection, even while no carrying task gets to run.
    pub(super) fn close(&self) {
        let run = std::mem::replace(&mut self.flow.lock().run, Fuse::terminated());
        drop(run);
    }
}

struct Reading<'a> {
    reader: Box<dyn tokio::io::AsyncRead + Send + Unpin>,
    decoder: FrameDecoder,
    link: &'a Link,
    sink: &'a dyn FrameSink,
    signs: &'a Signs,
    /// Memory held for the frame that is arriving.
    coming: Option<HeldBytes>,
    /// Frames since the last unit of the task's budget.
    frames: usize,
}

impl Reading<'_> {
    async fn run(&mut self) -> Ended {
        loop {
            if let Err(ended) = self.take_frames().await {
                return ended;
            }
            let missing = self.missing();
            let buffer = self.decoder.buffer_mut();
            if buffer.capacity() - buffer.len() < missing.max(READ_BYTES / 4) {
                buffer.reserve(missing.max(READ_BYTES));
            }
            match self.reader.read_buf(buffer).await {
                Ok(0) => return Ended::Closed,
                Ok(_) => self.signs.heard.store(true, Ordering::Relaxed),
                Err(error) => return Ended::Broken(error.to_string()),
            }
        }
    }

    /// The outstanding bytes of a large frame for which memory is held.
    fn missing(&self) -> usize {
        let Some((_, _, payload)) = self.decoder.announced().filter(|_| self.coming.is_some())
        else {
            return 0;
        };
        (HEADER_BYTES + payload).saturating_sub(self.decoder.buffered())
    }

    async fn take_frames(&mut self) -> Result<(), Ended> {
        while let Some(frame) = self
            .decoder
            .next_frame()
            .map_err(|error| Ended::Protocol(error.to_string()))?
        {
            self.coming = None;
            self.take(frame)?;
            // Frames are cheap for the peer: a flood on one link must not starve the other links of this thread.
            self.frames += 1;
            if self.frames == FRAMES_A_UNIT {
                self.frames = 0;
                tokio::task::coop::consume_budget().await;
            }
            if self.sink.is_paced() && !self.link.outbox.has_room() {
                self.signs.is_paused.store(true, Ordering::Relaxed);
                self.link.outbox.room().await;
                self.signs.is_paused.store(false, Ordering::Relaxed);
            }
        }
        self.make_room()
    }

    /// Holds memory for the rest of a large frame before reading it, or skips the frame.
    fn make_room(&mut self) -> Result<(), Ended> {
        let Some((kind, stream, payload)) = self.decoder.announced() else {
            return Ok(());
        };
        if payload <= READ_BYTES || self.coming.is_some() {
            return Ok(());
        }
        match kind {
            FrameKind::Request | FrameKind::Item | FrameKind::Error => {
                self.coming = self.link.memory.try_hold(payload);
                if self.coming.is_none() {
                    self.decoder.skip_announced();
                    self.sink.overloaded(stream);
                }
            }
            FrameKind::Unknown(_) => self.decoder.skip_announced(),
            FrameKind::Hello
            | FrameKind::End
            | FrameKind::Cancel
            | FrameKind::Credit
            | FrameKind::Ping
            | FrameKind::Pong
            | FrameKind::GoAway
            | FrameKind::Auth
            | FrameKind::Leaving => {
                let problem = format!("{kind:?} of {payload} bytes");
                return Err(Ended::Protocol(problem));
            }
        }
        Ok(())
    }

    fn take(&self, frame: Frame) -> Result<(), Ended> {
        match frame.kind {
            FrameKind::Ping if frame.payload.len() > MAX_PING_BYTES => {
                let problem = format!("Ping of {} bytes", frame.payload.len());
                Err(Ended::Protocol(problem))
            }
            // If there is no room, unread frames already show the peer that we are alive.
            FrameKind::Ping if self.link.outbox.has_room() => {
                self.link.control(FrameKind::Pong, 0, &frame.payload);
                Ok(())
            }
            FrameKind::Ping | FrameKind::Pong | FrameKind::Unknown(_) => Ok(()),
            FrameKind::GoAway => self.go_away(&frame),
            FrameKind::Hello | FrameKind::Auth => {
                let problem = format!("{:?} after the handshake", frame.kind);
                Err(Ended::Protocol(problem))
            }
            FrameKind::Request
            | FrameKind::Item
            | FrameKind::End
            | FrameKind::Error
            | FrameKind::Cancel
            | FrameKind::Credit
            | FrameKind::Leaving => self
                .sink
                .frame(frame)
                .map_err(|Violation(reason)| Ended::Protocol(reason)),
        }
    }

    fn go_away(&self, frame: &Frame) -> Result<(), Ended> {
        let go_away: GoAway = genset_wire::decode_payload(&frame.payload)
            .map_err(|error| Ended::Protocol(error.to_string()))?;
        if go_away.code == GoAwayCode::Shutdown {
            self.sink.go_away(go_away);
            return Ok(());
        }
        Err(Ended::Refused(cut(go_away.reason, MAX_REASON_BYTES)))
    }
}

struct Writing<'a> {
    writer: Box<dyn tokio::io::AsyncWrite + Send + Unpin>,
    link: &'a Link,
    signs: &'a Signs,
}

impl Writing<'_> {
    async fn run(&mut self) -> Ended {
        let mut spent = BytesMut::new();
        loop {
            let mut batch = tokio::select! {
                biased;
                taken = self.link.outbox.take(std::mem::take(&mut spent)) => taken,
                () = self.link.closing.notified() => return Ended::Shutdown,
            };
            if let Err(error) = self.write(&mut batch).await {
                return Ended::Broken(error.to_string());
            }
            spent = batch.into_buffer();
        }
    }

    async fn write(&mut self, batch: &mut Batch) -> std::io::Result<()> {
        self.signs.is_writing.store(true, Ordering::Relaxed);
        let taken = || self.signs.written.store(true, Ordering::Relaxed);
        batch.write_to(&mut self.writer, taken).await?;
        self.signs.is_writing.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Writes what is pending, and ends our direction.
    async fn finish(&mut self) -> std::io::Result<()> {
        if !self.link.outbox.is_empty() {
            let mut batch = self.link.outbox.take(BytesMut::new()).await;
            self.write(&mut batch).await?;
        }
        self.writer.shutdown().await
    }
}
