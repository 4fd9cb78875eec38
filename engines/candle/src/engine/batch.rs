//! Packs the scheduler's step into the model's [`StepBatch`].

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use genset_scheduler::{BlockId, Scheduled, Scheduler, SequenceId};

use super::adapters::LoadedAdapter;
use super::forward::ForwardError;
use super::real::narrow;
use crate::model::{AdapterRows, AdapterWeights, Piece, StepBatch};

/// Packs the rows of a step, in order. For each sequence that wants a token, it wants the logits of the last row and of each
/// draft behind it. Rows of `adapted` sequences use their adapters.
///
/// # Errors
/// A row's sequence is missing. It exists from its plan until it is committed or cancelled, so this is an internal error.
pub(crate) fn pack(
    scheduler: &Scheduler,
    rows: &[Scheduled],
    adapted: &HashMap<SequenceId, Arc<LoadedAdapter>>,
) -> Result<StepBatch, ForwardError> {
    let mut batch = StepBatch::default();
    for scheduled in rows {
        let sequence = scheduler
            .sequence(scheduled.id)
            .ok_or_else(|| format!("the planned sequence {} is gone", scheduled.id.0))?;
        let tokens = [
            &sequence.tokens()[scheduled.tokens.clone()],
            &scheduled.drafts,
        ]
        .concat();
        let piece = Piece {
            tokens: &tokens,
            start: scheduled.tokens.start,
            blocks: numbers(sequence.blocks()),
            wanted: if scheduled.wants_token {
                1 + scheduled.drafts.len()
            } else {
                0
            },
        };
        let first = batch.tokens.len();
        batch.push(scheduler.pool().block_size(), piece);
        if !adapted.is_empty()
            && let Some(adapter) = adapted.get(&scheduled.id)
        {
            let rows = first..batch.tokens.len();
            give(&mut batch, adapter.weights(), rows);
        }
    }
    Ok(batch)
}

/// Assigns rows to an adapter. Few adapters have rows in a step.
fn give(batch: &mut StepBatch, weights: &Arc<AdapterWeights>, rows: Range<usize>) {
    let rows = rows.map(narrow);
    let known = batch
        .adapters
        .iter_mut()
        .find(|known| Arc::ptr_eq(&known.weights, weights));
    match known {
        Some(known) => known.rows.extend(rows),
        None => batch.adapters.push(AdapterRows {
            weights: Arc::clone(weights),
            rows: rows.collect(),
        }),
    }
}

/// The numbers of these blocks.
pub(super) fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
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
                    root: None,
                })
                .unwrap();
        }
        let step = scheduler.plan();
        let batch = pack(&scheduler, &step.rows, &HashMap::new()).unwrap();
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
        let batch = pack(&scheduler, &step.rows, &HashMap::new()).unwrap();
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
    #[test]
    fn drafts_stand_behind_their_row_and_have_their_logits_wanted() {
        let limits = Limits {
            max_num_seqs: 4,
            max_num_batched_tokens: 8,
            max_waiting: 4,
        };
        let mut scheduler = Scheduler::try_new(limits, 8, 2).unwrap();
        let id = SequenceId(1);
        let prompt = vec![10, 11, 12];
        let new = NewSequence {
            id,
            prompt,
            priority: 0,
            root: None,
        };
        scheduler.add(new).unwrap();
        let mut step = scheduler.plan();
        assert_eq!(scheduler.reserve_drafts(id, 2), 2);
        scheduler.set_drafts(&mut step.rows[0], vec![13, 14]);
        let batch = pack(&scheduler, &step.rows, &HashMap::new()).unwrap();
        assert_eq!(batch.tokens, [10, 11, 12, 13, 14]);
        assert_eq!(batch.positions, [0, 1, 2, 3, 4]);
        assert_eq!(batch.slots, [0, 1, 2, 3, 4]);
        assert_eq!(batch.logit_rows, [2, 3, 4]);
        assert_eq!(batch.sequences[0].context_len, 5);
        scheduler.cancel(id);
        let error = pack(&scheduler, &step.rows, &HashMap::new()).unwrap_err();
        assert_eq!(error.to_string(), "the planned sequence 1 is gone");
    }
}
