//! [`DraftModel`]: a smaller model that guesses greedily what the large one will choose.
//!
//! Its KV cache has the blocks of the large model's, so it needs no scheduler of its own: a sequence's keys and values are in the
//! same slots of both, and blocks that are reused or shared are so for both. It computes every row of every step, prompts too,
//! and then one token a pass for the sequences that have room for more guesses.

use std::collections::HashMap;

use genset_backend_common::TokenId;
use genset_scheduler::{Scheduled, Scheduler, SequenceId};

use crate::engine::batch::{Piece, push};
use crate::engine::forward::{Fetched, Forward, ForwardError, contained, fetch};
use crate::model::StepBatch;

/// A smaller model with its KV cache.
pub(crate) struct DraftModel {
    forward: Box<dyn Forward>,
    vocab_size: usize,
    /// Tokens of the large model, which are all that may be guessed.
    target_vocab_size: usize,
    context_length: usize,
    /// Tokens of each sequence whose keys and values it has, where it computed guesses: of those that were all accepted it
    /// lacks the last.
    computed: HashMap<SequenceId, usize>,
    is_broken: bool,
}

/// A sequence that is guessed for.
struct Guessing {
    /// Its place among the step's rows.
    row: usize,
    /// Its tokens.
    tokens: usize,
    room: usize,
    drafts: Vec<TokenId>,
}

impl DraftModel {
    /// `forward` has as many KV blocks as the large model, of the same size.
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

    /// Guesses for each of `rows`, at most as many as `rooms` says. A model that fails guesses nothing from then on.
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
            // Of a sequence that is longer than its own context it knows no more.
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
                blocks: sequence.blocks(),
                wanted: usize::from(room > 0),
            };
            push(&mut batch, scheduler.pool().block_size(), &piece);
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

    /// One more guess a pass, for those that have room for one.
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
                let start = one.tokens + given - 1;
                let piece = Piece {
                    tokens: &one.drafts[given - 1..],
                    start,
                    blocks,
                    wanted: 1,
                };
                push(&mut batch, scheduler.pool().block_size(), &piece);
                self.computed.insert(id, start + 1);
            }
            if going_on.is_empty() {
                break;
            }
            self.compute(batch, going_on)?;
        }
        Ok(())
    }

    /// Computes a batch with a wanted row for each of `guessing`, and adds the best tokens to their guesses.
    fn compute(
        &mut self,
        mut batch: StepBatch,
        guessing: Vec<&mut Guessing>,
    ) -> Result<(), ForwardError> {
        if batch.tokens.is_empty() {
            return Ok(());
        }
        // Padding that the large model has and this one lacks; what is made of it is a guess as good as another.
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
                // No token of the large model, or no number.
                Fetched::Best(_) | Fetched::Logits(_) | Fetched::NotFinite => {}
            }
        }
        Ok(())
    }
}

fn index(token: TokenId) -> usize {
    usize::try_from(token).unwrap_or(usize::MAX)
}
