//! [`Slots`]: which request runs in which of llama.cpp's sequences, what the cells of each hold, and what the next step computes.
//!
//! This module only decides; the engine thread ([`core`](crate::core)) applies the decisions to llama.cpp's memory. A sequence that
//! ended leaves its cells filled until they are needed. A new one begins with the longest prefix that any sequence has in its cells.
//!
//! Cells that several sequences share are counted for each of them, so a cell that counts as free is free.

use std::collections::VecDeque;

use genset_backend_common::TokenId;

/// A request's tokens on their way through the engine.
#[derive(Debug)]
pub(crate) struct Sequence<R> {
    /// The prompt and the tokens chosen after it. Never empty.
    pub(crate) tokens: Vec<TokenId>,
    /// Cells are shared only between sequences with the same salt.
    pub(crate) salt: Option<String>,
    pub(crate) request: R,
}

/// One of llama.cpp's sequences.
#[derive(Debug)]
pub(crate) struct Slot<R> {
    pub(crate) tokens: Vec<TokenId>,
    /// The number of leading tokens that are in cells.
    pub(crate) computed: usize,
    salt: Option<String>,
    /// Whether other sequences may begin with its cells. False if the prefix cache was cleared since it began.
    is_reusable: bool,
    /// The request in progress; `None` if the cells only wait for reuse.
    pub(crate) request: Option<R>,
    /// When the slot got its request, or lost it. 0 while it holds nothing of use.
    since: u64,
}

/// All of llama.cpp's sequences. A sequence's number is its index here.
#[derive(Debug)]
pub(crate) struct Slots<R> {
    pub(crate) all: Vec<Slot<R>>,
    cells: usize,
    clock: u64,
}

/// The place for a new sequence.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: usize,
    /// The slot whose cells it begins with; may be its own.
    pub(crate) source: usize,
    /// The number of tokens in common.
    pub(crate) common: usize,
}

/// What a step computes of a slot: the first tokens that are not computed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) slot: usize,
    pub(crate) tokens: usize,
}

/// A slot that must give up its cells.
#[derive(Debug)]
pub(crate) enum Eviction<R> {
    /// This slot had no request; its cells must be cleared.
    Idle(usize),
    /// This slot's sequence must wait and be computed again; its cells must be cleared.
    Preempted(usize, Box<Sequence<R>>),
}

/// The index of the first waiting sequence that is ready. One that was preempted while its reader was behind needs no place yet.
pub(crate) fn first_ready<R>(
    waiting: &VecDeque<Sequence<R>>,
    is_ready: impl Fn(&R) -> bool,
) -> Option<usize> {
    let mut waiting = waiting.iter();
    waiting.position(|sequence| is_ready(&sequence.request))
}

