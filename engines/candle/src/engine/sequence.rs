//! [`Active`]: the engine thread's state of a request beside its sequence in the scheduler; and [`Choosing`], a request
//! that samples its next tokens in this step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use genset_backend_common::kv::BlockHash;
use genset_backend_common::output::{Finish, PredictionTokens, TokenChunk};
use genset_backend_common::{EngineError, StopConditions, TokenId};
use genset_sampling::guided::Guide;
use genset_sampling::{Sampled, Sampler, TokenMask};
use genset_scheduler::{FreedSequences, Outcome, ReceivingPlace, SequenceId};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::adapters::LoadedAdapter;
use super::forward::Fetched;
use super::mailbox::Outlet;
use super::transfer::PrefillLeg;

/// A request in the engine.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) outlet: Outlet,
    pub(crate) sampler: Sampler,
    pub(crate) guide: Option<Guide>,
    /// Its guide's permit, until it samples its first token.
    pub(crate) place_of_guide: Option<OwnedSemaphorePermit>,
    pub(crate) stop: StopConditions,
    /// At least 1; prompt and answer together fit the context.
    pub(crate) max_tokens: u32,
    /// Set on a prefill instance.
    pub(crate) prefill: Option<Box<PrefillLeg>>,
    /// The counts of its drafts.
    pub(crate) predictions: PredictionTokens,
}

impl Active {
    /// The number of drafts it can use: each step samples one token more than its drafts.
    pub(crate) fn most_drafts(&self) -> usize {
        // On a prefill instance the first token is the last.
        let left = match &self.prefill {
            Some(_) => 1,
            None => self.max_tokens.saturating_sub(self.sampler.generated()),
        };
        usize::try_from(left.saturating_sub(1)).unwrap_or(usize::MAX)
    }

    /// Records the next token. Returns the outcome of the sequence, the tokens to stream, and how it ended, if it did.
    fn accept(&mut self, sampled: Sampled) -> Result<Next, EngineError> {
        let token = sampled.token;
        let guide = self.guide.as_mut();
        let (chunk, end) =
            (self.sampler).accept_sampled(sampled, guide, &self.stop, self.max_tokens)?;
        Ok(match end {
            Some(finish) => Next::end(chunk, finish),
            None => Next {
                outcome: Outcome::Sampled(token),
                chunk,
                end: None,
                accepted: 0,
            },
        })
    }
}

/// The consequences of the sampled tokens.
#[derive(Debug)]
pub(crate) struct Next {
    pub(crate) outcome: Outcome,
    pub(crate) chunk: TokenChunk,
    pub(crate) end: Option<Finish>,
    /// The number of drafts that were sampled before the token of `outcome`.
    pub(crate) accepted: usize,
}

impl Next {
    fn end(last: TokenChunk, finish: Finish) -> Self {
        Self {
            outcome: Outcome::Finished,
            chunk: last,
            end: Some(finish),
            accepted: 0,
        }
    }

    /// Appends the result of another sample.
    fn followed_by(mut self, next: Self) -> Self {
        self.chunk.token_ids.extend(next.chunk.token_ids);
        self.chunk.logprobs.extend(next.chunk.logprobs);
        Self {
            chunk: self.chunk,
            accepted: self.accepted + 1,
            ..next
        }
    }
}

/// Why no token was sampled.
#[derive(Debug)]
pub(crate) enum Unchosen {
    /// The logits are invalid or may be, and the sequence's KV blocks may be the cause.
    Logits(EngineError),
    /// The guide failed.
    Guide(EngineError),
}

/// A request that samples its next token in the step under way, and one more after each accepted draft.
#[derive(Debug)]
pub(crate) struct Choosing {
    pub(crate) id: SequenceId,
    pub(crate) active: Box<Active>,
    drafts: Vec<TokenId>,
    /// The counts of its drafts.
    pub(crate) predictions: PredictionTokens,
    mask: Option<Result<TokenMask, EngineError>>,
}

