//! [`Speculation`]: drafts the next tokens, so that one forward pass of the model verifies several.
//!
//! A step computes a sequence's drafts behind its last token, like a chunk of a prompt, and wants the logits at each place.
//! The sequence's own sampler then samples place after place, as long as each sampled token equals the draft. So the tokens
//! and the draws are the same as without speculation: drafts never change an answer, greedy or sampled, only its time.
//! `core` calls it between the plan and the forward pass.

pub(super) mod draft_model;
pub(super) mod ngram;

use genset_backend_common::TokenId;
use genset_scheduler::{Scheduled, Scheduler, SequenceId};

use self::draft_model::DraftModel;

/// Drafts the next tokens.
pub(crate) struct Speculation {
    /// The most drafts per sequence and step, at least 1.
    pub(crate) num_tokens: usize,
    pub(crate) method: Method,
}

/// The source of drafts.
pub(crate) enum Method {
    /// The sequence's own tokens: what followed the same tokens before.
    Ngram,
    /// A draft model.
    DraftModel(Box<DraftModel>),
}

impl Speculation {
    /// Puts drafts behind the rows of a planned step. `most` returns how many a sequence can use.
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
