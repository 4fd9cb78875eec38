//! [`Prompts`]: which members of the fleet run sequences with which prompt blocks.
//!
//! One map serves the whole fleet: a choice looks up the blocks of its prompt, however many members there are. Members have small
//! numbers here, from [`Slots`].

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasher;

use genset_backend_common::kv::BlockHash;

use super::seeded::Seeded;

/// The number of a member.
pub(super) type Slot = u32;

/// Parts of the map: a part is so small that nobody waits long while it grows.
const PARTS: u64 = 1 << 10;

type Part = HashMap<BlockHash, Holders, Seeded>;

/// The prompt blocks of running sequences, with the slots that have each.
#[derive(Debug)]
pub(super) struct Prompts {
    parts: Vec<Part>,
    seed: Seeded,
}

impl Default for Prompts {
    fn default() -> Self {
        let seed = Seeded::default();
        let part = |_| Part::with_hasher(seed.clone());
        Self {
            parts: (0..PARTS).map(part).collect(),
            seed,
        }
    }
}

impl Prompts {
    fn part_of(&self, block: BlockHash) -> usize {
        // The lowest and the highest bits choose the place within the part.
        usize::try_from((self.seed.hash_one(block) >> 32) % PARTS).unwrap_or_default()
    }

    /// Counts a sequence of a slot. Returns how many of its prompt blocks are new there.
    pub(super) fn enter(&mut self, slot: Slot, blocks: &[BlockHash]) -> u64 {
        let mut new = 0;
        for block in blocks {
            let part = self.part_of(*block);
            match self.parts[part].entry(*block) {
                Entry::Vacant(entry) => {
                    entry.insert(Holders::One(Held { slot, count: 1 }));
                    new += 1;
                }
                Entry::Occupied(mut entry) => new += u64::from(entry.get_mut().add(slot)),
            }
        }
        new
    }

    /// Removes a sequence of a slot. Returns how many of its prompt blocks are gone there.
    pub(super) fn leave(&mut self, slot: Slot, blocks: &[BlockHash]) -> u64 {
        let mut gone = 0;
        for block in blocks {
            let part = self.part_of(*block);
            if let Entry::Occupied(mut entry) = self.parts[part].entry(*block) {
                gone += u64::from(entry.get_mut().remove(slot));
                if entry.get().is_empty() {
                    entry.remove();
                }
            }
        }
        gone
    }

    /// Sets, for each slot that has leading blocks of a prompt, how many. `shared` has a 0 for every slot.
    pub(super) fn shared(&self, blocks: &[BlockHash], shared: &mut [u64]) {
        let count = |block: &BlockHash| self.holders(*block).len();
        // A sequence with a block has all blocks before it. So the deeper a block is, the fewer slots have it, and blocks that as
        // many slots have are blocks of the same slots.
        let mut depth = blocks.partition_point(|block| count(block) > 0);
        while let Some(last) = depth.checked_sub(1) {
            let holders = self.holders(blocks[last]);
            let leading = u64::try_from(depth).unwrap_or(u64::MAX);
            for held in holders {
                if let Some(blocks) = shared.get_mut(index_of(held.slot))
                    && *blocks == 0
                {
                    *blocks = leading;
                }
            }
            depth = blocks[..last].partition_point(|block| count(block) > holders.len());
        }
    }

    /// Returns the slots that have a block.
    fn holders(&self, block: BlockHash) -> &[Held] {
        let holders = self.parts[self.part_of(block)].get(&block);
        holders.map_or(&[], Holders::all)
    }
}

/// A slot with a block, and how many of its sequences have it.
#[derive(Debug, Clone, Copy)]
struct Held {
    slot: Slot,
    count: u32,
}

/// The slots that have a block. Most blocks have one, which takes no memory of its own.
#[derive(Debug)]
enum Holders {
    One(Held),
    /// Sorted by slot.
    Many(Vec<Held>),
}

impl Holders {
    fn all(&self) -> &[Held] {
        match self {
            Self::One(held) => std::slice::from_ref(held),
            Self::Many(all) => all,
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::One(held) => held.count == 0,
            Self::Many(all) => all.is_empty(),
        }
    }

    /// Counts a sequence. Returns whether it is the first of its slot.
    fn add(&mut self, slot: Slot) -> bool {
        let first = Held { slot, count: 1 };
        match self {
            Self::One(held) if held.slot == slot => {
                held.count += 1;
                false
            }
            Self::One(held) => {
                let mut both = vec![*held, first];
                both.sort_unstable_by_key(|held| held.slot);
                *self = Self::Many(both);
                true
            }
            Self::Many(all) => match all.binary_search_by_key(&slot, |held| held.slot) {
                Ok(index) => {
                    all[index].count += 1;
                    false
                }
                Err(index) => {
                    all.insert(index, first);
                    true
                }
            },
        }
    }

    /// Removes a sequence. Returns whether it was the last of its slot.
    fn remove(&mut self, slot: Slot) -> bool {
        match self {
            Self::One(held) => {
                let is_its = held.slot == slot;
                held.count -= u32::from(is_its);
                is_its && held.count == 0
            }
            Self::Many(all) => {
                let Ok(index) = all.binary_search_by_key(&slot, |held| held.slot) else {
                    return false;
                };
                all[index].count -= 1;
                let is_last = all[index].count == 0;
                if is_last {
                    all.remove(index);
                }
                is_last
            }
        }
    }
}

