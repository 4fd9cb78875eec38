//! Bytes of sequences' KV blocks, into the cache and out of it. The bytes of a sequence are those of its blocks one after another.

use std::ops::Range;

use bytes::Bytes;
use genset_scheduler::{BlockId, Scheduler, SequenceId};

use super::forward::Forward;

/// Bytes of a held sequence; `None` where it is not held, or has not so many.
pub(super) fn read(
    scheduler: &Scheduler,
    forward: &dyn Forward,
    id: SequenceId,
    bytes: Range<usize>,
) -> Option<Bytes> {
    let blocks = scheduler.held(id)?;
    let size = forward.kv_layout()?.block_bytes();
    let mut read = Vec::with_capacity(bytes.len());
    let mut at = bytes.start;
    while at < bytes.end {
        let block = forward.kv_block(index(*blocks.get(at / size)?))?;
        let from = at % size;
        let to = size.min(from + bytes.end - at);
        read.extend_from_slice(block.get(from..to)?);
        at += to - from;
    }
    Some(read.into())
}

/// Replaces bytes of a sequence that waits for them. Those of another, or for a block that it may share with others, are dropped.
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
