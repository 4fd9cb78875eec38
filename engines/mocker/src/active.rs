//! [`Active`]: a request in the mocker; [`Arrival`]: a request on its way to a rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use genset_backend_common::output::{Finish, TokenSink};
use genset_backend_common::{StopConditions, TokenId};
use genset_scheduler::{NewSequence, Outcome, ReceivingPlace};
use tokio::sync::oneshot;

use crate::tokens::Answer;
use crate::transfer::PrefillLeg;

/// A request for a rank. The rank assigns the sequence's id.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) sequence: NewSequence,
    /// Set on a decode instance that receives the KV blocks: gets the place where they go.
    pub(crate) receives: Option<oneshot::Sender<ReceivingPlace>>,
    pub(crate) active: Active,
}

/// A rank's state of a request, beside its sequence in the scheduler.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) sink: TokenSink,
    pub(crate) answer: Answer,
    pub(crate) stop: StopConditions,
    /// Tokens that this instance generated.
    pub(crate) generated: u32,
    /// At least 1; prompt and answer together fit the context.
    pub(crate) max_tokens: u32,
    /// Whether its reader is behind, as last reported to the scheduler.
    pub(crate) is_paused: bool,
    /// Set on a prefill instance.
    pub(crate) prefill: Option<Box<PrefillLeg>>,
    /// Whether the KV blocks of its prompt came from a prefill instance.
    pub(crate) is_received: bool,
    /// Its count among the requests of its rank.
    pub(crate) _place: Place,
}

/// The consequences of a sampled token.
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

/// The number of requests of one rank, counted from the moment the rank was chosen.
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

/// One counted request. Dropping it ends the count.
#[derive(Debug)]
pub(crate) struct Place(InFlight);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
