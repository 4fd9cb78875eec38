//! [`Active`]: a request in the mocker; [`Arrival`], one on its way into it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use genset_backend_common::output::{Finish, TokenSink};
use genset_backend_common::{StopConditions, TokenId};
use genset_scheduler::{NewSequence, Outcome, ReceivingPlace};
use tokio::sync::oneshot;

use crate::tokens::Answer;
use crate::transfer::PrefillLeg;

/// A request that comes to a rank. The rank gives the sequence its id.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) sequence: NewSequence,
    /// On a decode instance whose blocks come from elsewhere: told where they go.
    pub(crate) receives: Option<oneshot::Sender<ReceivingPlace>>,
    pub(crate) active: Active,
}

/// What a rank keeps of a request beside its place in the scheduler.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) sink: TokenSink,
    pub(crate) answer: Answer,
    pub(crate) stop: StopConditions,
    /// Tokens that this instance generated.
    pub(crate) generated: u32,
    /// At least 1; prompt and answer together fit the context.
    pub(crate) max_tokens: u32,
    /// Whether its reader is behind, as the scheduler was told last.
    pub(crate) is_paused: bool,
    /// On a prefill instance.
    pub(crate) prefill: Option<Box<PrefillLeg>>,
    /// Its place among the requests of its rank.
    pub(crate) _place: Place,
}

/// What a chosen token leads to.
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) token: TokenId,
    pub(crate) outcome: Outcome,
    pub(crate) end: Option<Finish>,
}

impl Active {
    /// Chooses the next token.
    pub(crate) fn next(&mut self) -> Next {
        let token = self.answer.peek();
        let end = if self.stop.is_stop(token, self.generated) {
            Some(Finish::stop_token(token))
        } else {
            self.answer.advance();
            self.generated += 1;
            let is_last = self.generated >= self.max_tokens;
            is_last.then(|| Finish::length().with_last(token))
        };
        let outcome = match end {
            Some(_) => Outcome::Finished,
            None => Outcome::Sampled(token),
        };
        Next {
            token,
            outcome,
            end,
        }
    }
}

/// The requests of one rank, counted from the moment it was chosen.
#[derive(Debug, Clone, Default)]
pub(crate) struct InFlight(Arc<AtomicUsize>);

impl InFlight {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn enter(&self) -> Place {
        self.0.fetch_add(1, Ordering::Relaxed);
        Place(self.clone())
    }
}

/// Given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Place(InFlight);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
