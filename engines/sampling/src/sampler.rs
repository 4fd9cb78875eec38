//! [`Sampler`]: samples the tokens of one request from logits.

use genset_backend_common::config::SamplingOption;
use genset_backend_common::output::{Finish, TokenChunk, TokenLogprob};
use genset_backend_common::{EngineError, GenerateRequest, RequestField, StopConditions, TokenId};

use crate::draw::uniform;
use crate::error::SampleError;
use crate::guided::{Guide, GuideError};
use crate::logprobs::{self, Row};
use crate::mask::TokenMask;
use crate::math::{self, Best};
use crate::penalties::Adjustments;
use crate::select::{self, Key, Weigh};

/// A temperature below this, including 0, is greedy: dividing by it would overflow.
const GREEDY_BELOW: f32 = 1e-5;

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: TokenId,
    /// If the request asks for it: the log probabilities of the token and of the most probable ones.
    pub logprob: Option<TokenLogprob>,
}

/// Chooses one request's tokens.
///
/// # Contract
/// - The token is a function of the logits, the mask, the request and the tokens accepted so far.
/// - The draw at a position depends on the seed and the position alone. Positions count `resumed_tokens`, so a request that
///   migrates continues with the draws it would have had.
/// - `presence_penalty` and `frequency_penalty` count generated tokens, including resumed ones; `repetition_penalty` also
///   counts the prompt. `min_tokens` counts only this instance's tokens, as the request's documentation says.
/// - A preempted request keeps its sampler: no token is accepted twice.
/// - Stop and end-of-sequence tokens are banned until `min_tokens` tokens are generated. With `ignore_eos` the latter are
///   normal tokens, except those that [end a guide](Self::with_ends). A mask wins over the ban: if it leaves no other
///   token, the text is complete or forced, and they are allowed.
#[derive(Debug, Clone)]
pub struct Sampler {
    vocab_size: usize,
    temperature: f32,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f32>,
    adjustments: Adjustments,
    banned: Vec<TokenId>,
    min_tokens: u32,
    generated: u32,
    resumed: u32,
    seed: u64,
    top_logprobs: Option<u32>,
    /// Candidates. Reused from step to step, like `raw`.
    keys: Vec<Key>,
    /// The row before changes, if log probabilities are requested.
    raw: Vec<f32>,
}

impl Sampler {
    /// The options that it supports, for the engine to declare.
    pub const OPTIONS: [SamplingOption; 9] = SamplingOption::ALL;

    /// Creates a sampler for `request`. `vocab_size` is the length of every row of logits. `fallback_seed` is the seed of a
    /// request without one; choose it at random.
    ///
    /// # Errors
    /// `InvalidArgument` for an option out of its range, a bias for a token outside the vocabulary, or a `min_tokens` that leaves
    /// no token because each one ends the answer; `Unsupported` for a request without tokens.
    pub fn try_new(
        request: &GenerateRequest,
        vocab_size: usize,
        fallback_seed: u64,
    ) -> Result<Self, EngineError> {
        let options = &request.sampling;
        options.validate()?;
        let is_outside =
            |token: &&TokenId| usize::try_from(**token).is_ok_and(|id| id >= vocab_size);
        if let Some(token) = options.logit_bias.keys().find(is_outside) {
            let problem = format!("has token {token}, and the vocabulary has {vocab_size} tokens");
            return Err(EngineError::invalid_argument(
                RequestField::LogitBias,
                problem,
            ));
        }
        let banned = banned(&request.stop);
        let known = banned
            .iter()
            .filter(|token| usize::try_from(**token).is_ok_and(|id| id < vocab_size));
        if request.stop.min_tokens > 0 && known.count() >= vocab_size {
            return Err(EngineError::invalid_argument(
                RequestField::StopTokenIds,
                "leaves no token before min_tokens: with the end-of-sequence tokens it names the whole vocabulary",
            ));
        }
        let (prompt, output) = prompt_and_resumed(request)?;
        let temperature = options.temperature.unwrap_or(0.0);
        let top_k = options.top_k.and_then(|k| usize::try_from(k).ok());
        Ok(Self {
            vocab_size,
            temperature: if temperature < GREEDY_BELOW {
                0.0
            } else {
                temperature
            },
            top_k: top_k.filter(|k| *k < vocab_size),
            top_p: options.top_p.filter(|p| *p < 1.0).map(f64::from),
            min_p: options.min_p.filter(|p| *p > 0.0),
            adjustments: Adjustments::new(options, prompt, output),
            banned,
            min_tokens: request.stop.min_tokens,
            generated: 0,
            resumed: request.resumed_tokens,
            seed: options.seed.unwrap_or(fallback_seed),
            top_logprobs: request.output.logprobs,
            keys: Vec::new(),
            raw: Vec::new(),
        })
    }

