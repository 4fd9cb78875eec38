//! Chains of consecutive blocks, and large snapshots in parts.

use std::collections::{HashMap, HashSet};

use super::{BlockHash, KvEvent, KvEventData, KvSnapshot, StoredBlock};

/// Consecutive blocks of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockChain {
    /// The block before the first; `None` at the start of a sequence.
    pub parent: Option<BlockHash>,
    /// The blocks, in sequence order; at least one.
    pub blocks: Vec<BlockHash>,
}

/// Groups blocks in any order into chains, parents first. Blocks in a cycle are left out.
#[must_use]
pub fn chains(blocks: Vec<StoredBlock>) -> Vec<BlockChain> {
    let known: HashSet<BlockHash> = blocks.iter().map(|block| block.hash).collect();
    let mut children: HashMap<BlockHash, Vec<BlockHash>> = HashMap::new();
    let mut begin: Vec<(Option<BlockHash>, BlockHash)> = Vec::new();
    for block in blocks {
        match block.parent {
            Some(parent) if known.contains(&parent) => {
                children.entry(parent).or_default().push(block.hash);
            }
            parent => begin.push((parent, block.hash)),
        }
    }
    // A stack, sorted: the same blocks yield the same chains.
    begin.sort_unstable_by(|a, b| b.cmp(a));
    let mut chains = Vec::new();
    while let Some((parent, first)) = begin.pop() {
        let mut blocks = vec![first];
        let mut last = first;
        while let Some(mut next) = children.remove(&last) {
            next.sort_unstable();
            let mut next = next.into_iter();
            let Some(follows) = next.next() else { break };
            begin.extend(next.map(|other| (Some(last), other)));
            blocks.push(follows);
            last = follows;
        }
        chains.push(BlockChain { parent, blocks });
    }
    chains
}

