//! Drafts: guessed tokens that may follow a planned row. The step computes them behind the row, so that one forward pass
//! verifies which of them the model samples itself.
//!
//! The driver works between [`Scheduler::plan`] and [`Scheduler::commit`]: [`Scheduler::reserve_drafts`] makes room,
//! [`Scheduler::set_drafts`] puts the drafts into the step, and [`Scheduler::accept_drafts`] reports how many were right.
//! Rejected drafts leave no trace: the commit frees their blocks, and they cause no hash or event.

use genset_backend_common::TokenId;

use super::{Scheduled, Scheduler};
use crate::sequence::{Sequence, SequenceId};

impl Scheduler {
    /// Reserves room for at most `wanted` drafts behind a sequence's planned row, if that row wants a token. It uses only the
    /// rest of the step's budget and blocks without holders, and preempts no sequence. Returns the number of drafts that fit.
    pub fn reserve_drafts(&mut self, id: SequenceId, wanted: usize) -> usize {
        let most = wanted.min(self.spare_tokens);
        let block_size = self.pool.block_size();
        let available = self.pool.available();
        let Some(sequence) = planned(&self.ranks, &mut self.running, id) else {
            return 0;
        };
        if !sequence.chooses() {
            return 0;
        }
        let needed = (sequence.tokens().len() + most).div_ceil(block_size);
        let missing = needed.saturating_sub(sequence.blocks.len());
        if let Some(blocks) = self.pool.allocate(missing.min(available)) {
            sequence.blocks.extend(blocks);
        }
        let room = most.min(sequence.room_for_drafts(block_size));
        self.spare_tokens -= room;
        room
    }

    /// Puts drafts behind a planned row, at most as many as were reserved.
    pub fn set_drafts(&mut self, row: &mut Scheduled, mut drafts: Vec<TokenId>) {
        let block_size = self.pool.block_size();
        let Some(sequence) = planned(&self.ranks, &mut self.running, row.id) else {
            return;
        };
        drafts.truncate(sequence.room_for_drafts(block_size));
        sequence.drafts.clone_from(&drafts);
        row.drafts = drafts;
    }

    /// Records that the model sampled the first `accepted` drafts of a sequence. They become its tokens, computed when the step
    /// is committed. Call it before the commit, whose report has the token that follows them.
    pub fn accept_drafts(&mut self, id: SequenceId, accepted: usize) {
        if let Some(sequence) = planned(&self.ranks, &mut self.running, id) {
            sequence.accept_drafts(accepted, &self.pool);
        }
    }
}