    /// Also bans `ends` until `min_tokens`, whatever the request's options: they end a guided sequence even with `ignore_eos`.
    /// A guide returns its own as [`Guide::ends`](crate::guided::Guide::ends).
    #[must_use]
    pub fn with_ends(mut self, ends: &[TokenId]) -> Self {
        self.banned.extend_from_slice(ends);
        self.banned.sort_unstable();
        self.banned.dedup();
        self
    }

    /// Whether the next token is the best logit, with no log probabilities wanted. An engine may then find it on its device and
    /// only [`accept`](Self::accept) it here. A mask, if there is one, still applies.
    #[must_use]
    pub fn is_argmax(&self) -> bool {
        self.temperature == 0.0
            && self.adjustments.is_none()
            && self.top_logprobs.is_none()
            && !self.is_banning()
    }

    /// The number of accepted tokens.
    #[must_use]
    pub fn generated(&self) -> u32 {
        self.generated
    }

    /// Chooses the next token. It changes only scratch space, so a second call returns the same token.
    ///
    /// `logits: [vocab]`, raw; the call overwrites them. `mask` comes from the request's guide.
    ///
    /// # Errors
    /// [`SampleError`]: the logits are invalid, or no token is left to choose from.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        mask: Option<&TokenMask>,
    ) -> Result<Sampled, SampleError> {
        self.check_lengths(logits, mask)?;
        let Some(top) = self.top_logprobs else {
            let token = self.choose(logits, mask)?;
            return Ok(Sampled {
                token,
                logprob: None,
            });
        };
        let row = Row::try_new(logits, top)?;
        // By the time the token is chosen, its raw logit may be overwritten.
        self.raw.clear();
        self.raw.extend_from_slice(logits);
        let token = self.choose(logits, mask)?;
        let logprob = Some(row.of(logprobs::logit_of(&self.raw, token)));
        Ok(Sampled { token, logprob })
    }

    /// Records that `token` is the next one of the sequence.
    pub fn accept(&mut self, token: TokenId) {
        self.generated = self.generated.saturating_add(1);
        self.adjustments.record(token);
    }

    /// Records a sampled token here and in the request's guide. Returns the tokens to send, which are none for a stop token, and
    /// how the answer ends, if it does. An answer has at most `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`Guide::accept`].
    pub fn accept_sampled(
        &mut self,
        sampled: Sampled,
        guide: Option<&mut Guide>,
        stop: &StopConditions,
        max_tokens: u32,
    ) -> Result<(TokenChunk, Option<Finish>), GuideError> {
        let token = sampled.token;
        let is_end = guide.as_ref().is_some_and(|guide| guide.is_end(token));
        if is_end || stop.is_stop(token, self.generated) {
            return Ok((TokenChunk::default(), Some(Finish::stop_token(token))));
        }
        self.accept(token);
        let mut chunk = TokenChunk::from(token);
        chunk.logprobs.extend(sampled.logprob);
        if let Some(guide) = guide {
            guide.accept(token)?;
            if guide.is_finished() {
                return Ok((chunk, Some(Finish::stop())));
            }
        }
        let is_full = self.generated >= max_tokens;
        Ok((chunk, is_full.then(Finish::length)))
    }

    fn check_lengths(&self, logits: &[f32], mask: Option<&TokenMask>) -> Result<(), SampleError> {
        let expected = self.vocab_size;
        if logits.len() != expected {
            return Err(SampleError::WrongLength {
                expected,
                found: logits.len(),
            });
        }
        match mask {
            Some(mask) if mask.len() != expected => Err(SampleError::WrongMaskLength {
                expected,
                found: mask.len(),
            }),
            _ => Ok(()),
        }
    }

    fn is_banning(&self) -> bool {
        self.generated < self.min_tokens && !self.banned.is_empty()
    }

    fn choose(
        &mut self,
        logits: &mut [f32],
        mask: Option<&TokenMask>,
    ) -> Result<TokenId, SampleError> {
        // Checked before the changes too, which could hide invalid logits.
        let mut best = math::best(logits)?;
        if mask.is_some() || self.is_banning() || !self.adjustments.is_none() {
            self.change(logits, mask);
            best = math::best(logits)?;
        }
        if self.temperature == 0.0 || self.top_k == Some(1) {
            return Ok(best.token);
        }
        Ok(self.draw(logits, best))
    }

    /// Steps 2 to 4 of the crate's order.
    fn change(&self, logits: &mut [f32], mask: Option<&TokenMask>) {
        if let Some(mask) = mask {
            mask.apply(logits);
        }
        if self.is_banning() && !mask.is_some_and(|mask| self.bans_all_of(mask)) {
            for token in &self.banned {
                let place = usize::try_from(*token).unwrap_or(usize::MAX);
                if let Some(logit) = logits.get_mut(place) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        self.adjustments.apply(logits);
    }

    fn bans_all_of(&self, mask: &TokenMask) -> bool {
        let banned = self.banned.iter().filter(|token| mask.allows(**token));
        banned.count() == mask.count()
    }

    /// Step 6.
    fn draw(&mut self, logits: &mut [f32], best: Best) -> TokenId {
        let position = u64::from(self.resumed) + u64::from(self.generated);
        let draw = uniform(self.seed, position);
        if self.top_k.is_none() && self.top_p.is_none() && self.min_p.is_none() {
            let total = math::into_weights(logits, best.logit, self.temperature);
            return math::crossing(logits, draw * total).unwrap_or(best.token);
        }
        let weigh = Weigh {
            best: best.logit,
            temperature: self.temperature,
        };
        let mut total = self.gather(logits, weigh);
        if let Some(top_p) = self.top_p {
            let kept = weigh.reaching(&mut self.keys, top_p * total);
            self.keys.truncate(kept);
            total = weigh.sum(&self.keys);
        }
        let drawn = weigh.passing(&mut self.keys, draw * total);
        self.keys.get(drawn).map_or(best.token, |key| key.token())
    }

    /// Puts the candidates that `min_p` and `top_k` keep into `keys`. Returns the weight of all that they keep. If only `top_p`
    /// will choose, candidates that it cannot reach are omitted from `keys`, but not from the weight.
    fn gather(&mut self, logits: &[f32], weigh: Weigh) -> f64 {
        // p >= min_p * p_best, as a bound on logits.
        let least = weigh.least(self.min_p.unwrap_or(0.0));
        if let Some(k) = self.top_k {
            select::top_k(logits, k, least, &mut self.keys);
        } else if let (Some(top_p), None) = (self.top_p, self.min_p) {
            let total = math::sum_exp(logits, weigh.best, weigh.temperature);
            let least = weigh.least(nucleus_floor(top_p, total, logits.len()));
            select::at_least(logits, least, &mut self.keys);
            return total;
        } else {
            select::at_least(logits, least, &mut self.keys);
        }
        weigh.sum(&self.keys)
    }
}

/// A weight below which no token is in the nucleus: the tokens below it together have less than `1 - top_p` of `total`.
/// The result is half of that bound, so that rounding does not matter.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a bound, made loose by half"
)]
fn nucleus_floor(top_p: f64, total: f64, vocab_size: usize) -> f32 {
    (0.5 * (1.0 - top_p) * total / vocab_size as f64) as f32
}

/// The tokens of a request: the client's, and those that another instance generated.
///
/// # Errors
/// `Unsupported` for a request without tokens.
pub(crate) fn prompt_and_resumed(
    request: &GenerateRequest,
) -> Result<(&[TokenId], &[TokenId]), EngineError> {
    let tokens = request.tokens()?;
    let resumed = usize::try_from(request.resumed_tokens).unwrap_or(usize::MAX);
    Ok(tokens.split_at(tokens.len().saturating_sub(resumed)))
}

fn banned(stop: &StopConditions) -> Vec<TokenId> {
    let eos = if stop.ignore_eos {
        &[][..]
    } else {
        &stop.eos_token_ids
    };
    let mut banned = [&stop.stop_token_ids, eos].concat();
    banned.sort_unstable();
    banned.dedup();
    banned
}

#[cfg(test)]
mod tests;
