//! Sequences whose KV blocks are sent to another instance, or received from one.

use tokio::sync::oneshot;

use super::Scheduler;
use crate::error::AddError;
use crate::pool::BlockId;
use crate::sequence::{NewSequence, Receipt, ReceivingPlace, SequenceId};

impl Scheduler {
    /// Adds a waiting sequence whose prompt was computed on another instance. Once it has blocks, it is in
    /// [`Step::receiving`](super::Step::receiving), and `told` receives the place. The caller then fills [`blocks`] from
    /// [`computed_tokens`] on and calls [`received`](Self::received), which resumes the sequence. A sequence that is preempted
    /// before that computes its prompt itself.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    ///
    /// [`computed_tokens`]: crate::Sequence::computed_tokens
    /// [`blocks`]: crate::Sequence::blocks
    pub fn add_receiving(
        &mut self,
        new: NewSequence,
        told: oneshot::Sender<ReceivingPlace>,
    ) -> Result<(), AddError> {
        self.enqueue(new, Receipt::Expected(told))
    }

    /// Records that all of a sequence's blocks have their content. Returns whether it was waiting for that.
    pub fn received(&mut self, id: SequenceId) -> bool {
        let running = self
            .ranks
            .get(&id)
            .and_then(|rank| self.running.get_mut(rank));
        let Some(sequence) = running.filter(|sequence| sequence.is_receiving()) else {
            return false;
        };
        sequence.receive(&mut self.pool);
        true
    }

    /// The blocks of a sequence that ended as [`Held`](super::Outcome::Held), in order.
    #[must_use]
    pub fn held(&self, id: SequenceId) -> Option<&[BlockId]> {
        self.held.get(&id).map(Vec::as_slice)
    }

