//! [`Table`]: maps a block's hash to its place, in an open-addressing table of many small parts.
//!
//! A slot is one word: the place and 24 bits of the hash. Those bits also determine the home slot in the part, so a part grows
//! without reading runs. Two hashes may share these bits; a caller that needs certainty checks the run. A part grows by copying:
//! readers see the old slots or the new ones, and a version shows when the old slots were reused.

use super::arena::{Arena, Free, Offset, class_of};
use super::run::{POSITION_BITS, RUN_BITS, RunId};
use crate::sync::{AtomicU64, Ordering, PART_BITS, SMALLEST_PART, TRIES, fence, spin_loop};

/// Bits of a hash stored in its slot.
const TAG_BITS: u32 = 24;
/// The largest part, as a power of two.
const LARGEST: u32 = 16;

const EMPTY: u64 = 0;
/// A tombstone: a probe continues past it.
const REMOVED: u64 = 1;

/// The position of a block: its run, and its index there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) run: RunId,
    pub(super) position: u32,
}

/// The part of the table changed during every attempt to read it.
#[derive(Debug)]
pub(super) struct Busy;

/// A hash mixed with the table's seed, so that chosen hashes cannot target one part.
#[derive(Clone, Copy)]
pub(super) struct Mixed(u64);

impl Mixed {
    #[inline]
    fn part(self) -> usize {
        usize::try_from(self.0 >> (64 - PART_BITS)).unwrap_or_default()
    }

    #[inline]
    fn tag(self) -> u64 {
        self.0 >> (64 - PART_BITS - TAG_BITS) & ((1 << TAG_BITS) - 1)
    }
}

#[inline]
fn slot(tag: u64, place: Place) -> u64 {
    u64::from(place.run) << (POSITION_BITS + TAG_BITS) | u64::from(place.position) << TAG_BITS | tag
}

#[inline]
fn place(slot: u64) -> Place {
    Place {
        run: (slot >> (POSITION_BITS + TAG_BITS) & ((1 << RUN_BITS) - 1)) as u32,
        position: (slot >> TAG_BITS & ((1 << POSITION_BITS) - 1)) as u32,
    }
}

#[inline]
fn tag(slot: u64) -> u64 {
    slot & ((1 << TAG_BITS) - 1)
}

/// Where a part's slots are: offset, size as a power of two, version.
#[derive(Clone, Copy)]
struct Head(u64);

impl Head {
    fn new(at: Offset, bits: u32, version: u64) -> Self {
        Self(at | u64::from(bits) << 40 | version << 48)
    }

    #[inline]
    fn at(self) -> Offset {
        self.0 & ((1 << 40) - 1)
    }

    /// Size as a power of two; 0 for a part without slots.
    #[inline]
    fn bits(self) -> u32 {
        (self.0 >> 40 & 0xff) as u32
    }

    fn version(self) -> u64 {
        self.0 >> 48
    }

    #[inline]
    fn home(self, tag: u64) -> u64 {
        tag >> (TAG_BITS - self.bits().min(TAG_BITS))
    }

    #[inline]
    fn mask(self) -> u64 {
        (1 << self.bits()) - 1
    }
}

pub(super) struct Table {
    heads: Box<[AtomicU64]>,
    seed: u64,
}

impl Table {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            heads: (0..1 << PART_BITS).map(|_| AtomicU64::new(0)).collect(),
            seed,
        }
    }

    #[inline]
    pub(super) fn mix(&self, hash: u64) -> Mixed {
        const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
        let hash = hash ^ self.seed;
        let high = (u128::from(hash) * u128::from(ODD)) >> 64;
        Mixed(high as u64 ^ hash.wrapping_mul(ODD))
    }

    #[inline]
    fn head(&self, mixed: Mixed, ordering: Ordering) -> Head {
        Head(
            self.heads
                .get(mixed.part())
                .map_or(0, |head| head.load(ordering)),
        )
    }

    /// Returns whether the hash may be known, by its home slot alone. [`find`](Self::find) starts with the same loads: calling
    /// this for several hashes first overlaps their cache misses.
    #[inline]
    pub(super) fn may_have(&self, words: &Arena, mixed: Mixed) -> bool {
        let head = self.head(mixed, Ordering::Acquire);
        head.bits() != 0 && words.load(head.at() + head.home(mixed.tag())) != EMPTY
    }

    /// Returns the first place with the hash's bits that `accept` accepts.
    ///
    /// # Errors
    /// [`Busy`], when the part changed during every attempt; never for the writer itself.
    #[inline]
    pub(super) fn find(
        &self,
        words: &Arena,
        mixed: Mixed,
        mut accept: impl FnMut(Place) -> bool,
    ) -> Result<Option<Place>, Busy> {
        for _ in 0..TRIES {
            let head = self.head(mixed, Ordering::Acquire);
            let found = Self::find_in(words, head, mixed, &mut accept);
            fence(Ordering::Acquire);
            if self.head(mixed, Ordering::Relaxed).0 == head.0 {
                return Ok(found);
            }
            spin_loop();
        }
        Err(Busy)
    }

    #[inline]
    fn find_in(
        words: &Arena,
        head: Head,
        mixed: Mixed,
        accept: &mut impl FnMut(Place) -> bool,
    ) -> Option<Place> {
        if head.bits() == 0 {
            return None;
        }
        let slots = words.block(head.at(), 1 << head.bits());
        let (wanted, mask) = (mixed.tag(), head.mask());
        let mut index = head.home(wanted);
        for _ in 0..slots.len() {
            let slot = slots
                .get(usize::try_from(index).ok()?)?
                .load(Ordering::Acquire);
            if slot == EMPTY {
                return None;
            }
            if tag(slot) == wanted && slot != REMOVED && accept(place(slot)) {
                return Some(place(slot));
            }
            index = (index + 1) & mask;
        }
        None
    }
}

