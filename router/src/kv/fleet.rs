//! [`Fleet`]: the places where a request may run, with their targets in the index and the work that this router has sent there.

use std::sync::Arc;

use genset_backend_common::kv::BlockHash;
use genset_runtime::InstanceId;
use parking_lot::Mutex;

use super::prompts::{Prompts, Slot, Slots, index_of};
use crate::index::{Overlap, Target};

/// Where a request may run: a data-parallel rank of an instance. If an instance's ranks are not tracked, rank 0 stands for all of
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    pub(super) instance: InstanceId,
    pub(super) rank: u32,
}

#[derive(Debug)]
struct Member {
    place: Place,
    /// Distinguishes it from an earlier member at the same place whose sequences still run.
    slot: Slot,
    /// Its target in the index; `None` until its first snapshot.
    target: Option<Target>,
    /// The number of its last event in the index.
    last_event: u64,
    /// The full prompt blocks of this router's sequences there; shared ones count once.
    prompt_blocks: u64,
    /// Blocks of those sequences that are not shared: generated ones, and the partial last block of a prompt.
    own_blocks: u64,
    /// Their prompt tokens that are neither cached nor known to be prefilled.
    prefill_tokens: u64,
}

impl Member {
    fn new(place: Place, slot: Slot) -> Self {
        Self {
            place,
            slot,
            target: None,
            last_event: 0,
            prompt_blocks: 0,
            own_blocks: 0,
            prefill_tokens: 0,
        }
    }

    fn active_blocks(&self) -> u64 {
        self.own_blocks.saturating_add(self.prompt_blocks)
    }
}

/// The state of a place when a request is routed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Standing {
    /// Leading blocks of the request that the place has cached.
    pub(super) overlap_blocks: u32,
    /// Blocks of this router's sequences there.
    pub(super) active_blocks: u64,
    /// Leading blocks of the request among the active ones.
    pub(super) shared_blocks: u64,
    /// Tokens of those sequences that are yet to be prefilled.
    pub(super) prefill_tokens: u64,
}

/// The places, in order, and the allocator of targets. A target is free again once the index has removed its entries.
#[derive(Debug, Default)]
pub(super) struct Fleet {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Sorted by place.
    members: Vec<Member>,
    slots: Slots,
    /// The prompt blocks of this router's sequences, by the slots of the members that count them.
    prompts: Prompts,
    /// The place of each target.
    owners: Vec<Option<Place>>,
    free: Vec<Target>,
}

impl State {
    fn member(&mut self, place: Place) -> &mut Member {
        let found = self
            .members
            .binary_search_by_key(&place, |member| member.place);
        let index = match found {
            Ok(index) => index,
            Err(index) => {
                let member = Member::new(place, self.slots.take());
                self.members.insert(index, member);
                index
            }
        };
        &mut self.members[index]
    }

    fn known(&mut self, place: Place) -> Option<&mut Member> {
        let found = self
            .members
            .binary_search_by_key(&place, |member| member.place);
        found.ok().and_then(|index| self.members.get_mut(index))
    }

    /// Returns the member that counts a sequence. If that member is gone, its counts are gone with it; a new member at the same
    /// place starts at zero.
    fn counting(&mut self, place: Place, slot: Slot) -> Option<&mut Member> {
        let member = self.known(place);
        member.filter(|member| member.slot == slot)
    }

    fn remove(&mut self, place: Place) -> Option<Member> {
        let found = self
            .members
            .binary_search_by_key(&place, |member| member.place);
        let member = self.members.remove(found.ok()?);
        self.slots.leave(member.slot);
        Some(member)
    }

    /// Returns the states of the sorted `places`: one pass over the members beside arrays of what targets and slots have.
    fn standings(
        &self,
        places: &[Place],
        overlaps: &[Overlap],
        request: &Request,
    ) -> Vec<Standing> {
        let mut overlap_blocks = vec![0; self.owners.len()];
        for overlap in overlaps {
            if let Some(blocks) = overlap_blocks.get_mut(index_of(overlap.target)) {
                *blocks = overlap.blocks;
            }
        }
        let mut shared_blocks = vec![0; self.slots.count()];
        self.prompts.shared(&request.blocks, &mut shared_blocks);
        let overlap_of = |target: Target| overlap_blocks.get(index_of(target)).copied();
        let shared_of = |slot: Slot| shared_blocks.get(index_of(slot)).copied();
        let mut members = self.members.iter().peekable();
        let standing = |place: &Place| {
            while members.next_if(|member| member.place < *place).is_some() {}
            let member = members.next_if(|member| member.place == *place);
            member.map_or_else(Standing::default, |member| Standing {
                overlap_blocks: member.target.and_then(overlap_of).unwrap_or(0),
                active_blocks: member.active_blocks(),
                shared_blocks: shared_of(member.slot).unwrap_or(0),
                prefill_tokens: member.prefill_tokens,
            })
        };
        places.iter().map(standing).collect()
    }
}

