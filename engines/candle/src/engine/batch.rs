//! From the scheduler's step to the model's [`StepBatch`].

use genset_scheduler::{Scheduled, Scheduler};

use crate::model::{SequenceRows, StepBatch};

/// Packs the rows of a step, in their order; the last row of each sequence that wants a token has its logits wanted.
pub(crate) fn pack(scheduler: &Scheduler, rows: &[Scheduled]) -> StepBatch {
    let mut batch = StepBatch::default();
    for scheduled in rows {
        // A planned sequence is there until it is committed or cancelled, and this is in between.
        let Some(sequence) = scheduler.sequence(scheduled.id) else {
            continue;
        };
        let block_size = scheduler.pool().block_size();
        let first = batch.tokens.len();
        let blocks: Vec<u32> = sequence.blocks().iter().map(|block| block.0).collect();
        batch
            .tokens
            .extend_from_slice(&sequence.tokens()[scheduled.tokens.clone()]);
        batch.positions.extend(scheduled.tokens.clone().map(narrow));
        let slot = |place: usize| {
            blocks[place / block_size] * narrow(block_size) + narrow(place % block_size)
        };
        batch.slots.extend(scheduled.tokens.clone().map(slot));
        let rows = first..batch.tokens.len();
        if scheduled.wants_token {
            batch.logit_rows.push(narrow(rows.end - 1));
        }
        batch.sequences.push(SequenceRows {
            rows,
            context_len: scheduled.tokens.end,
            blocks,
        });
    }
    batch
}

/// Places and sizes here are bounded by the number of KV slots, which the engine keeps below 2^32.
fn narrow(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use genset_scheduler::{Limits, NewSequence, Outcome, Report, SequenceId};

    use super::*;

    #[test]
    fn chunks_and_decode_rows_are_packed_one_after_the_other() {
        let limits = Limits {
            max_num_seqs: 4,
            max_num_batched_tokens: 4,
            max_waiting: 4,
        };
        let mut scheduler = Scheduler::try_new(limits, 8, 2).unwrap();
        for (id, prompt) in [(1, vec![10, 11, 12]), (2, vec![20, 21, 22, 23, 24])] {
            scheduler
                .add(NewSequence {
                    id: SequenceId(id),
                    prompt,
                    priority: 0,
                    cache_salt: None,
                })
                .unwrap();
        }
        let step = scheduler.plan();
        let batch = pack(&scheduler, &step.rows);
        assert_eq!(batch.tokens, [10, 11, 12, 20]);
        assert_eq!(batch.positions, [0, 1, 2, 0]);
        assert_eq!(batch.slots, [0, 1, 2, 4]);
        assert_eq!(batch.logit_rows, [2]);
        scheduler.commit(&[
            Report {
                id: SequenceId(1),
                outcome: Outcome::Sampled(13),
            },
            Report {
                id: SequenceId(2),
                outcome: Outcome::Computed,
            },
        ]);
        let step = scheduler.plan();
        let batch = pack(&scheduler, &step.rows);
        assert_eq!(batch.tokens, [13, 21, 22, 23]);
        assert_eq!(batch.positions, [3, 1, 2, 3]);
        assert_eq!(batch.slots, [3, 5, 6, 7]);
        assert_eq!(batch.logit_rows, [0]);
        let second = &batch.sequences[1];
        assert_eq!(
            (
                second.rows.clone(),
                second.context_len,
                second.blocks.as_slice()
            ),
            (1..4, 4, [2, 3, 4].as_slice())
        );
    }
}
