//! [`Speculation`]: guesses the tokens that come next, so that one pass of the model judges several.
//!
//! A step computes a sequence's guesses behind its last token, as if they were a chunk of a prompt, and wants the logits at each
//! place. The sequence's own sampler then chooses place after place, and goes on to the next as long as it chose what was
//! guessed. So the tokens are those that it would have chosen one at a time, with the same draws: nothing that a guess does
//! changes an answer, greedy or sampled, but its time. `core` calls it between plan and forward pass.

pub(super) mod draft_model;
pub(super) mod ngram;

use genset_backend_common::TokenId;
use genset_scheduler::{Scheduled, Scheduler, SequenceId};

use self::draft_model::DraftModel;

/// Guesses the tokens that come next.
pub(crate) struct Speculation {
    /// The most guesses for a sequence and step, at least 1.
    pub(crate) num_tokens: usize,
    pub(crate) method: Method,
}

/// Where guesses come from.
pub(crate) enum Method {
    /// The sequence's own tokens: what followed the last time.
    Ngram,
    /// A smaller model.
    DraftModel(Box<DraftModel>),
}

impl Speculation {
    /// Puts guesses behind the rows of a planned step. `most` says how many a sequence has use for.
    pub(super) fn speculate(
        &mut self,
        scheduler: &mut Scheduler,
        rows: &mut [Scheduled],
        most: impl Fn(SequenceId) -> usize,
    ) {
        let wanted = |row: &Scheduled| {
            let most = if row.wants_token { most(row.id) } else { 0 };
            most.min(self.num_tokens)
        };
        match &mut self.method {
            Method::Ngram => {
                for row in rows {
                    let wanted = wanted(row);
                    look_up(scheduler, row, wanted);
                }
            }
            Method::DraftModel(model) => {
                let rooms = rows
                    .iter()
                    .map(|row| scheduler.reserve_drafts(row.id, wanted(row)))
                    .collect::<Vec<_>>();
                let guesses = model.guess(scheduler, rows, &rooms);
                for (row, drafts) in rows.iter_mut().zip(guesses) {
                    scheduler.set_drafts(row, drafts);
                }
            }
        }
    }
}

fn look_up(scheduler: &mut Scheduler, row: &mut Scheduled, wanted: usize) {
    let sequence = scheduler.sequence(row.id);
    let mut drafts: Vec<TokenId> = sequence
        .map(|sequence| ngram::guess(sequence.tokens(), wanted).to_vec())
        .unwrap_or_default();
    if drafts.is_empty() {
        return;
    }
    drafts.truncate(scheduler.reserve_drafts(row.id, drafts.len()));
    scheduler.set_drafts(row, drafts);
}