impl<R> Slots<R> {
    pub(crate) fn new(count: usize, cells: usize) -> Self {
        let slot = || Slot {
            tokens: Vec::new(),
            computed: 0,
            salt: None,
            is_reusable: true,
            request: None,
            since: 0,
        };
        Self {
            all: std::iter::repeat_with(slot).take(count).collect(),
            cells,
            clock: 0,
        }
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Slot<R>> {
        self.all.iter().filter(|slot| slot.request.is_some())
    }

    /// The place for a sequence of these tokens; `None` if it has to wait.
    pub(crate) fn place(&self, tokens: &[TokenId], salt: Option<&str>) -> Option<Place> {
        let held: usize = self.running().map(|slot| slot.tokens.len()).sum();
        if held > 0 && held + tokens.len() >= self.cells {
            return None;
        }
        // The last token is always computed: its logits are needed.
        let most = tokens.len().saturating_sub(1);
        let common = |slot: &Slot<R>| {
            let computed = &slot.tokens[..slot.computed];
            let same = tokens[..most].iter().zip(computed);
            same.take_while(|(token, other)| token == other).count()
        };
        let (source, common) = (self.all.iter().enumerate())
            .filter(|(_, slot)| slot.is_reusable && slot.salt.as_deref() == salt)
            .map(|(place, slot)| (place, common(slot)))
            .max_by_key(|(_, common)| *common)
            .unwrap_or((0, 0));
        let is_idle = |place: &usize| self.all[*place].request.is_none();
        // An idle slot whose cells all hold this prefix is used itself. Other cells stay, for sequences that share more with them.
        let slot = if is_idle(&source) && common > 0 && common == self.all[source].computed {
            source
        } else {
            let idle = (0..self.all.len()).filter(is_idle);
            idle.min_by_key(|place| self.all[*place].since)?
        };
        Some(Place {
            slot,
            source,
            common,
        })
    }

    /// Which waiting sequences are ready; `None` if the first ready one has a place, so that there is something to compute. Calls
    /// `is_ready` once per sequence: a reader may catch up at any moment, and must be either waited for or seen.
    pub(crate) fn readiness(
        &self,
        waiting: &VecDeque<Sequence<R>>,
        is_ready: impl Fn(&R) -> bool,
    ) -> Option<Vec<bool>> {
        let ready = waiting.iter().map(|sequence| is_ready(&sequence.request));
        let ready: Vec<bool> = ready.collect();
        let first = ready.iter().position(|it| *it);
        let first = first.and_then(|place| waiting.get(place));
        let place = first.and_then(|it| self.place(&it.tokens, it.salt.as_deref()));
        place.is_none().then_some(ready)
    }

    /// Puts a sequence into a slot whose cells hold its first `computed` tokens.
    pub(crate) fn fill(&mut self, slot: usize, computed: usize, sequence: Sequence<R>) {
        self.clock += 1;
        self.all[slot] = Slot {
            tokens: sequence.tokens,
            computed,
            salt: sequence.salt,
            is_reusable: true,
            request: Some(sequence.request),
            since: self.clock,
        };
    }

    /// From now on no sequence begins with cells that hold something now.
    pub(crate) fn end_reuse(&mut self) {
        self.all
            .iter_mut()
            .for_each(|slot| slot.is_reusable = false);
    }

    /// Ends a slot's request. Its cells stay for reuse.
    pub(crate) fn release(&mut self, slot: usize) -> Option<R> {
        self.clock += 1;
        let slot = &mut self.all[slot];
        slot.since = if slot.is_reusable { self.clock } else { 0 };
        slot.tokens.truncate(slot.computed);
        slot.request.take()
    }

    /// Forgets what a slot's cells hold.
    pub(crate) fn forget(&mut self, slot: usize) {
        let slot = &mut self.all[slot];
        slot.computed = 0;
        if slot.request.is_none() {
            slot.tokens.clear();
            slot.since = 0;
        }
    }

    /// Plans a step of at most `most` tokens for the slots that are ready. Each gets an equal share, and unused shares go to the
    /// others: a decoding slot waits for no prompt, and a short prompt for no long one. `most` is at least one token per slot.
    pub(crate) fn plan(&self, most: usize, is_ready: impl Fn(&R) -> bool) -> Vec<Row> {
        let pending = |slot: usize| self.all[slot].tokens.len() - self.all[slot].computed;
        let is_ready = |slot: &usize| self.all[*slot].request.as_ref().is_some_and(&is_ready);
        let mut ready: Vec<usize> = (0..self.all.len()).filter(is_ready).collect();
        ready.sort_by_key(|slot| (pending(*slot), self.all[*slot].since));
        let (mut left, mut others) = (most, ready.len());
        let row = |slot: usize| {
            let tokens = pending(slot).min(left / others);
            left -= tokens;
            others -= 1;
            Row { slot, tokens }
        };
        ready.into_iter().map(row).collect()
    }

    /// Whether there are enough free cells for these rows.
    pub(crate) fn has_room(&self, rows: &[Row]) -> bool {
        let held: usize = self.all.iter().map(|slot| slot.computed).sum();
        let wanted: usize = rows.iter().map(|row| row.tokens).sum();
        held + wanted <= self.cells
    }

    /// Evicts the slot that was idle for longest, else one whose sequence is not ready, else the youngest. Never evicts the only
    /// running sequence, which has room.
    pub(crate) fn evict(&mut self, is_ready: impl Fn(&R) -> bool) -> Option<Eviction<R>> {
        let is_idle = |slot: &usize| self.all[*slot].request.is_none();
        let idle = (0..self.all.len()).filter(|slot| is_idle(slot) && self.all[*slot].computed > 0);
        if let Some(slot) = idle.min_by_key(|slot| self.all[*slot].since) {
            self.forget(slot);
            return Some(Eviction::Idle(slot));
        }
        let running = (0..self.all.len()).filter(|slot| !is_idle(slot));
        let is_ready = |slot: usize| self.all[slot].request.as_ref().is_some_and(&is_ready);
        let yields = |slot: &usize| (!is_ready(*slot), self.all[*slot].since);
        let first = running.clone().max_by_key(yields)?;
        if running.count() == 1 {
            return None;
        }
        let slot = &mut self.all[first];
        let sequence = Box::new(Sequence {
            tokens: std::mem::take(&mut slot.tokens),
            salt: slot.salt.take(),
            request: slot.request.take()?,
        });
        self.forget(first);
        Some(Eviction::Preempted(first, sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(tokens: &[TokenId]) -> Sequence<&'static str> {
        Sequence {
            tokens: tokens.to_vec(),
            salt: None,
            request: "request",
        }
    }

    /// Computes these sequences in slots, and ends those in `ended`.
    fn slots(cells: usize, computed: &[&[TokenId]], ended: &[usize]) -> Slots<&'static str> {
        let mut slots = Slots::new(3, cells);
        for (slot, tokens) in computed.iter().enumerate() {
            slots.fill(slot, tokens.len(), sequence(tokens));
        }
        for slot in ended {
            slots.release(*slot);
        }
        slots
    }

    #[test]
    fn a_prompt_begins_with_the_longest_prefix_that_is_there() {
        let slots = slots(100, &[&[1, 2, 3, 4], &[1, 2, 9]], &[]);
        let place = |tokens: &[TokenId], salt| slots.place(tokens, salt);
        let of = |source, common| {
            Some(Place {
                slot: 2,
                source,
                common,
            })
        };
        assert_eq!(place(&[1, 2, 3, 5], None), of(0, 3));
        assert_eq!(place(&[1, 2, 9, 9, 9], None), of(1, 3));
        // The last token of a prompt is always computed.
        assert_eq!(place(&[1, 2, 3, 4], None), of(0, 3));
        assert_eq!(place(&[1, 2, 3, 4], Some("another")).unwrap().common, 0);
    }

    #[test]
    fn a_sequence_goes_on_in_its_own_cells_and_leaves_those_of_others() {
        let slots = slots(100, &[&[1, 2, 3], &[1, 2, 3, 4, 5]], &[0, 1]);
        assert_eq!(slots.place(&[1, 2, 3, 4, 5, 6], None).unwrap().slot, 1);
        let place = slots.place(&[1, 2, 3, 4, 7], None).unwrap();
        assert_eq!((place.slot, place.source, place.common), (2, 1, 4));
    }

    #[test]
    fn nobody_begins_with_cells_from_before_the_cache_was_cleared() {
        let mut slots = slots(100, &[&[1, 2, 3]], &[]);
        let common = |slots: &Slots<_>| slots.place(&[1, 2, 3, 4], None).map(|place| place.common);
        assert_eq!(common(&slots), Some(3));
        slots.end_reuse();
        assert_eq!(common(&slots), Some(0), "while its sequence runs");
        slots.release(0);
        assert_eq!(common(&slots), Some(0), "after it has ended");
        slots.fill(0, 3, sequence(&[1, 2, 3]));
        assert_eq!(common(&slots), Some(3), "the next sequence is another");
    }

    #[test]
    fn cells_from_before_the_cache_was_cleared_are_given_up_first() {
        let mut slots = slots(100, &[&[1, 2], &[], &[3, 4]], &[]);
        slots.end_reuse();
        slots.fill(1, 2, sequence(&[5, 6]));
        slots.release(1);
        slots.release(2);
        assert_eq!(slots.place(&[7, 8], None).unwrap().slot, 2);
        assert!(matches!(slots.evict(|_| true), Some(Eviction::Idle(2))));
        assert!(matches!(slots.evict(|_| true), Some(Eviction::Idle(1))));
    }

    #[test]
    fn the_oldest_idle_slot_is_taken_and_without_one_a_sequence_waits() {
        let mut slots = slots(100, &[&[1], &[2], &[3]], &[1, 0]);
        assert_eq!(slots.place(&[7, 8], None).unwrap().slot, 1);
        slots.fill(1, 0, sequence(&[7, 8]));
        slots.fill(0, 0, sequence(&[7, 8]));
        assert_eq!(slots.place(&[7, 8], None), None);
    }

    #[test]
    fn one_that_waits_and_whose_reader_has_caught_up_is_not_waited_for_where_it_has_a_place() {
        let mut slots = slots(9, &[&[1, 2, 3]], &[]);
        let waiting = VecDeque::from([sequence(&[4, 5]), sequence(&[6])]);
        assert_eq!(slots.readiness(&waiting, |_| true), None);
        assert_eq!(
            slots.readiness(&waiting, |_| false),
            Some(vec![false, false])
        );
        let asked = std::cell::Cell::new(0);
        let catches_up = |_: &&str| asked.replace(asked.get() + 1) > 1;
        assert_eq!(
            slots.readiness(&waiting, catches_up),
            Some(vec![false, false])
        );
        slots.fill(1, 3, sequence(&[7, 8, 9]));
        slots.fill(2, 1, sequence(&[7]));
        assert_eq!(slots.readiness(&waiting, |_| true), Some(vec![true, true]));
    }

    #[test]
    fn a_step_is_shared_and_a_next_token_waits_for_no_prompt() {
        let mut slots = slots(1000, &[&[1, 2], &[], &[]], &[]);
        slots.all[0].tokens.push(3);
        slots.all[1].tokens = vec![5; 100];
        slots.all[2].tokens = vec![6; 3];
        let rows = |slots: &Slots<_>, most| -> Vec<(usize, usize)> {
            let rows = slots.plan(most, |_| true).into_iter();
            rows.map(|row| (row.slot, row.tokens)).collect()
        };
        assert_eq!(rows(&slots, 20), [(0, 1), (2, 3), (1, 16)]);
        assert_eq!(rows(&slots, 3), [(0, 1), (2, 1), (1, 1)]);
        slots.release(2);
        assert_eq!(rows(&slots, 20), [(0, 1), (1, 19)]);
    }

    #[test]
    fn idle_cells_are_given_up_before_a_sequence_and_the_last_one_never() {
        let mut slots = slots(9, &[&[1, 2, 3], &[4, 5, 6], &[7, 8, 9]], &[1]);
        let rows = [Row { slot: 0, tokens: 1 }];
        assert!(!slots.has_room(&rows));
        assert!(matches!(slots.evict(|_| true), Some(Eviction::Idle(1))));
        assert!(slots.has_room(&rows));
        let Some(Eviction::Preempted(2, preempted)) = slots.evict(|_| true) else {
            panic!("the youngest is preempted");
        };
        assert_eq!(preempted.tokens, [7, 8, 9]);
        assert!(slots.evict(|_| true).is_none());
        // It gets a place again once there is room beside the others.
        assert!(slots.place(&[7; 6], None).is_none());
        assert!(slots.place(&[7; 5], None).is_some());
    }

    #[test]
    fn a_sequence_that_is_not_ready_is_preempted_before_younger_ones_and_waits_behind_them() {
        let mut slots = slots(9, &[&[1, 2, 3], &[4, 5, 6], &[7, 8, 9]], &[]);
        slots.all[1].request = Some("behind");
        let is_ready = |request: &&str| *request != "behind";
        let mut waiting = VecDeque::new();
        for slot in [1, 2] {
            let Some(Eviction::Preempted(preempted, sequence)) = slots.evict(is_ready) else {
                panic!("there is another");
            };
            assert_eq!(preempted, slot);
            waiting.push_back(*sequence);
        }
        assert_eq!(first_ready(&waiting, is_ready), Some(1));
        waiting.pop_back();
        assert_eq!(first_ready(&waiting, is_ready), None);
        assert!(slots.evict(is_ready).is_none());
    }
}