/// Counts of used slots in a part.
#[derive(Clone, Copy, Default)]
struct Filled {
    used: u32,
    removed: u32,
}

/// The writer's side of a table.
pub(super) struct TableWriter {
    filled: Box<[Filled]>,
}

impl TableWriter {
    pub(super) fn new() -> Self {
        Self {
            filled: vec![Filled::default(); 1 << PART_BITS].into(),
        }
    }

    /// Adds a block that is not in the table; returns false when there is no room.
    #[inline]
    pub(super) fn insert(
        &mut self,
        table: &Table,
        words: &Arena,
        free: &mut Free,
        mixed: Mixed,
        place: Place,
    ) -> bool {
        let mut head = table.head(mixed, Ordering::Relaxed);
        let filled = self.filled[mixed.part()];
        let capacity = if head.bits() == 0 {
            0
        } else {
            1 << head.bits()
        };
        if (filled.used + filled.removed + 1) * 4 > capacity * 3 {
            let Some(grown) = self.rebuild(table, words, free, mixed) else {
                return false;
            };
            head = grown;
        }
        let slots = words.block(head.at(), 1 << head.bits());
        let mut index = head.home(mixed.tag());
        for _ in 0..slots.len() {
            let Some(word) = usize::try_from(index)
                .ok()
                .and_then(|index| slots.get(index))
            else {
                return false;
            };
            let old = word.load(Ordering::Relaxed);
            if old == EMPTY || old == REMOVED {
                // A reader that sees the slot also sees the run as it was stored before.
                word.store(slot(mixed.tag(), place), Ordering::Release);
                let filled = &mut self.filled[mixed.part()];
                filled.used += 1;
                filled.removed -= u32::from(old == REMOVED);
                return true;
            }
            index = (index + 1) & head.mask();
        }
        false
    }

    /// Copies a part into slots of the size it needs.
    #[cold]
    fn rebuild(
        &mut self,
        table: &Table,
        words: &Arena,
        free: &mut Free,
        mixed: Mixed,
    ) -> Option<Head> {
        let old = table.head(mixed, Ordering::Relaxed);
        let used = self.filled[mixed.part()].used;
        let mut bits = SMALLEST_PART;
        while used * 8 >= (5 << bits) {
            bits += 1;
        }
        if bits > LARGEST {
            return None;
        }
        let class = class_of(1 << bits)?;
        let at = free.take(words, class)?;
        let new = Head::new(at, bits, old.version().wrapping_add(1) & 0xffff);
        let slots = words.block(at, 1 << bits);
        for word in slots {
            word.store(EMPTY, Ordering::Relaxed);
        }
        if old.bits() != 0 {
            for word in words.block(old.at(), 1 << old.bits()) {
                let slot = word.load(Ordering::Relaxed);
                if slot != EMPTY && slot != REMOVED {
                    put(slots, new, slot);
                }
            }
        }
        if let Some(head) = table.heads.get(mixed.part()) {
            head.store(new.0, Ordering::Release);
        }
        // From here on the old slots may be reused: a reader that sees the reuse also sees the new head.
        fence(Ordering::Release);
        if old.bits() != 0
            && let Some(class) = class_of(1 << old.bits())
        {
            free.give(class, old.at());
        }
        self.filled[mixed.part()].removed = 0;
        Some(new)
    }

    /// Removes a block.
    pub(super) fn remove(&mut self, table: &Table, words: &Arena, mixed: Mixed, place: Place) {
        let head = table.head(mixed, Ordering::Relaxed);
        if head.bits() == 0 {
            return;
        }
        let slots = words.block(head.at(), 1 << head.bits());
        let at = |index: u64| usize::try_from(index & head.mask()).unwrap_or_default();
        let wanted = slot(mixed.tag(), place);
        let mut index = head.home(mixed.tag());
        for _ in 0..slots.len() {
            match slots
                .get(at(index))
                .map(|word| word.load(Ordering::Relaxed))
            {
                None | Some(EMPTY) => return,
                Some(found) if found == wanted => break,
                Some(_) => index = (index + 1) & head.mask(),
            }
        }
        let load = |index| {
            slots
                .get(at(index))
                .map_or(EMPTY, |word| word.load(Ordering::Relaxed))
        };
        let store = |index, value| {
            if let Some(word) = slots.get(at(index)) {
                word.store(value, Ordering::Relaxed);
            }
        };
        if load(index) != wanted {
            return;
        }
        let filled = &mut self.filled[mixed.part()];
        filled.used -= 1;
        store(index, REMOVED);
        filled.removed += 1;
        if load(index + 1) == EMPTY {
            while load(index) == REMOVED {
                store(index, EMPTY);
                filled.removed -= 1;
                index = index.wrapping_sub(1);
            }
        }
    }
}

fn put(slots: &[AtomicU64], head: Head, value: u64) {
    let mut index = head.home(tag(value));
    for _ in 0..slots.len() {
        let word = usize::try_from(index)
            .ok()
            .and_then(|index| slots.get(index));
        let Some(word) = word else { return };
        if word.load(Ordering::Relaxed) == EMPTY {
            word.store(value, Ordering::Relaxed);
            return;
        }
        index = (index + 1) & head.mask();
    }
}