/// The allocator of slots. A slot is free again once its member and every sequence that the member counted are gone.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// For each slot, how many have it: a member, and sequences.
    users: Vec<u32>,
    free: Vec<Slot>,
}

impl Slots {
    /// Allocates a slot for a member.
    pub(super) fn take(&mut self) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.users.push(0);
            Slot::try_from(self.users.len() - 1).unwrap_or(Slot::MAX)
        });
        self.enter(slot);
        slot
    }

    /// Counts a sequence of a slot.
    pub(super) fn enter(&mut self, slot: Slot) {
        if let Some(users) = self.users.get_mut(index_of(slot)) {
            *users += 1;
        }
    }

    /// Removes the member, or a sequence, of a slot.
    pub(super) fn leave(&mut self, slot: Slot) {
        if let Some(users) = self.users.get_mut(index_of(slot)) {
            *users -= 1;
            if *users == 0 {
                self.free.push(slot);
            }
        }
    }

    /// Returns how many slots there are, free ones included: every slot is below it.
    pub(super) fn count(&self) -> usize {
        self.users.len()
    }
}

/// Returns the place of a slot or a target in an array.
pub(super) fn index_of(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use genset_backend_common::random::{STEP, mix};
    use proptest::prelude::*;

    use super::*;

    /// A sequence: its slot and its prompt.
    type Running = (Slot, Vec<BlockHash>);

    /// Returns the chained hashes of blocks with these contents.
    fn prompt(contents: &[u8]) -> Vec<BlockHash> {
        let mut last = 1;
        let next = |content: &u8| {
            last = mix(last ^ (u64::from(*content) + 1).wrapping_mul(STEP));
            BlockHash(last)
        };
        contents.iter().map(next).collect()
    }

    /// Returns how many leading blocks of a prompt the sequences of a slot have.
    fn leading(running: &[Running], slot: Slot, prompt: &[BlockHash]) -> u64 {
        let its = running.iter().filter(|(at, _)| *at == slot);
        let same = its.map(|(_, blocks)| {
            let pairs = blocks.iter().zip(prompt);
            pairs.take_while(|(ours, theirs)| ours == theirs).count()
        });
        u64::try_from(same.max().unwrap_or(0)).unwrap()
    }

    /// Returns how many different blocks the sequences of a slot have.
    fn different(running: &[Running], slot: Slot) -> u64 {
        let its = running.iter().filter(|(at, _)| *at == slot);
        let blocks: BTreeSet<_> = its.flat_map(|(_, blocks)| blocks).collect();
        u64::try_from(blocks.len()).unwrap()
    }

    proptest! {
        /// The model compares a prompt with every sequence.
        #[test]
        fn slots_have_the_prompt_blocks_of_their_sequences(changes in prop::collection::vec(
            (0..5_u32, prop::collection::vec(0..2_u8, 0..12), any::<bool>(), 0..100_usize),
            1..60,
        )) {
            let mut prompts = Prompts::default();
            let mut running = Vec::<Running>::new();
            for (slot, contents, is_end, index) in changes {
                let blocks = prompt(&contents);
                let mut shared = [0; 5];
                prompts.shared(&blocks, &mut shared);
                for (slot, shared) in (0..).zip(shared) {
                    prop_assert_eq!(shared, leading(&running, slot, &blocks));
                }
                if is_end && !running.is_empty() {
                    let index = index % running.len();
                    let slot = running[index].0;
                    let before = different(&running, slot);
                    let (_, blocks) = running.swap_remove(index);
                    let gone = prompts.leave(slot, &blocks);
                    prop_assert_eq!(before - gone, different(&running, slot));
                } else {
                    let before = different(&running, slot);
                    let new = prompts.enter(slot, &blocks);
                    running.push((slot, blocks));
                    prop_assert_eq!(before + new, different(&running, slot));
                }
            }
            for (slot, blocks) in running {
                prompts.leave(slot, &blocks);
            }
            prop_assert!(prompts.parts.iter().all(|part| part.is_empty()));
        }
    }

    #[test]
    fn clients_cannot_choose_the_part_of_their_blocks() {
        let blocks: Vec<BlockHash> = (0..4096).map(|n| BlockHash(n << 42)).collect();
        let mut prompts = Prompts::default();
        prompts.enter(0, &blocks);
        let largest = prompts.parts.iter().map(|part| part.len()).max();
        // Parts have 4 on average.
        assert!(largest < Some(64), "{largest:?}");
    }

    #[test]
    fn a_slot_is_free_when_its_member_and_its_sequences_are_gone() {
        let mut slots = Slots::default();
        assert_eq!([slots.take(), slots.take()], [0, 1]);
        slots.enter(0);
        // The member goes.
        slots.leave(0);
        assert_eq!(slots.take(), 2);
        slots.leave(0);
        assert_eq!(slots.take(), 0);
        assert_eq!(slots.count(), 3);
    }
}
