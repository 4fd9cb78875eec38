//! [`Outbox`]: frames waiting for a connection's socket. Every stream of the connection writes into it, and one writer empties
//! it with one system call: an engine's step costs one call however many requests it serves. Small payloads are copied into one
//! buffer; large ones are queued without a copy.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use genset_backend_common::memory::{HeldBytes, Memory};
use parking_lot::Mutex;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;

use crate::frame::{FrameError, FrameKind, encode_frame, encode_header};

/// Capacity that an empty buffer keeps; larger buffers are freed after a burst.
const KEEP_BYTES: usize = 64 << 10;

/// Waiting frames take memory from the budget in pieces of this many bytes. The first piece is free, so every connection makes
/// progress while others hold the whole budget.
const PIECE_BYTES: usize = 64 << 10;

/// The most slices in one write.
const WRITE_SLICES: usize = 16;

/// Payloads of at least this size are not copied.
const LARGE_BYTES: usize = 16 << 10;

/// Frames waiting for the socket or being written, and the memory reserved for them.
#[derive(Debug)]
pub struct Batch {
    /// Large payloads, each preceded by the bytes before it.
    parts: VecDeque<Bytes>,
    parts_bytes: usize,
    /// Bytes after the last part.
    tail: BytesMut,
    /// Bytes of the tail already written.
    written: usize,
    held: HeldBytes,
}

impl Batch {
    fn new(tail: BytesMut, held: HeldBytes) -> Self {
        Self {
            parts: VecDeque::new(),
            parts_bytes: 0,
            tail,
            written: 0,
            held,
        }
    }

    /// Returns the number of bytes still to write.
    fn len(&self) -> usize {
        self.parts_bytes + self.tail.len() - self.written
    }

    fn push_large(&mut self, payload: Bytes) {
        let before = self.tail.split().freeze();
        self.parts_bytes += before.len() + payload.len();
        self.parts.extend([before, payload]);
    }

    /// Fills `slices` with the next bytes to write, in order; returns how many slices it filled.
    fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let parts = self.parts.iter().map(Bytes::as_ref);
        let tail = self.tail.get(self.written..).filter(|it| !it.is_empty());
        let mut count = 0;
        for (slice, bytes) in slices.iter_mut().zip(parts.chain(tail)) {
            *slice = IoSlice::new(bytes);
            count += 1;
        }
        count
    }

    /// Marks the next `bytes` bytes as written.
    fn advance(&mut self, mut bytes: usize) {
        while let Some(part) = self.parts.front_mut() {
            let now = bytes.min(part.len());
            part.advance(now);
            self.parts_bytes -= now;
            bytes -= now;
            if !part.is_empty() {
                return;
            }
            self.parts.pop_front();
        }
        self.written += bytes;
    }

    /// Writes all of it, many parts with one system call. Calls `taken` whenever the peer accepts bytes.
    ///
    /// # Errors
    /// The writer's errors; half of a frame may be written then.
    pub async fn write_to(
        &mut self,
        writer: &mut (impl AsyncWrite + Unpin),
        taken: impl Fn(),
    ) -> io::Result<()> {
        while self.len() > 0 {
            let mut slices = [IoSlice::new(&[]); WRITE_SLICES];
            let count = self.slices(&mut slices);
            let slices = slices.get(..count).unwrap_or_default();
            let written = writer.write_vectored(slices).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.advance(written);
            taken();
        }
        writer.flush().await
    }

    /// Returns the buffer for reuse.
    #[must_use]
    pub fn into_buffer(self) -> BytesMut {
        self.tail
    }
}

/// Encoded frames on their way to the socket.
#[derive(Debug)]
pub struct Outbox {
    batch: Mutex<Batch>,
    memory: Arc<Memory>,
    /// Bytes waiting, readable without the lock.
    waiting: AtomicUsize,
    /// The memory budget was exhausted; cleared when the writer takes the waiting frames.
    is_short: AtomicBool,
    /// The outbox accepts no more frames.
    is_closed: AtomicBool,
    limit: usize,
    /// The peer's limit on a frame's payload.
    max_frame_bytes: AtomicUsize,
    /// Streams that may have something to send.
    streams: AtomicUsize,
    filled: Notify,
    drained: Notify,
}

impl Outbox {
    /// Creates an outbox that has no room once it holds `limit` bytes or `memory` is exhausted.
    #[must_use]
    pub fn new(limit: usize, max_frame_bytes: usize, memory: &Arc<Memory>) -> Self {
        let batch = Batch::new(BytesMut::new(), memory.hold_nothing());
        Self {
            batch: Mutex::new(batch),
            memory: Arc::clone(memory),
            waiting: AtomicUsize::new(0),
            is_short: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            limit,
            max_frame_bytes: AtomicUsize::new(max_frame_bytes),
            streams: AtomicUsize::new(0),
            filled: Notify::new(),
            drained: Notify::new(),
        }
    }