impl Fleet {
    /// Allocates a target without an owner.
    pub(super) fn new_target(&self) -> Target {
        let mut state = self.state.lock();
        state.free.pop().unwrap_or_else(|| {
            state.owners.push(None);
            Target::try_from(state.owners.len() - 1).unwrap_or(Target::MAX)
        })
    }

    /// Sets the place's target. Returns the old one, whose entries are stale.
    pub(super) fn set_target(&self, place: Place, target: Target) -> Option<Target> {
        let mut state = self.state.lock();
        let old = state.member(place).target.replace(target);
        set_owner(&mut state, target, Some(place));
        if let Some(old) = old {
            set_owner(&mut state, old, None);
        }
        old
    }

    /// Records the last event of a place that is in the index.
    pub(super) fn took(&self, place: Place, last_event: u64) {
        if let Some(member) = self.state.lock().known(place) {
            member.last_event = last_event;
        }
    }

    /// Returns how many events of an instance are in the index, over all its ranks; `None` while a snapshot is missing.
    pub(super) fn taken(&self, instance: InstanceId) -> Option<u64> {
        let state = self.state.lock();
        let members = &state.members;
        let first = members.partition_point(|member| member.place.instance < instance);
        let end = members.partition_point(|member| member.place.instance <= instance);
        let (_, taken) = taken(&members[first..end])?;
        Some(taken)
    }

    /// Returns the instances of which no snapshot is missing, in order, and how many events of each are in the index.
    pub(super) fn all_taken(&self) -> Vec<(InstanceId, u64)> {
        let state = self.state.lock();
        let instances = (state.members).chunk_by(|a, b| a.place.instance == b.place.instance);
        instances.filter_map(taken).collect()
    }

    pub(super) fn target_of(&self, place: Place) -> Option<Target> {
        let mut state = self.state.lock();
        state.known(place).and_then(|member| member.target)
    }

    /// Removes a place. Returns its target.
    pub(super) fn remove(&self, place: Place) -> Option<Target> {
        let mut state = self.state.lock();
        let target = state.remove(place)?.target?;
        set_owner(&mut state, target, None);
        Some(target)
    }

    /// Frees a target that has no more entries in the index.
    pub(super) fn forgotten(&self, target: Target) {
        self.state.lock().free.push(target);
    }

    /// Returns the most leading blocks of a prompt that one place has cached, over the instances that `counts` accepts.
    pub(super) fn most_cached(
        &self,
        overlaps: &[Overlap],
        counts: impl Fn(InstanceId) -> bool,
    ) -> u32 {
        let state = self.state.lock();
        let mut most = 0;
        for (place, blocks) in cached(&state, overlaps) {
            // `counts` is asked last: it costs more than the rest.
            if blocks > most && counts(place.instance) {
                most = blocks;
            }
        }
        most
    }

    /// Passes the state of the sorted `places` to `choose`, and records the request at the chosen one, atomically. Changes that
    /// `choose` makes to a state take effect.
    pub(super) fn place(
        self: &Arc<Self>,
        places: &[Place],
        overlaps: &[Overlap],
        request: &Request,
        choose: impl FnOnce(&mut [Standing]) -> Option<usize>,
    ) -> Option<(usize, Sequence)> {
        let mut state = self.state.lock();
        let mut standings = state.standings(places, overlaps, request);
        let index = choose(&mut standings)?;
        let (place, standing) = (*places.get(index)?, standings.get(index)?);
        let sequence = self.enter(&mut state, place, *standing, request);
        Some((index, sequence))
    }

