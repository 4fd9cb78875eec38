//! [`Link`]: one end of a connection after the handshake. Detects a dead peer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use genset_wire::{Frame, FrameKind, GoAway, GoAwayCode, Leaving, Memory, Outbox, encode_payload};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use super::config::WireConfig;
use super::metrics::WireMetrics;
use super::traffic::Traffic;
use crate::names::InstanceId;

/// Truncates a text to at most `most` bytes.
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

/// A peer's violation of the protocol.
#[derive(Debug)]
pub(super) struct Violation(pub(super) String);

/// Receives the frames of streams.
pub(super) trait FrameSink: Send + Sync {
    /// Handles a frame that does not concern the connection itself. Never waits.
    ///
    /// # Errors
    /// [`Violation`] ends the connection.
    fn frame(&self, frame: Frame) -> Result<(), Violation>;

    /// Whether to read frames only while there is room for the responses: a peer that sends requests and reads no responses
    /// must not fill the memory. If both ends waited for the other to read, they would deadlock, so a caller always reads.
    fn is_paced(&self) -> bool {
        false
    }

    /// A frame of a stream was skipped because memory is short.
    fn overloaded(&self, stream: u32);

    /// The peer accepts no new streams; a callee opens none.
    fn go_away(&self, _go_away: GoAway) {}
}

/// State that both ends of a connection share with their streams.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) outbox: Outbox,
    pub(super) peer: String,
    /// The memory that the peer may make us hold.
    pub(super) memory: Arc<Memory>,
    /// Notified when the connection must end.
    pub(super) closing: Notify,
}

/// Counts a stream that may have something to send.
#[derive(Debug)]
pub(super) struct StreamGuard(Arc<Link>);