    /// Sets the peer's limit on a frame's payload, in bytes.
    pub fn set_max_frame_bytes(&self, bytes: usize) {
        self.max_frame_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts one more stream that may send, or one fewer with `false`. If there are several, the writer first yields to all
    /// streams that are ready at the same moment.
    pub fn count_stream(&self, is_more: bool) {
        if is_more {
            self.streams.fetch_add(1, Ordering::Relaxed);
        } else {
            self.streams.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Adds a frame, even over the limit: streams wait for [`Self::room`] before they produce an item.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] when the frame exceeds the peer's limit; nothing is added.
    pub fn push(&self, kind: FrameKind, stream: u32, payload: &[u8]) -> Result<(), FrameError> {
        self.add(payload.len(), |batch| {
            encode_frame(kind, stream, payload, &mut batch.tail)
        })
    }

    /// Like [`Self::push`], without copying a large payload.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_bytes(
        &self,
        kind: FrameKind,
        stream: u32,
        payload: Bytes,
    ) -> Result<(), FrameError> {
        self.push_parts(kind, stream, &[], payload)
    }

    /// Like [`Self::push_bytes`], for a payload in two parts: `head`, then `body`.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_parts(
        &self,
        kind: FrameKind,
        stream: u32,
        head: &[u8],
        body: Bytes,
    ) -> Result<(), FrameError> {
        let length = head.len() + body.len();
        self.add(length, |batch| {
            encode_header(kind, stream, length, &mut batch.tail)?;
            batch.tail.extend_from_slice(head);
            match body.len() < LARGE_BYTES {
                true => batch.tail.extend_from_slice(&body),
                false => batch.push_large(body),
            }
            Ok(())
        })
    }

    fn add(
        &self,
        length: usize,
        encode: impl FnOnce(&mut Batch) -> Result<(), FrameError>,
    ) -> Result<(), FrameError> {
        let limit = self.max_frame_bytes.load(Ordering::Relaxed);
        if length > limit {
            return Err(FrameError::TooLong { length, limit });
        }
        let mut batch = self.batch.lock();
        let was_empty = batch.len() == 0;
        encode(&mut batch)?;
        let waiting = batch.len();
        let held = waiting / PIECE_BYTES * PIECE_BYTES;
        if !batch.held.grow_to(held) {
            self.is_short.store(true, Ordering::Relaxed);
        }
        self.waiting.store(waiting, Ordering::Relaxed);
        drop(batch);
        if was_empty {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Returns whether the outbox is below its limit and the memory budget covers what it holds.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < self.limit && !self.is_short.load(Ordering::Relaxed)
    }

    /// Waits until there [is room](Self::has_room) or the outbox is closed; callers must check which.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn room(&self) {
        loop {
            let drained = self.drained.notified();
            if self.has_room() || self.is_closed.load(Ordering::Acquire) {
                return;
            }
            drained.await;
        }
    }

