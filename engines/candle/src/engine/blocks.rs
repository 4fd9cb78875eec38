//! Copies bytes of sequences' KV blocks into the cache and out of it. A sequence's bytes are those of its blocks, concatenated.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use genset_scheduler::{BlockId, Scheduler, SequenceId};
use parking_lot::Mutex;

use super::forward::Forward;
use super::transfer::PIECES_AHEAD;

/// Buffers to keep: for the piece being written to a socket, those ahead of it, and one of another transfer.
const KEPT_BUFFERS: usize = PIECES_AHEAD + 2;

/// Buffers of sent pieces, for reuse: allocating memory for a piece takes longer than copying it.
#[derive(Debug, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<u8>>>>);

/// A piece's bytes in a buffer, which returns to the pool when dropped.
struct Piece {
    bytes: Vec<u8>,
    home: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut kept = self.home.lock();
        if kept.len() < KEPT_BUFFERS {
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Reads bytes of a held sequence; `None` if it is not held or has fewer bytes.
pub(super) fn read(
    scheduler: &Scheduler,
    forward: &dyn Forward,
    buffers: &Buffers,
    id: SequenceId,
    bytes: Range<usize>,
) -> Option<Bytes> {
    let blocks = scheduler.held(id)?;
    let size = forward.kv_layout()?.block_bytes();
    let mut read = buffers.0.lock().pop().unwrap_or_default();
    read.clear();
    read.reserve(bytes.len());
    let mut at = bytes.start;
    while at < bytes.end {
        let block = forward.kv_block(index(*blocks.get(at / size)?))?;
        let from = at % size;
        let to = size.min(from + bytes.end - at);
        read.extend_from_slice(block.get(from..to)?);
        at += to - from;
    }
    Some(Bytes::from_owner(Piece {
        bytes: read,
        home: Arc::clone(&buffers.0),
    }))
}

/// Writes bytes of a sequence that waits for them. Ignores writes to other sequences and to blocks that may be shared.
pub(super) fn write(
    scheduler: &Scheduler,
    forward: &mut dyn Forward,
    id: SequenceId,
    start: usize,
    mut bytes: &[u8],
) {
    let sequence = scheduler
        .sequence(id)
        .filter(|sequence| sequence.is_receiving());
    let Some((sequence, size)) = sequence.zip(forward.kv_layout().map(|it| it.block_bytes()))
    else {
        return;
    };
    let first = sequence.computed_tokens() / scheduler.pool().block_size();
    let mut at = start;
    while !bytes.is_empty() {
        let place = at / size;
        let block = sequence.blocks().get(place).filter(|_| place >= first);
        let block = block.and_then(|block| forward.kv_block_mut(index(*block)));
        let from = at % size;
        let count = bytes.len().min(size - from);
        let Some(to) = block.and_then(|block| block.get_mut(from..from + count)) else {
            return;
        };
        let (now, later) = bytes.split_at(count);
        to.copy_from_slice(now);
        (bytes, at) = (later, at + count);
    }
}

fn index(block: BlockId) -> usize {
    usize::try_from(block.0).unwrap_or(usize::MAX)
}