impl Choosing {
    pub(crate) fn new(id: SequenceId, active: Box<Active>, drafts: Vec<TokenId>) -> Self {
        Self {
            id,
            active,
            drafts,
            predictions: PredictionTokens::default(),
            mask: None,
        }
    }

    /// The number of its rows of logits.
    pub(crate) fn places(&self) -> usize {
        1 + self.drafts.len()
    }

    pub(crate) fn is_guided(&self) -> bool {
        self.active.guide.is_some()
    }

    /// Whether only the best logit is needed.
    pub(crate) fn is_best(&self) -> bool {
        !self.is_guided() && self.active.sampler.is_argmax()
    }

    /// Computes which tokens may come next. It runs in parallel with the forward pass.
    pub(crate) fn compute_mask(&mut self) {
        let guide = self.active.guide.as_mut();
        self.mask = guide.map(|guide| guide.mask().map_err(EngineError::from));
    }

    /// On a prefill instance, ends the request with its first token and holds the blocks, unless it has ended or its reader left.
    pub(crate) fn end_prefill(&mut self, next: Next, freed: &FreedSequences) -> Next {
        // Without a receiver, nobody would learn of the blocks, and they would be held until the lease ends.
        let goes_on = next.end.is_none() && !self.active.outlet.is_closed();
        let leg = self.active.prefill.take().filter(|_| goes_on);
        let Some(leg) = leg else {
            return next;
        };
        let Some(transfer) = leg.transfers.hold(&leg, freed.holding(self.id)) else {
            return next;
        };
        Next {
            outcome: Outcome::Held,
            end: Some(Finish::length().with_transfer(transfer)),
            ..next
        }
    }

    /// Samples the token, and continues with the next one as long as the draft was right. `logits` has an entry per place. A
    /// failure here, including a panic, fails only this request.
    pub(crate) fn choose(&mut self, logits: Vec<Fetched>) -> Result<Next, Unchosen> {
        let chosen = catch_unwind(AssertUnwindSafe(|| self.choose_all(logits)));
        let next = chosen.unwrap_or_else(|_| {
            // Guides catch their own panics.
            Err(Unchosen::Logits(EngineError::internal(
                "choosing a token panicked; please report it",
            )))
        })?;
        self.count_predictions(&next.chunk);
        Ok(next)
    }

    fn choose_all(&mut self, logits: Vec<Fetched>) -> Result<Next, Unchosen> {
        let mut logits = logits.into_iter();
        let none = || {
            Unchosen::Logits(EngineError::internal(
                "the model gave no logits for a sequence",
            ))
        };
        let mut next = self.choose_one(logits.next().ok_or_else(none)?)?;
        for (place, logits) in logits.enumerate() {
            let is_drafted =
                matches!(next.outcome, Outcome::Sampled(token) if token == self.drafts[place]);
            if !is_drafted {
                break;
            }
            self.compute_mask();
            match self.choose_one(logits) {
                Ok(after) => next = next.followed_by(after),
                // The tokens so far are streamed. The next step samples here again, and then fails alone.
                Err(_) => break,
            }
        }
        Ok(next)
    }

    fn choose_one(&mut self, logits: Fetched) -> Result<Next, Unchosen> {
        if self.active.guide.as_ref().is_some_and(Guide::is_finished) {
            // The tokens that the request came with are its whole text.
            return Ok(Next::end(TokenChunk::default(), Finish::stop()));
        }
        let mask = self.mask.take().transpose().map_err(Unchosen::Guide)?;
        let sampled = self.sample(logits, mask.as_ref());
        let sampled = sampled.map_err(Unchosen::Logits)?;
        self.active.accept(sampled).map_err(Unchosen::Guide)
    }