/// Returns a running sequence that is in the step under way.
fn planned<'a>(
    ranks: &super::Ranks,
    running: &'a mut super::Queue,
    id: SequenceId,
) -> Option<&'a mut Sequence> {
    let sequence = running.get_mut(ranks.get(&id)?)?;
    (sequence.planned > 0).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use genset_backend_common::kv::KvEventData;

    use super::super::{Limits, Outcome, Report};
    use super::*;
    use crate::sequence::NewSequence;

    const ID: SequenceId = SequenceId(1);

    /// Blocks of four tokens, and a sequence of `prompt_tokens` tokens that has sampled token 100.
    fn decoding(num_blocks: usize, prompt_tokens: u32) -> Scheduler {
        let limits = Limits {
            max_num_seqs: 4,
            max_num_batched_tokens: 16,
            max_waiting: 8,
        };
        let mut scheduler = Scheduler::try_new(limits, num_blocks, 4).unwrap();
        add(&mut scheduler, ID, prompt_tokens);
        scheduler.plan();
        commit(&mut scheduler, Outcome::Sampled(100));
        scheduler
    }

    fn add(scheduler: &mut Scheduler, id: SequenceId, prompt_tokens: u32) {
        let first = u32::try_from(id.0).unwrap() * 1000;
        let new = NewSequence {
            id,
            prompt: (first..first + prompt_tokens).collect(),
            priority: 0,
            root: None,
        };
        scheduler.add(new).unwrap();
    }

    fn commit(scheduler: &mut Scheduler, outcome: Outcome) {
        scheduler.commit(&[Report { id: ID, outcome }]);
    }

    /// Plans a step with these drafts behind the only row.
    fn plan(scheduler: &mut Scheduler, drafts: &[TokenId]) -> Scheduled {
        let mut step = scheduler.plan();
        let room = scheduler.reserve_drafts(ID, drafts.len());
        let mut row = step.rows.remove(0);
        scheduler.set_drafts(&mut row, drafts[..room].to_vec());
        row
    }

    fn tokens(scheduler: &Scheduler) -> &[TokenId] {
        &scheduler.sequence(ID).unwrap().tokens()[2..]
    }

    #[test]
    fn accepted_drafts_are_tokens_and_the_step_goes_on_behind_them() {
        let mut scheduler = decoding(8, 2);
        let row = plan(&mut scheduler, &[101, 102, 103]);
        assert_eq!((row.tokens, row.drafts), (2..3, vec![101, 102, 103]));
        scheduler.accept_drafts(ID, 2);
        commit(&mut scheduler, Outcome::Sampled(200));
        assert_eq!(tokens(&scheduler), [100, 101, 102, 200]);
        let row = plan(&mut scheduler, &[]);
        assert_eq!((row.tokens, row.drafts), (5..6, vec![]));
    }

    #[test]
    fn rejected_drafts_leave_no_token_no_block_and_no_event() {
        let mut scheduler = decoding(8, 2);
        plan(&mut scheduler, &[101, 102, 103, 104, 105, 106]);
        assert_eq!(scheduler.stats().used_blocks, 3);
        commit(&mut scheduler, Outcome::Sampled(200));
        assert_eq!(scheduler.stats().used_blocks, 1);
        assert_eq!(tokens(&scheduler), [100, 200]);
        assert_eq!(scheduler.take_events(), []);
        // Computed together with the sampled token, in the slots of the drafts.
        assert_eq!(plan(&mut scheduler, &[]).tokens, 3..4);
        commit(&mut scheduler, Outcome::Sampled(201));
        assert!(matches!(
            scheduler.take_events().as_slice(),
            [KvEventData::Stored { blocks, .. }] if blocks.len() == 1
        ));
    }

    #[test]
    fn accepted_drafts_fill_blocks_that_can_be_reused() {
        for ends in [false, true] {
            let mut scheduler = decoding(8, 2);
            plan(&mut scheduler, &[101, 102, 103, 104, 105, 106]);
            scheduler.accept_drafts(ID, 5);
            commit(
                &mut scheduler,
                if ends {
                    Outcome::Finished
                } else {
                    Outcome::Sampled(200)
                },
            );
            let events = scheduler.take_events();
            assert!(
                matches!(events.as_slice(), [KvEventData::Stored { blocks, .. }] if blocks.len() == 2),
                "{events:?}"
            );
            assert_eq!(scheduler.stats().used_blocks, if ends { 0 } else { 3 });
        }
    }

    #[test]
    fn a_held_sequence_keeps_no_block_of_rejected_drafts() {
        let mut scheduler = decoding(8, 2);
        plan(&mut scheduler, &[101, 102, 103, 104, 105, 106]);
        commit(&mut scheduler, Outcome::Held);
        assert_eq!(scheduler.held(ID).map(<[_]>::len), Some(1));
    }

    #[test]
    fn drafts_take_what_the_step_and_free_blocks_leave_and_preempt_nobody() {
        // Two blocks: the sequence's own has room for one more token, and the other for four.
        let mut scheduler = decoding(2, 2);
        scheduler.plan();
        assert_eq!(scheduler.reserve_drafts(ID, 9), 5);
        // Another sequence takes a third block.
        let mut scheduler = decoding(3, 2);
        add(&mut scheduler, SequenceId(2), 4);
        assert_eq!(scheduler.plan().rows.len(), 2);
        assert_eq!(scheduler.reserve_drafts(ID, 9), 5);
        // 16 tokens a step: one is the sequence's own, and ten are a prompt's.
        let mut scheduler = decoding(32, 2);
        add(&mut scheduler, SequenceId(2), 10);
        scheduler.plan();
        assert_eq!(scheduler.reserve_drafts(ID, 9), 5);
        assert_eq!(scheduler.reserve_drafts(ID, 9), 0);
    }

    #[test]
    fn there_is_no_room_behind_sequences_that_are_not_in_the_step() {
        let mut scheduler = decoding(32, 2);
        scheduler.plan();
        assert_eq!(scheduler.reserve_drafts(SequenceId(3), 4), 0);
        scheduler.set_paused(ID, true);
        scheduler.plan();
        assert_eq!(scheduler.reserve_drafts(ID, 4), 0);
    }

    #[test]
    fn drafts_of_a_void_plan_are_forgotten() {
        let mut scheduler = decoding(8, 2);
        plan(&mut scheduler, &[101, 102, 103]);
        plan(&mut scheduler, &[]);
        scheduler.accept_drafts(ID, 3);
        commit(&mut scheduler, Outcome::Sampled(200));
        assert_eq!(tokens(&scheduler), [100, 200]);
    }
}
