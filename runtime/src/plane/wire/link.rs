//! [`Link`]: one end of a greeted connection. Reads frames, writes the outbox, finds out when the peer is dead.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use genset_backend_common::wire::{
    Frame, FrameDecoder, FrameKind, GoAway, GoAwayCode, HEADER_BYTES, Leaving, encode_payload,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;

use super::config::WireConfig;
use super::memory::{Held, Memory};
use super::metrics::WireMetrics;
use super::outbox::{Batch, Outbox};
use super::transport::Io;
use crate::names::InstanceId;

/// Bytes read at once.
const READ_BYTES: usize = 64 << 10;

/// Slices written at once.
const WRITE_SLICES: usize = 16;

/// The most bytes of a ping, which come back.
const MAX_PING_BYTES: usize = 4096;

/// What is kept of a reason that a peer gives: it goes into logs and errors.
const MAX_REASON_BYTES: usize = 1024;

/// The beginning of a text, at most so many bytes.
pub(super) fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push_str("...");
    }
    text
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Ended {
    #[error("the peer closed the connection")]
    Closed,
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error("the peer was silent for {} s", .0.as_secs_f64())]
    Silent(Duration),
    #[error("the peer took nothing for {} s", .0.as_secs_f64())]
    Stalled(Duration),
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    #[error("the peer ended the connection: {0}")]
    Refused(String),
    #[error("this process shuts down")]
    Shutdown,
}

impl Ended {
    /// The label in metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Broken(_) => "broken",
            Self::Silent(_) => "silent",
            Self::Stalled(_) => "stalled",
            Self::Protocol(_) => "protocol",
            Self::Refused(_) => "refused_by_peer",
            Self::Shutdown => "shutdown",
        }
    }
}

/// What a peer did against the protocol.
#[derive(Debug)]
pub(super) struct Violation(pub(super) String);

/// Takes the frames of streams.
pub(super) trait FrameSink: Send + Sync {
    /// Takes a frame that is not about the connection itself. Never waits.
    ///
    /// # Errors
    /// [`Violation`] ends the connection.
    fn frame(&self, frame: Frame) -> Result<(), Violation>;

    /// Whether frames are read only while there is room for what is answered to them: a peer that asks and takes no answers
    /// must not fill the memory.
    fn is_paced(&self) -> bool;

    /// A frame of a stream is not read, for want of memory.
    fn overloaded(&self, stream: u32);

    /// The peer wants no new streams.
    fn go_away(&self, go_away: GoAway);
}

/// What both ends of a connection share with their streams.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) outbox: Outbox,
    pub(super) peer: String,
    /// What the peer may make us hold.
    pub(super) memory: Arc<Memory>,
    closing: Notify,
}

impl Link {
    pub(super) fn new(
        config: &WireConfig,
        process_memory: &Arc<Memory>,
        peer: String,
        peer_max_frame_bytes: u32,
    ) -> Self {
        let limit = usize::try_from(peer_max_frame_bytes).unwrap_or(usize::MAX);
        let memory = process_memory.of_connection(config.max_connection_memory_bytes);
        Self {
            outbox: Outbox::new(config.max_outbox_bytes, limit, &memory),
            peer,
            memory,
            closing: Notify::new(),
        }
    }

    /// Tells the peer to open no more streams.
    pub(super) fn go_away(&self, code: GoAwayCode, reason: &str) {
        let go_away = GoAway {
            code,
            reason: reason.to_owned(),
        };
        if let Ok(payload) = encode_payload(&go_away) {
            self.control(FrameKind::GoAway, 0, &payload);
        }
    }

    /// Tells the peer that an instance takes no new requests.
    pub(super) fn leaving(&self, instance: InstanceId) {
        let leaving = Leaving {
            instance: instance.0,
        };
        if let Ok(payload) = encode_payload(&leaving) {
            self.control(FrameKind::Leaving, 0, &payload);
        }
    }

    /// Sends a small frame.
    pub(super) fn control(&self, kind: FrameKind, stream: u32, payload: &[u8]) {
        if let Err(error) = self.outbox.push(kind, stream, payload) {
            // The frames of control are far below every limit that a handshake lets pass.
            tracing::error!(?kind, %error, "a control frame cannot be sent");
        }
    }

    /// Ends the connection once what waits in the outbox is written.
    pub(super) fn close(&self) {
        self.closing.notify_one();
    }

    /// Runs the connection to its end.
    pub(super) async fn drive(
        self: &Arc<Self>,
        io: Io,
        decoder: FrameDecoder,
        config: &WireConfig,
        sink: &dyn FrameSink,
        metrics: &WireMetrics,
    ) -> Ended {
        let Io { reader, writer, .. } = io;
        let signs = Signs::default();
        let mut reading = Reading {
            reader,
            decoder,
            link: self,
            sink,
            signs: &signs,
            coming: None,
        };
        let mut writing = Writing {
            writer,
            link: self,
            signs: &signs,
        };
        let ended = tokio::select! {
            ended = reading.run() => ended,
            ended = writing.run() => ended,
            ended = self.keep(config, &signs) => ended,
        };
        metrics.ended(&ended);
        if let Ended::Protocol(reason) = &ended {
            self.go_away(GoAwayCode::Protocol, reason);
        }
        // What the peer should still hear, if it listens: without it a refusal would look like a crash. After half a batch
        // it could make no sense of more.
        if !signs.is_writing.load(Ordering::Relaxed) {
            let _ = tokio::time::timeout(config.ping_interval, writing.finish()).await;
        }
        ended
    }

