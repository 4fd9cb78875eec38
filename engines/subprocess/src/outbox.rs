//! [`Outbox`]: frames that wait for the socket. Every request writes into it, one task empties it with one system call.

use bytes::BytesMut;
use genset_wire::{FrameError, FrameKind, encode_frame};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Bytes above which new requests wait. Frames about requests that are open go in regardless: they are few and small.
const ROOM_BYTES: usize = 1 << 20;

/// Encoded frames on their way to the process.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    bytes: Mutex<BytesMut>,
    filled: Notify,
    drained: Notify,
}

impl Outbox {
    /// Adds a frame; never waits.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]; nothing is added.
    pub(crate) fn push(
        &self,
        kind: FrameKind,
        stream: u32,
        payload: &[u8],
        limit: u32,
    ) -> Result<(), FrameError> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        if payload.len() > limit {
            let length = payload.len();
            return Err(FrameError::TooLong { length, limit });
        }
        encode_frame(kind, stream, payload, &mut self.bytes.lock())?;
        self.filled.notify_one();
        Ok(())
    }

    /// Waits until there is room for a request.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub(crate) async fn room(&self) {
        loop {
            let drained = self.drained.notified();
            if self.has_room() {
                return;
            }
            drained.await;
        }
    }

    /// Whether requests need not wait.
    pub(crate) fn has_room(&self) -> bool {
        self.bytes.lock().len() < ROOM_BYTES
    }

    /// Waits until there is something, and takes all of it.
    ///
    /// # Cancel safety
    /// If another branch wins, nothing was taken.
    pub(crate) async fn take(&self) -> BytesMut {
        loop {
            if let Some(bytes) = self.take_now() {
                return bytes;
            }
            self.filled.notified().await;
        }
    }

    /// Takes what there is.
    pub(crate) fn take_now(&self) -> Option<BytesMut> {
        let bytes = std::mem::take(&mut *self.bytes.lock());
        self.drained.notify_waiters();
        (!bytes.is_empty()).then_some(bytes)
    }
}