    fn enter(
        self: &Arc<Self>,
        state: &mut State,
        place: Place,
        standing: Standing,
        request: &Request,
    ) -> Sequence {
        let cached_tokens = u64::from(standing.overlap_blocks) * u64::from(request.block_size);
        let prefill_tokens = u64::from(request.prompt_tokens).saturating_sub(cached_tokens);
        let full = request.blocks.len() as u64;
        let own_blocks = request.prompt_blocks().saturating_sub(full);
        let slot = state.member(place).slot;
        state.slots.enter(slot);
        let new_blocks = state.prompts.enter(slot, &request.blocks);
        let member = state.member(place);
        member.prompt_blocks += new_blocks;
        member.own_blocks += own_blocks;
        member.prefill_tokens += prefill_tokens;
        Sequence {
            fleet: Arc::clone(self),
            place,
            slot,
            blocks: Arc::clone(&request.blocks),
            own_blocks,
            prefill_tokens,
            overlap_blocks: standing.overlap_blocks,
        }
    }
}

/// Returns the instance with these members, and how many of its events are in the index; `None` while a snapshot is missing.
fn taken(members: &[Member]) -> Option<(InstanceId, u64)> {
    let instance = members.first()?.place.instance;
    let taken = members.iter().try_fold(0_u64, |sum, member| {
        member.target?;
        sum.checked_add(member.last_event)
    });
    Some((instance, taken?))
}

/// Returns the places that have leading blocks of a prompt, with their numbers; targets without an owner are skipped.
fn cached(state: &State, overlaps: &[Overlap]) -> impl Iterator<Item = (Place, u32)> {
    overlaps.iter().filter_map(move |overlap| {
        let owner = state.owners.get(usize::try_from(overlap.target).ok()?)?;
        Some(((*owner)?, overlap.blocks))
    })
}

fn set_owner(state: &mut State, target: Target, owner: Option<Place>) {
    let slot = usize::try_from(target).ok();
    if let Some(slot) = slot.and_then(|target| state.owners.get_mut(target)) {
        *slot = owner;
    }
}

/// The properties of a request that routing needs.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) prompt_tokens: u32,
    /// Tokens per block, at least 1.
    pub(super) block_size: u32,
    /// The hashes of its full blocks.
    pub(super) blocks: Arc<[BlockHash]>,
}

impl Request {
    /// Returns the number of blocks in the prompt, including a partial last one.
    pub(super) fn prompt_blocks(&self) -> u64 {
        u64::from(self.prompt_tokens.div_ceil(self.block_size))
    }
}

/// A request of this router at a place; dropping it removes its counts.
#[derive(Debug)]
pub(super) struct Sequence {
    fleet: Arc<Fleet>,
    pub(super) place: Place,
    /// The slot of the member that counts it.
    slot: Slot,
    blocks: Arc<[BlockHash]>,
    own_blocks: u64,
    prefill_tokens: u64,
    /// Blocks that were expected to be cached at the place.
    pub(super) overlap_blocks: u32,
}

impl Sequence {
    /// Records that the prompt is prefilled.
    pub(super) fn prefilled(&mut self) {
        let tokens = std::mem::take(&mut self.prefill_tokens);
        let mut state = self.fleet.state.lock();
        if let Some(member) = state.counting(self.place, self.slot) {
            member.prefill_tokens = member.prefill_tokens.saturating_sub(tokens);
        }
    }