impl KvSnapshot {
    /// Splits a snapshot that is too large for one message: returns a snapshot of at most `max_blocks` blocks, and changes of at
    /// most as many blocks each that complete it. The changes have the ids up to `last_event_id`, as if the snapshot were older.
    ///
    /// If fewer events were published than changes are needed, the remaining blocks are left out.
    ///
    /// # Examples
    /// ```
    /// use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher};
    ///
    /// let publisher = KvEventPublisher::new();
    /// let blocks = |hashes: [u64; 2]| hashes.map(BlockHash).to_vec();
    /// publisher.publish(KvEventData::Stored { parent: None, blocks: blocks([1, 2]) });
    /// publisher.publish(KvEventData::Stored { parent: Some(BlockHash(2)), blocks: blocks([3, 4]) });
    /// let (first, rest) = publisher.subscribe().snapshot.in_parts(2);
    /// assert_eq!((first.last_event_id, first.blocks.len()), (1, 2));
    /// assert_eq!(rest[0].id, 2);
    /// assert_eq!(rest[0].data, KvEventData::Stored { parent: Some(BlockHash(2)), blocks: blocks([3, 4]) });
    /// ```
    #[must_use]
    pub fn in_parts(self, max_blocks: usize) -> (Self, Vec<KvEvent>) {
        if self.blocks.len() <= max_blocks {
            return (self, Vec::new());
        }
        let mut first = Vec::new();
        let mut rest = Vec::new();
        for chain in chains(self.blocks) {
            let mut parent = chain.parent;
            let (of_first, of_rest) = chain
                .blocks
                .split_at(chain.blocks.len().min(max_blocks - first.len()));
            for &hash in of_first {
                first.push(StoredBlock { hash, parent });
                parent = Some(hash);
            }
            for blocks in of_rest.chunks(max_blocks.max(1)) {
                rest.push((parent, blocks.to_vec()));
                parent = blocks.last().copied();
            }
        }
        rest.truncate(usize::try_from(self.last_event_id).unwrap_or(usize::MAX));
        let changes = u64::try_from(rest.len()).unwrap_or(u64::MAX);
        let last_event_id = self.last_event_id.saturating_sub(changes);
        let change = |(id, (parent, blocks))| KvEvent {
            id,
            data: KvEventData::Stored { parent, blocks },
        };
        let changes = (last_event_id + 1..).zip(rest).map(change).collect();
        let first = Self {
            last_event_id,
            blocks: first,
        };
        (first, changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(hash: u64, parent: Option<u64>) -> StoredBlock {
        StoredBlock {
            hash: BlockHash(hash),
            parent: parent.map(BlockHash),
        }
    }

    #[test]
    fn a_snapshot_becomes_chains_parents_first_whatever_its_order() {
        let blocks = vec![
            block(4, Some(3)),
            block(3, Some(1)),
            block(2, Some(1)),
            block(1, None),
            // Its parent was evicted.
            block(9, Some(8)),
            // A cycle, which no cache has.
            block(20, Some(21)),
            block(21, Some(20)),
        ];
        let chain = |parent: Option<u64>, blocks: &[u64]| BlockChain {
            parent: parent.map(BlockHash),
            blocks: blocks.iter().copied().map(BlockHash).collect(),
        };
        let expected = [
            chain(None, &[1, 2]),
            chain(Some(1), &[3, 4]),
            chain(Some(8), &[9]),
        ];
        let mut found = chains(blocks.clone());
        let mut reversed = chains(blocks.into_iter().rev().collect());
        for chains in [&mut found, &mut reversed] {
            assert!(
                chains.iter().position(|c| c.parent.is_none())
                    < chains.iter().position(|c| c.parent == Some(BlockHash(1)))
            );
            chains.sort_by_key(|chain| chain.blocks[0]);
            assert_eq!(chains[..], expected);
        }
    }

    /// Returns a subscriber's state after the snapshot and the changes, whose ids must be consecutive.
    fn together((first, rest): (KvSnapshot, Vec<KvEvent>)) -> (u64, Vec<StoredBlock>) {
        let (mut last, mut blocks) = (first.last_event_id, first.blocks);
        for change in rest {
            assert_eq!(change.id, last + 1);
            last = change.id;
            let KvEventData::Stored {
                mut parent,
                blocks: more,
            } = change.data
            else {
                panic!("only blocks are stored");
            };
            for hash in more {
                assert!(parent.is_none_or(|parent| {
                    blocks
                        .iter()
                        .any(|block: &StoredBlock| block.hash == parent)
                }));
                blocks.push(StoredBlock { hash, parent });
                parent = Some(hash);
            }
        }
        blocks.sort_unstable();
        (last, blocks)
    }

    #[test]
    fn parts_make_the_snapshot_again() {
        // Three sequences that share their first ten blocks.
        let mut blocks: Vec<StoredBlock> = (0..10).map(|at| block(at, at.checked_sub(1))).collect();
        for sequence in 1..4 {
            let of_sequence = |at: u64| sequence * 100 + at;
            blocks.push(block(of_sequence(0), Some(9)));
            blocks.extend((1..10).map(|at| block(of_sequence(at), Some(of_sequence(at - 1)))));
        }
        blocks.sort_unstable();
        let snapshot = KvSnapshot {
            last_event_id: 50,
            blocks,
        };
        for max_blocks in [1, 2, 7, 10, 39, 40, 41] {
            let parts = snapshot.clone().in_parts(max_blocks);
            assert!(parts.0.blocks.len() <= max_blocks);
            assert_eq!(parts.1.is_empty(), max_blocks >= 40);
            assert_eq!(together(parts), (50, snapshot.blocks.clone()));
        }
        // One published event allows one change.
        let young = KvSnapshot {
            last_event_id: 1,
            ..snapshot
        };
        let (last, blocks) = together(young.in_parts(8));
        assert_eq!(last, 1);
        assert_eq!(blocks.len(), 16);
    }
}