    /// Pings a silent peer, and gives it up when it stays silent. Time is counted in ticks, and a tick that comes late does not
    /// count: after this process was suspended, or while it gets no processor, the peer gets as long as ever.
    async fn keep(&self, config: &WireConfig, signs: &Signs) -> Ended {
        let mut ticks = tokio::time::interval(config.ping_interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        ticks.tick().await;
        let (mut silent, mut stalled) = (Duration::ZERO, Duration::ZERO);
        loop {
            let due = ticks.tick().await;
            let is_late = due.elapsed() >= config.ping_interval / 2;
            let counted = if is_late {
                Duration::ZERO
            } else {
                config.ping_interval
            };
            let has_been_heard = signs.heard.swap(false, Ordering::Relaxed);
            // Whoever is not listened to is not silent; whether it takes anything is seen below.
            if has_been_heard || signs.is_paused.load(Ordering::Relaxed) {
                silent = Duration::ZERO;
            } else {
                silent += counted;
                self.control(FrameKind::Ping, 0, &[]);
            }
            let is_moving = signs.written.swap(false, Ordering::Relaxed);
            if is_moving || !signs.is_writing.load(Ordering::Relaxed) {
                stalled = Duration::ZERO;
            } else {
                stalled += counted;
            }
            if silent >= config.peer_timeout {
                return Ended::Silent(silent);
            }
            if stalled >= config.write_timeout {
                return Ended::Stalled(stalled);
            }
        }
    }
}

/// Signs of life.
#[derive(Debug, Default)]
struct Signs {
    heard: AtomicBool,
    /// Nothing is read until there is room for answers.
    is_paused: AtomicBool,
    written: AtomicBool,
    is_writing: AtomicBool,
}

struct Reading<'a> {
    reader: Box<dyn tokio::io::AsyncRead + Send + Unpin>,
    decoder: FrameDecoder,
    link: &'a Link,
    sink: &'a dyn FrameSink,
    signs: &'a Signs,
    /// Room for the frame that has begun to come.
    coming: Option<Held>,
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

    /// What is still to come of a large frame that there is room for.
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
            // Frames are cheap for the peer: a flood on one link must not keep the others of this thread waiting.
            tokio::task::coop::consume_budget().await;
            if self.sink.is_paced() && !self.link.outbox.has_room() {
                self.signs.is_paused.store(true, Ordering::Relaxed);
                self.link.outbox.room().await;
                self.signs.is_paused.store(false, Ordering::Relaxed);
            }
        }
        self.make_room()
    }

    /// Takes room for the rest of a large frame before it is read, or lets it pass by unread.
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
            // Without room, the peer has enough to read already that says that we are here.
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
        let go_away: GoAway = genset_backend_common::wire::decode_payload(&frame.payload)
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
        while batch.len() > 0 {
            let mut slices = [IoSlice::new(&[]); WRITE_SLICES];
            let count = batch.slices(&mut slices);
            let slices = slices.get(..count).unwrap_or_default();
            let written = self.writer.write_vectored(slices).await?;
            if written == 0 {
                return Err(std::io::ErrorKind::WriteZero.into());
            }
            batch.advance(written);
            self.signs.written.store(true, Ordering::Relaxed);
        }
        self.writer.flush().await?;
        self.signs.is_writing.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Writes what waits, and ends our direction.
    async fn finish(&mut self) -> std::io::Result<()> {
        if !self.link.outbox.is_empty() {
            let mut batch = self.link.outbox.take(BytesMut::new()).await;
            self.write(&mut batch).await?;
        }
        self.writer.shutdown().await
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;
    use genset_backend_common::prometheus::metrics::gauge::Gauge;

    use super::*;

    fn link(config: &WireConfig) -> Link {
        let memory = Memory::of_process(config.max_memory_bytes, Gauge::default());
        Link::new(config, &memory, "peer".into(), u32::MAX)
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_given_up_after_its_time() {
        let config = WireConfig::default();
        let (link, signs) = (link(&config), Signs::default());
        let began = tokio::time::Instant::now();
        let ended = link.keep(&config, &signs).await;
        assert_eq!(ended, Ended::Silent(config.peer_timeout));
        assert_eq!(began.elapsed(), config.peer_timeout);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_this_process_did_not_run_is_not_the_peers() {
        let config = WireConfig::default();
        let (link, signs) = (link(&config), Signs::default());
        let mut keeping = pin!(link.keep(&config, &signs));
        for _ in 0..10 {
            assert!(poll!(&mut keeping).is_pending());
            tokio::time::advance(2 * config.peer_timeout).await;
        }
        let back = tokio::time::Instant::now();
        assert!(poll!(&mut keeping).is_pending());
        assert_eq!(keeping.await, Ended::Silent(config.peer_timeout));
        assert_eq!(back.elapsed(), config.peer_timeout);
    }
}