    /// Adds `blocks` generated blocks.
    pub(super) fn grow(&mut self, blocks: u64) {
        self.own_blocks += blocks;
        let mut state = self.fleet.state.lock();
        if let Some(member) = state.counting(self.place, self.slot) {
            member.own_blocks += blocks;
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let mut state = self.fleet.state.lock();
        let gone_blocks = state.prompts.leave(self.slot, &self.blocks);
        state.slots.leave(self.slot);
        let Some(member) = state.counting(self.place, self.slot) else {
            return;
        };
        member.prefill_tokens = member.prefill_tokens.saturating_sub(self.prefill_tokens);
        member.own_blocks = member.own_blocks.saturating_sub(self.own_blocks);
        member.prompt_blocks = member.prompt_blocks.saturating_sub(gone_blocks);
        if member.target.is_none() && member.active_blocks() == 0 {
            state.remove(self.place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn place(instance: u64) -> Place {
        Place {
            instance: InstanceId(instance),
            rank: 0,
        }
    }

    #[test]
    fn only_what_counted_places_have_is_the_most_that_is_cached() {
        let fleet = Fleet::default();
        let targets = [1, 2, 3].map(|instance| {
            let target = fleet.new_target();
            fleet.set_target(place(instance), target);
            target
        });
        let overlap = |(target, blocks)| Overlap { target, blocks };
        let overlaps: Vec<Overlap> = targets.into_iter().zip([10, 20, 30]).map(overlap).collect();
        let most = |left_out: u64| fleet.most_cached(&overlaps, |id| id != InstanceId(left_out));
        assert_eq!([most(0), most(3)], [30, 20]);
        // Its entries are still in the index, without an owner.
        fleet.remove(place(3));
        assert_eq!([most(0), most(2)], [20, 10]);
        assert_eq!(fleet.most_cached(&[], |_| true), 0);
    }

    #[test]
    fn places_that_have_no_more_than_another_are_not_asked_about() {
        let fleet = Fleet::default();
        let place_of = |instance| {
            let target = fleet.new_target();
            fleet.set_target(place(instance), target);
            let blocks = if instance == 3 { 64 } else { 16 };
            Overlap { target, blocks }
        };
        let overlaps: Vec<Overlap> = (1..=1000).map(place_of).collect();
        let asked = Cell::new(0);
        let counts = |_: InstanceId| {
            asked.set(asked.get() + 1);
            true
        };
        assert_eq!(fleet.most_cached(&overlaps, counts), 64);
        assert_eq!(asked.get(), 2);
    }

    #[test]
    fn events_are_counted_over_the_ranks_of_an_instance_once_all_have_a_snapshot() {
        let fleet = Fleet::default();
        let took = |instance, rank, last_event| {
            let place = Place {
                rank,
                ..place(instance)
            };
            fleet.set_target(place, fleet.new_target());
            fleet.took(place, last_event);
        };
        took(4, 0, 7);
        took(1, 1, 20);
        took(1, 0, 10);
        took(2, 0, 5);
        // Instance 2 has a rank without a snapshot, and instance 3 has none with one.
        let without = [
            Place {
                rank: 1,
                ..place(2)
            },
            place(3),
        ];
        for place in without {
            fleet.state.lock().member(place);
        }
        let all = [1, 2, 3, 4].map(|instance| fleet.taken(InstanceId(instance)));
        assert_eq!(all, [Some(30), None, None, Some(7)]);
        assert_eq!(fleet.taken(InstanceId(5)), None);
        assert_eq!(fleet.all_taken(), [(InstanceId(1), 30), (InstanceId(4), 7)]);
    }

    #[test]
    fn a_place_has_its_own_state_whatever_the_order_of_targets() {
        let fleet = Arc::new(Fleet::default());
        let targets = [4, 3, 2].map(|instance| {
            let target = fleet.new_target();
            fleet.set_target(place(instance), target);
            target
        });
        let without_owner = fleet.new_target();
        let targets = targets.into_iter().chain([without_owner]);
        let overlap = |(target, blocks)| Overlap { target, blocks };
        let overlaps: Vec<Overlap> = targets.zip([40, 30, 20, 99]).map(overlap).collect();
        let request = Request {
            prompt_tokens: 640,
            block_size: 16,
            blocks: [BlockHash(1)].into(),
        };
        // The first is unknown here, and place 3 is no candidate.
        let places = [place(1), place(2), place(4)];
        let mut seen = Vec::new();
        let look = |standings: &mut [Standing]| {
            seen = standings.iter().map(|it| it.overlap_blocks).collect();
            None
        };
        assert!(fleet.place(&places, &overlaps, &request, look).is_none());
        assert_eq!(seen, [0, 20, 40]);
    }

    #[test]
    fn a_sequence_of_before_takes_nothing_from_a_place_that_came_back() {
        let fleet = Arc::new(Fleet::default());
        let request = Request {
            prompt_tokens: 40,
            block_size: 16,
            blocks: [BlockHash(1), BlockHash(2)].into(),
        };
        let places = [place(1)];
        let standing = || {
            let mut seen = Standing::default();
            let look = |standings: &mut [Standing]| {
                seen = standings[0];
                None
            };
            assert!(fleet.place(&places, &[], &request, look).is_none());
            seen
        };
        let begin = || {
            let (_, sequence) = fleet.place(&places, &[], &request, |_| Some(0)).unwrap();
            sequence
        };
        fleet.set_target(place(1), fleet.new_target());
        let mut before = begin();
        fleet.remove(place(1));
        fleet.set_target(place(1), fleet.new_target());
        assert_eq!(standing(), Standing::default());
        let mut now = begin();
        let counts = standing();
        assert_eq!((counts.active_blocks, counts.prefill_tokens), (3, 40));
        before.prefilled();
        before.grow(5);
        drop(before);
        assert_eq!(standing(), counts);
        now.prefilled();
        now.grow(1);
        let grown = standing();
        assert_eq!((grown.active_blocks, grown.prefill_tokens), (4, 0));
        drop(now);
        assert_eq!(standing(), Standing::default());
    }
}