    /// Frees the held blocks of a sequence. Returns whether it had any.
    pub fn free_held(&mut self, id: SequenceId) -> bool {
        let Some(blocks) = self.held.remove(&id) else {
            return false;
        };
        self.pool.release(&blocks);
        true
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::super::{Limits, Outcome, Report};
    use super::*;

    fn scheduler(num_blocks: usize) -> Scheduler {
        let limits = Limits {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            max_waiting: 8,
        };
        Scheduler::try_new(limits, num_blocks, 4).unwrap()
    }

    fn new(id: u64, prompt_tokens: u32) -> NewSequence {
        NewSequence {
            id: SequenceId(id),
            prompt: (0..prompt_tokens).collect(),
            priority: 0,
            root: None,
        }
    }

    /// Adds a receiving sequence and returns the receiver of its place.
    fn add_receiving(
        scheduler: &mut Scheduler,
        id: u64,
        prompt_tokens: u32,
    ) -> oneshot::Receiver<ReceivingPlace> {
        let (told, place) = oneshot::channel();
        let new = new(id, prompt_tokens);
        scheduler.add_receiving(new, told).unwrap();
        place
    }

    fn is_lost(place: &mut ReceivingPlace) -> bool {
        place.lost.try_recv() == Err(TryRecvError::Closed)
    }

    fn commit(scheduler: &mut Scheduler, id: u64, outcome: Outcome) {
        let id = SequenceId(id);
        scheduler.commit(&[Report { id, outcome }]);
    }

    #[test]
    fn held_blocks_are_used_until_they_are_freed_and_then_reusable() {
        let mut scheduler = scheduler(8);
        scheduler.add(new(1, 10)).unwrap();
        assert!(scheduler.plan().rows[0].wants_token);
        commit(&mut scheduler, 1, Outcome::Held);
        assert!(scheduler.is_idle() && scheduler.sequence(SequenceId(1)).is_none());
        assert_eq!(scheduler.held(SequenceId(1)).unwrap().len(), 3);
        let stats = scheduler.stats();
        assert_eq!((stats.used_blocks, stats.held_blocks), (3, 3));
        // Its id stays in use, and other sequences can reuse its full blocks.
        assert_eq!(
            scheduler.add(new(1, 1)),
            Err(AddError::DuplicateId(SequenceId(1)))
        );
        scheduler.add(new(2, 10)).unwrap();
        assert_eq!(scheduler.plan().rows[0].tokens, 8..10);
        scheduler.cancel(SequenceId(2));
        assert!(scheduler.free_held(SequenceId(1)));
        assert!(!scheduler.free_held(SequenceId(1)));
        assert_eq!(scheduler.stats().used_blocks, 0);
    }

    #[test]
    fn what_is_received_is_not_computed_but_for_the_last_token() {
        let mut scheduler = scheduler(8);
        let mut place = add_receiving(&mut scheduler, 1, 10);
        assert!(place.try_recv().is_err());
        let step = scheduler.plan();
        assert_eq!((step.rows.len(), step.receiving.len()), (0, 1));
        assert!(!step.is_empty() && scheduler.plan().is_empty());
        let sequence = scheduler.sequence(SequenceId(1)).unwrap();
        assert_eq!(
            (sequence.blocks().len(), sequence.computed_tokens()),
            (3, 0)
        );
        let mut place = place.try_recv().unwrap();
        assert_eq!((place.id, place.cached_tokens), (SequenceId(1), 0));
        assert!(!is_lost(&mut place) && scheduler.received(SequenceId(1)));
        assert!(!scheduler.received(SequenceId(1)));
        let step = scheduler.plan();
        assert_eq!(
            (step.rows[0].tokens.clone(), step.rows[0].wants_token),
            (9..10, true)
        );
        commit(&mut scheduler, 1, Outcome::Sampled(7));
        // Received blocks are as good as computed ones: the next sequence reuses them.
        let mut place = add_receiving(&mut scheduler, 2, 10);
        assert_eq!(scheduler.plan().receiving, [SequenceId(2)]);
        assert_eq!(place.try_recv().unwrap().cached_tokens, 8);
        assert_eq!(
            scheduler.sequence(SequenceId(2)).unwrap().computed_tokens(),
            8
        );
    }

    #[test]
    fn one_that_loses_its_blocks_meanwhile_computes_its_prompt() {
        let mut scheduler = scheduler(4);
        let mut place = add_receiving(&mut scheduler, 1, 10);
        assert_eq!(scheduler.plan().receiving, [SequenceId(1)]);
        let mut place = place.try_recv().unwrap();
        let mut urgent = new(2, 12);
        urgent.prompt.reverse();
        urgent.priority = 1;
        scheduler.add(urgent).unwrap();
        assert!(!is_lost(&mut place));
        assert_eq!(scheduler.plan().preempted, [SequenceId(1)]);
        assert!(is_lost(&mut place));
        assert!(!scheduler.received(SequenceId(1)));
        scheduler.plan();
        commit(&mut scheduler, 2, Outcome::Finished);
        let step = scheduler.plan();
        assert_eq!(
            (step.rows[0].id, step.rows[0].tokens.clone()),
            (SequenceId(1), 0..10)
        );
    }

    #[test]
    fn a_prompt_of_one_token_needs_nothing_from_elsewhere() {
        let mut scheduler = scheduler(4);
        let _place = add_receiving(&mut scheduler, 1, 1);
        assert_eq!(scheduler.plan().receiving, [SequenceId(1)]);
        assert_eq!(
            scheduler
                .sequence(SequenceId(1))
                .unwrap()
                .receivable_tokens(),
            0
        );
        assert!(scheduler.received(SequenceId(1)));
        assert_eq!(scheduler.plan().rows[0].tokens, 0..1);
    }

    #[test]
    fn a_receiving_sequence_that_is_cancelled_leaves_nothing() {
        let mut scheduler = scheduler(4);
        let mut place = add_receiving(&mut scheduler, 1, 10);
        scheduler.plan();
        assert!(scheduler.cancel(SequenceId(1)));
        assert!(is_lost(&mut place.try_recv().unwrap()));
        assert!(!scheduler.received(SequenceId(1)));
        assert_eq!(scheduler.stats().used_blocks, 0);
    }
}
