//! [`Outbox`]: what waits for a connection's socket. Every stream of the connection writes into it; one writer empties it
//! with one system call, so that an engine's step costs one, however many requests it serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::BytesMut;
use genset_backend_common::wire::{FrameError, FrameKind, encode_frame};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::link::Link;

/// Capacity that an empty buffer keeps; beyond it, memory goes back after a burst.
const KEEP_BYTES: usize = 64 << 10;

/// Encoded frames on their way to the socket.
#[derive(Debug)]
pub(super) struct Outbox {
    bytes: Mutex<BytesMut>,
    /// Bytes waiting, for a look without the lock.
    waiting: AtomicUsize,
    limit: usize,
    /// The peer's limit on a frame's payload.
    max_frame_bytes: usize,
    /// Streams that may have something to send.
    streams: AtomicUsize,
    filled: Notify,
    drained: Notify,
}

/// A stream of the outbox's, counted.
#[derive(Debug)]
pub(super) struct StreamGuard(Arc<Link>);

impl StreamGuard {
    pub(super) fn new(link: &Arc<Link>) -> Self {
        link.outbox.streams.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(link))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.outbox.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Outbox {
    pub(super) fn new(limit: usize, max_frame_bytes: usize) -> Self {
        Self {
            bytes: Mutex::new(BytesMut::new()),
            waiting: AtomicUsize::new(0),
            limit,
            max_frame_bytes,
            streams: AtomicUsize::new(0),
            filled: Notify::new(),
            drained: Notify::new(),
        }
    }

    /// Adds a frame, also over the limit: streams ask for [`Self::room`] before they have something to send.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] when the peer takes no frame of that size; nothing is added.
    pub(super) fn push(
        &self,
        kind: FrameKind,
        stream: u32,
        payload: &[u8],
    ) -> Result<(), FrameError> {
        if payload.len() > self.max_frame_bytes {
            return Err(FrameError::TooLong {
                length: payload.len(),
                limit: self.max_frame_bytes,
            });
        }
        let mut bytes = self.bytes.lock();
        let was_empty = bytes.is_empty();
        encode_frame(kind, stream, payload, &mut bytes)?;
        self.waiting.store(bytes.len(), Ordering::Relaxed);
        drop(bytes);
        if was_empty {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Whether the outbox holds less than its limit.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < self.limit
    }

    /// Waits until the outbox holds less than its limit.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(super) async fn room(&self) {
        loop {
            let drained = self.drained.notified();
            if self.has_room() {
                return;
            }
            drained.await;
        }
    }

    /// Waits until there is something, and takes all of it. `spent`, a batch that was written, is used again.
    ///
    /// # Cancel safety
    /// If another branch wins, nothing was taken.
    pub(super) async fn take(&self, spent: BytesMut) -> BytesMut {
        loop {
            if self.waiting.load(Ordering::Relaxed) > 0 {
                break;
            }
            self.filled.notified().await;
            // The streams that are ready in this same moment get in as well: one system call for all.
            if self.streams.load(Ordering::Relaxed) > 1 {
                tokio::task::yield_now().await;
            }
        }
        let mut empty = if spent.capacity() > KEEP_BYTES {
            BytesMut::new()
        } else {
            spent
        };
        empty.clear();
        let mut bytes = self.bytes.lock();
        let batch = std::mem::replace(&mut *bytes, empty);
        self.waiting.store(0, Ordering::Relaxed);
        drop(bytes);
        self.drained.notify_waiters();
        batch
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn frames_leave_together_and_make_room() {
        let outbox = Outbox::new(16, 100);
        outbox.push(FrameKind::Ping, 0, b"").unwrap();
        outbox.room().now_or_never().unwrap();
        outbox.push(FrameKind::Item, 1, b"0123456789").unwrap();
        assert!(outbox.room().now_or_never().is_none());
        let batch = outbox.take(BytesMut::new()).await;
        assert_eq!(batch.len(), 10 + 20);
        outbox.room().now_or_never().unwrap();
        assert!(outbox.take(batch).now_or_never().is_none());
    }

    #[test]
    fn a_frame_that_the_peer_would_refuse_is_not_sent() {
        let outbox = Outbox::new(16, 4);
        outbox.push(FrameKind::Item, 1, b"12345").unwrap_err();
        assert!(outbox.is_empty());
    }
}