    /// Counts drafts that are part of the answer as accepted.
    fn count_predictions(&mut self, chosen: &TokenChunk) {
        let pairs = self.drafts.iter().zip(&chosen.token_ids);
        let accepted = pairs.take_while(|(draft, token)| draft == token).count();
        let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        self.predictions = PredictionTokens {
            accepted: count(accepted),
            rejected: count(self.drafts.len() - accepted),
        };
        self.active.predictions.add(self.predictions);
    }

    fn sample(
        &mut self,
        logits: Fetched,
        mask: Option<&TokenMask>,
    ) -> Result<Sampled, EngineError> {
        match logits {
            Fetched::Logits(mut logits) => Ok(self.active.sampler.sample(&mut logits, mask)?),
            Fetched::Best(token) => Ok(Sampled {
                token,
                logprob: None,
            }),
            Fetched::NotFinite => Err(EngineError::internal(
                "sampling failed: the model's logits are not finite",
            )),
        }
    }
}

/// A request on its way to the engine thread.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) priority: i32,
    /// The predecessor of its first KV block.
    pub(crate) root: Option<BlockHash>,
    pub(crate) adapter: Option<Arc<LoadedAdapter>>,
    /// Set on a decode instance that receives the KV blocks: gets the place where they go.
    pub(crate) receives: Option<oneshot::Sender<ReceivingPlace>>,
    pub(crate) active: Box<Active>,
}

#[cfg(test)]
mod tests {
    use genset_backend_common::{ErrorKind, GenerateRequest, GuidedDecoding, RequestContext};
    use genset_sampling::guided::GuideFactory;

    use super::super::mailbox::mailbox;
    use super::*;

    /// A guide for a model with the tokens "a" and "b" and no known end.
    fn guide(text: &str) -> Guide {
        let tokenizer = br#"{"decoder": {"type": "ByteLevel"}, "added_tokens": [],
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}"#;
        let guides = GuideFactory::try_new(tokenizer, 2, &[]).unwrap();
        let guided = GuidedDecoding::Choice(vec![text.into()]);
        guides.compile(&guided).unwrap()
    }

    fn choosing(guide: Option<Guide>) -> Choosing {
        let request = GenerateRequest::from_tokens("m", vec![0]);
        let (outlet, _) = mailbox(RequestContext::new("r"), Box::new(|| {}));
        let active = Active {
            outlet,
            sampler: Sampler::try_new(&request, 2, 0).unwrap(),
            guide,
            place_of_guide: None,
            stop: request.stop,
            max_tokens: 9,
            prefill: None,
            predictions: PredictionTokens::default(),
        };
        let mut choosing = Choosing::new(SequenceId(1), Box::new(active), Vec::new());
        choosing.compute_mask();
        choosing
    }

    /// Only bad logits cast doubt on the prefix cache; a failed guide does not.
    #[test]
    fn a_guide_that_fails_is_told_from_logits_that_are_no_good() {
        let chosen = choosing(None).choose(vec![Fetched::Logits(vec![f32::NAN, 0.0])]);
        assert!(matches!(chosen, Err(Unchosen::Logits(_))), "{chosen:?}");
        let mut failed = guide("ab");
        failed.accept(1).unwrap_err();
        let chosen = choosing(Some(failed)).choose(vec![Fetched::Logits(vec![1.0, 0.0])]);
        let Err(Unchosen::Guide(error)) = chosen else {
            panic!("{chosen:?}")
        };
        assert_eq!(error.kind(), ErrorKind::Internal);
    }

    /// The model may have no known end token, so that no token would be allowed.
    #[test]
    fn a_text_that_is_complete_already_ends_as_it_would_have() {
        let mut complete = guide("ab");
        complete.accept(0).unwrap();
        complete.accept(1).unwrap();
        let chosen = choosing(Some(complete)).choose(vec![Fetched::Logits(vec![1.0, 0.0])]);
        let next = chosen.unwrap();
        assert_eq!(next.outcome, Outcome::Finished);
        assert!(next.end.is_some() && next.chunk.token_ids.is_empty());
    }
}
