//! [`DraftModel`]: a smaller model that drafts greedily what the large one may sample.
//!
//! Its KV cache has the same blocks as the large model's, so it needs no scheduler of its own: a sequence's keys and values
//! are in the same slots of both, and a block that is reused or shared is so in both. It computes every row of every step,
//! including prompts, and then one token per pass for the sequences with room for more drafts.

use std::collections::HashMap;

use genset_backend_common::TokenId;
use genset_scheduler::{Scheduled, Scheduler, SequenceId};

use crate::engine::batch::numbers;
use crate::engine::forward::{Fetched, Forward, ForwardError, contained, fetch};
use crate::model::{Piece, StepBatch};

/// A smaller model with its KV cache.
pub(crate) struct DraftModel {
    forward: Box<dyn Forward>,
    vocab_size: usize,
    /// The large model's vocabulary size; drafts must be below it.
    target_vocab_size: usize,
    context_length: usize,
    /// The number of each sequence's tokens in its KV cache, for sequences with drafts: if all drafts were accepted, the last one
    /// is missing.
    computed: HashMap<SequenceId, usize>,
    is_broken: bool,
}

/// A sequence that gets drafts.
struct Guessing {
    /// The index of its row in the step.
    row: usize,
    /// Its tokens.
    tokens: usize,
    room: usize,
    drafts: Vec<TokenId>,
}

impl DraftModel {
    /// `forward` must have as many KV blocks as the large model, of the same size.
    pub(crate) fn new(
        forward: Box<dyn Forward>,
        vocab_size: usize,
        target_vocab_size: usize,
        context_length: usize,
    ) -> Self {
        Self {
            forward,
            vocab_size,
            target_vocab_size,
            context_length,
            computed: HashMap::new(),
            is_broken: false,
        }
    }

    /// Drafts for each of `rows`, at most the number in `rooms`. After a failure, the model drafts nothing any more.
    pub(super) fn guess(
        &mut self,
        scheduler: &Scheduler,
        rows: &[Scheduled],
        rooms: &[usize],
    ) -> Vec<Vec<TokenId>> {
        let mut guesses = vec![Vec::new(); rows.len()];
        if self.is_broken {
            return guesses;
        }
        match self.try_guess(scheduler, rows, rooms) {
            Ok(guessed) => guessed
                .into_iter()
                .for_each(|one| guesses[one.row] = one.drafts),
            Err(problem) => {
                tracing::error!(%problem, "the draft model failed; answers go on without it");
                self.is_broken = true;
            }
        }
        guesses
    }

    fn try_guess(
        &mut self,
        scheduler: &Scheduler,
        rows: &[Scheduled],
        rooms: &[usize],
    ) -> Result<Vec<Guessing>, ForwardError> {
        self.computed
            .retain(|id, _| scheduler.sequence(*id).is_some());
        let mut batch = StepBatch::default();
        let mut guessing = Vec::new();
        for (row, (scheduled, room)) in rows.iter().zip(rooms).enumerate() {
            let Some(sequence) = scheduler.sequence(scheduled.id) else {
                continue;
            };
            let end = scheduled.tokens.end;
            // It drafts nothing for a sequence longer than its own context.
            let Some(left) = self.context_length.checked_sub(end) else {
                continue;
            };
            let room = left.min(*room);
            let known = self.computed.insert(scheduled.id, end);
            let start = known.map_or(scheduled.tokens.start, |known| {
                known.min(scheduled.tokens.start)
            });
            let piece = Piece {
                tokens: &sequence.tokens()[start..end],
                start,
                blocks: numbers(sequence.blocks()),
                wanted: usize::from(room > 0),
            };
            batch.push(scheduler.pool().block_size(), piece);
            if room > 0 {
                guessing.push(Guessing {
                    row,
                    tokens: end,
                    room,
                    drafts: Vec::with_capacity(room),
                });
            }
        }
        self.compute(batch, guessing.iter_mut().collect())?;
        self.go_on(scheduler, rows, &mut guessing)?;
        Ok(guessing)
    }

    /// Drafts one more token per pass, for the sequences with room for one.
    fn go_on(
        &mut self,
        scheduler: &Scheduler,
        rows: &[Scheduled],
        guessing: &mut [Guessing],
    ) -> Result<(), ForwardError> {
        for given in 1.. {
            let mut batch = StepBatch::default();
            let has_room = |one: &&mut Guessing| one.drafts.len() == given && one.room > given;
            let going_on: Vec<&mut Guessing> = guessing.iter_mut().filter(has_room).collect();
            for one in &going_on {
                let id = rows[one.row].id;
                let sequence = scheduler.sequence(id);
                let blocks = sequence.map_or(&[][..], |sequence| sequence.blocks());
                let blocks = numbers(blocks);
                let start = one.tokens + given - 1;
                let piece = Piece {
                    tokens: &one.drafts[given - 1..],
                    start,
                    blocks,
                    wanted: 1,
                };
                batch.push(scheduler.pool().block_size(), piece);
                self.computed.insert(id, start + 1);
            }
            if going_on.is_empty() {
                break;
            }
            self.compute(batch, going_on)?;
        }
        Ok(())
    }

    /// Computes a batch with one wanted row for each of `guessing`, and appends the best tokens to their drafts.
    fn compute(
        &mut self,
        mut batch: StepBatch,
        guessing: Vec<&mut Guessing>,
    ) -> Result<(), ForwardError> {
        if batch.tokens.is_empty() {
            return Ok(());
        }
        // The large model may have padding ids that this one lacks. They are clamped: a draft may be wrong.
        let last = u32::try_from(self.vocab_size.saturating_sub(1)).unwrap_or(u32::MAX);
        batch
            .tokens
            .iter_mut()
            .for_each(|token| *token = (*token).min(last));
        let logits = contained(|| self.forward.forward(&batch))?;
        if guessing.is_empty() {
            return Ok(());
        }
        let fetched = fetch(&logits, &vec![true; guessing.len()])?;
        for (one, fetched) in guessing.into_iter().zip(fetched) {
            match fetched {
                Fetched::Best(token) if index(token) < self.target_vocab_size => {
                    one.drafts.push(token);
                }
                // Not a token of the large model, or not a number.
                Fetched::Best(_) | Fetched::Logits(_) | Fetched::NotFinite => {}
            }
        }
        Ok(())
    }
}

fn index(token: TokenId) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX)
}