impl StreamGuard {
    pub(super) fn new(link: &Arc<Link>) -> Self {
        link.outbox.count_stream(true);
        Self(Arc::clone(link))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.outbox.count_stream(false);
    }
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
            // Control frames are far below every limit that a handshake allows.
            tracing::error!(?kind, %error, "a control frame cannot be sent");
        }
    }

    /// Ends the connection after the outbox is written.
    pub(super) fn close(&self) {
        self.closing.notify_one();
    }

    /// Runs the connection to its end. Its traffic runs on `main`; the check whether the peer is alive runs on the current
    /// runtime.
    pub(super) async fn drive(
        self: &Arc<Self>,
        traffic: Traffic,
        main: &Handle,
        config: &WireConfig,
        metrics: &WireMetrics,
    ) -> Ended {
        let traffic = Arc::new(traffic);
        let _until = CloseOnDrop(&traffic);
        let carried = Arc::clone(&traffic);
        let carried = main.spawn(async move { carried.carry().await });
        let carried = async {
            match AbortOnDropHandle::new(carried).await {
                Ok(ended) => ended,
                // The main runtime has shut down, but this process still runs.
                Err(error) if error.is_cancelled() => traffic.carry().await,
                Err(_) => Ended::Broken("its task panicked".to_owned()),
            }
        };
        let ended = tokio::select! {
            ended = carried => ended,
            ended = self.keep(config, &traffic) => ended,
        };
        metrics.ended(&ended);
        ended
    }

    /// Pings a silent peer, and gives up if it stays silent. Time is counted in ticks, and late ticks do not count: after this
    /// process was suspended or starved of CPU, the peer still gets its full time. Ticks during which a busy main runtime could
    /// not read do not count either.
    async fn keep(&self, config: &WireConfig, traffic: &Traffic) -> Ended {
        let signs = traffic.signs();
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
            // A peer that we do not read from is not silent; the check below shows whether it reads.
            let is_silent = !has_been_heard && !signs.is_paused.load(Ordering::Relaxed);
            if is_silent {
                self.control(FrameKind::Ping, 0, &[]);
            }
            let was_carried = traffic.nudge();
            if is_silent || !was_carried {
                traffic.wake();
            }
            if !is_silent {
                silent = Duration::ZERO;
            } else if was_carried {
                silent += counted;
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

/// Closes the connection of [`Link::drive`] when `drive` ends or is dropped.
struct CloseOnDrop<'a>(&'a Traffic);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;
    use genset_backend_common::prometheus::metrics::gauge::Gauge;
    use genset_wire::FrameDecoder;
    use tokio::io::{AsyncReadExt, DuplexStream};

    use super::*;
    use crate::plane::wire::transport::Io;

    fn link(config: &WireConfig) -> Arc<Link> {
        let memory = Memory::of_process(config.max_memory_bytes, Gauge::default());
        Arc::new(Link::new(config, &memory, "peer".into(), u32::MAX))
    }

    struct NoStreams;

    impl FrameSink for NoStreams {
        fn frame(&self, _frame: Frame) -> Result<(), Violation> {
            Ok(())
        }

        fn overloaded(&self, _stream: u32) {}
    }

    /// The traffic of a link, and the peer's end of it.
    fn traffic(link: &Arc<Link>, config: &WireConfig) -> (Traffic, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        let io = Io::split(ours, "peer".into());
        let traffic = Traffic::new(link, io, FrameDecoder::new(), NoStreams, config);
        (traffic, theirs)
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_given_up_after_its_time() {
        let config = WireConfig::default();
        let link = link(&config);
        let (traffic, _peer) = traffic(&link, &config);
        let began = tokio::time::Instant::now();
        let ended = tokio::select! {
            biased;
            ended = traffic.carry() => ended,
            ended = link.keep(&config, &traffic) => ended,
        };
        assert_eq!(ended, Ended::Silent(config.peer_timeout));
        assert_eq!(began.elapsed(), config.peer_timeout);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_this_process_did_not_run_is_not_the_peers() {
        let config = WireConfig::default();
        let link = link(&config);
        let (traffic, _peer) = traffic(&link, &config);
        let mut carrying = pin!(traffic.carry());
        let mut keeping = pin!(link.keep(&config, &traffic));
        for _ in 0..10 {
            assert!(poll!(&mut carrying).is_pending());
            assert!(poll!(&mut keeping).is_pending());
            tokio::time::advance(2 * config.peer_timeout).await;
        }
        let back = tokio::time::Instant::now();
        assert!(poll!(&mut keeping).is_pending());
        let ended = tokio::select! {
            biased;
            ended = carrying => ended,
            ended = keeping => ended,
        };
        assert_eq!(ended, Ended::Silent(config.peer_timeout));
        assert_eq!(back.elapsed(), config.peer_timeout);
    }

    #[tokio::test(start_paused = true)]
    async fn a_nudge_after_the_end_does_nothing() {
        let config = WireConfig::default();
        let link = link(&config);
        let (traffic, peer) = traffic(&link, &config);
        drop(peer);
        assert_eq!(traffic.carry().await, Ended::Closed);
        // The task that carried it counts for the first one.
        assert!(traffic.nudge());
        assert!(!traffic.nudge());
    }

    /// While the main runtime is busy, its peer still hears from this process and is not considered silent.
    #[tokio::test(start_paused = true)]
    async fn a_link_that_nobody_carries_says_that_it_lives() {
        let config = WireConfig::default();
        let link = link(&config);
        let (traffic, mut peer) = traffic(&link, &config);
        let mut heard = Vec::new();
        tokio::select! {
            ended = link.keep(&config, &traffic) => panic!("{ended}"),
            () = tokio::time::sleep(10 * config.peer_timeout) => {}
            () = async {
                loop {
                    let mut bytes = [0; 64];
                    let read = peer.read(&mut bytes).await.unwrap();
                    heard.push((tokio::time::Instant::now(), read));
                }
            } => {}
        }
        for pair in heard.windows(2) {
            assert_eq!(pair[1].0 - pair[0].0, config.ping_interval);
        }
        assert_eq!(heard.len(), 29);
    }
}