    /// Closes the outbox when its writer has ended, and wakes all waiters for room.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.drained.notify_waiters();
    }

    /// Waits until there is a frame, and takes all frames. Reuses the buffer of `spent`, a batch that was written.
    ///
    /// # Cancel safety
    /// If another branch wins, nothing is taken.
    pub async fn take(&self, spent: BytesMut) -> Batch {
        loop {
            if self.waiting.load(Ordering::Relaxed) > 0 {
                break;
            }
            self.filled.notified().await;
            // Let streams that are ready at this moment add their frames first: one system call for all.
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
        let next = Batch::new(empty, self.memory.hold_nothing());
        let mut waiting = self.batch.lock();
        let batch = std::mem::replace(&mut *waiting, next);
        self.waiting.store(0, Ordering::Relaxed);
        self.is_short.store(false, Ordering::Relaxed);
        drop(waiting);
        self.drained.notify_waiters();
        batch
    }

    /// Returns whether no frame waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use genset_backend_common::prometheus::metrics::gauge::Gauge;

    use super::*;
    use crate::frame::FrameDecoder;

    fn outbox(limit: usize, max_frame_bytes: usize, memory_bytes: usize) -> Outbox {
        let memory = Memory::of_process(memory_bytes, Gauge::default());
        Outbox::new(limit, max_frame_bytes, &memory)
    }

    #[tokio::test]
    async fn what_waits_and_what_is_written_take_of_the_memory_budget() {
        let outbox = outbox(usize::MAX, PIECE_BYTES, 2 * PIECE_BYTES);
        let payload = vec![0; PIECE_BYTES];
        outbox.push(FrameKind::Item, 1, &payload).unwrap();
        let written = outbox.take(BytesMut::new()).await;
        outbox.push(FrameKind::Item, 1, &payload).unwrap();
        assert!(outbox.has_room());
        outbox.push(FrameKind::Item, 1, &payload).unwrap();
        assert!(outbox.room().now_or_never().is_none());
        // The outbox still makes progress, and written frames return their memory.
        let second = outbox.take(BytesMut::new()).await;
        outbox.room().now_or_never().unwrap();
        drop((written, second));
        outbox.push(FrameKind::Item, 1, &payload).unwrap();
        outbox.push(FrameKind::Item, 1, &payload).unwrap();
        assert!(outbox.has_room());
        // A frame smaller than a piece needs no memory from the budget.
        let all = outbox.take(BytesMut::new()).await;
        assert!(outbox.memory.try_hold(1).is_none());
        outbox.push(FrameKind::Item, 1, b"small").unwrap();
        assert!(outbox.has_room());
        drop(all);
    }

    #[tokio::test]
    async fn nobody_waits_for_room_where_nothing_is_taken_any_more() {
        let outbox = outbox(16, 100, 0);
        outbox.push(FrameKind::Item, 1, &[0; 64]).unwrap();
        let waiting = outbox.room();
        let mut waiting = std::pin::pin!(waiting);
        assert!(waiting.as_mut().now_or_never().is_none());
        outbox.close();
        waiting.now_or_never().unwrap();
        outbox.room().now_or_never().unwrap();
    }

    #[tokio::test]
    async fn frames_leave_together_and_make_room() {
        let outbox = outbox(16, 100, 0);
        outbox.push(FrameKind::Ping, 0, b"").unwrap();
        outbox.room().now_or_never().unwrap();
        outbox.push(FrameKind::Item, 1, b"0123456789").unwrap();
        assert!(outbox.room().now_or_never().is_none());
        let batch = outbox.take(BytesMut::new()).await;
        assert_eq!(batch.len(), 10 + 20);
        outbox.room().now_or_never().unwrap();
        let spent = batch.into_buffer();
        assert!(outbox.take(spent).now_or_never().is_none());
    }

    #[tokio::test]
    async fn large_payloads_keep_their_place_and_are_not_copied() {
        let outbox = outbox(usize::MAX, 1 << 20, 1 << 20);
        let large = Bytes::from(vec![7; LARGE_BYTES]);
        outbox.push(FrameKind::Item, 1, b"one").unwrap();
        for stream in [2, 3] {
            let payload = large.clone();
            outbox.push_bytes(FrameKind::Item, stream, payload).unwrap();
        }
        outbox.push(FrameKind::End, 2, b"").unwrap();
        let mut batch = outbox.take(BytesMut::new()).await;
        let mut slices = [IoSlice::new(&[]); 8];
        assert_eq!(batch.slices(&mut slices), 5);
        assert_eq!(slices[1].as_ptr(), large.as_ptr());
        // Partial writes of any size yield the frames in order.
        let mut decoder = FrameDecoder::new();
        while batch.len() > 0 {
            let mut slices = [IoSlice::new(&[]); 3];
            let count = batch.slices(&mut slices);
            let bytes: Vec<u8> = slices[..count].iter().flat_map(|it| it.to_vec()).collect();
            let now = bytes.len().min(5000);
            decoder.extend(&bytes[..now]);
            batch.advance(now);
        }
        for (kind, stream, length) in [
            (FrameKind::Item, 1, 3),
            (FrameKind::Item, 2, LARGE_BYTES),
            (FrameKind::Item, 3, LARGE_BYTES),
            (FrameKind::End, 2, 0),
        ] {
            let frame = decoder.next_frame().unwrap().unwrap();
            let seen = (frame.kind, frame.stream, frame.payload.len());
            assert_eq!(seen, (kind, stream, length));
        }
    }

    #[tokio::test]
    async fn a_payload_in_two_parts_is_one_and_its_large_part_is_not_copied() {
        for bytes in [3, LARGE_BYTES] {
            let outbox = outbox(usize::MAX, 1 << 20, 1 << 20);
            let body = Bytes::from(vec![7; bytes]);
            let pushed = outbox.push_parts(FrameKind::Request, 1, b"head", body.clone());
            pushed.unwrap();
            let batch = outbox.take(BytesMut::new()).await;
            let mut slices = [IoSlice::new(&[]); 3];
            let count = batch.slices(&mut slices);
            let is_copied = slices[..count]
                .iter()
                .all(|it| it.as_ptr() != body.as_ptr());
            assert_eq!(is_copied, bytes < LARGE_BYTES);
            let mut decoder = FrameDecoder::new();
            for slice in &slices[..count] {
                decoder.extend(slice);
            }
            let frame = decoder.next_frame().unwrap().unwrap();
            assert_eq!(frame.payload, [&b"head"[..], &body[..]].concat());
        }
    }

    #[test]
    fn a_frame_that_the_peer_would_refuse_is_not_sent() {
        let outbox = outbox(16, 4, 0);
        outbox.push(FrameKind::Item, 1, b"12345").unwrap_err();
        assert!(outbox.is_empty());
    }
}
