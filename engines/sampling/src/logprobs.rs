//! Log probabilities, of the raw logits.

use genset_backend_common::TokenId;
use genset_backend_common::output::{TokenLogprob, TopLogprob};

use crate::error::SampleError;
use crate::math::{best, sum_exp};
use crate::select::{Key, top_k};

/// The reported value for a token of (almost) no probability, as OpenAI's: JSON has no minus infinity.
pub(crate) const MIN_LOGPROB: f32 = -9999.0;

pub(crate) fn logit_of(logits: &[f32], token: TokenId) -> f32 {
    let place = usize::try_from(token).unwrap_or(usize::MAX);
    logits.get(place).copied().unwrap_or(f32::NEG_INFINITY)
}

/// The log probabilities of one row, kept while sampling changes the logits.
#[derive(Debug)]
pub(crate) struct Row {
    /// Logarithm of the softmax's denominator.
    norm: f32,
    top: Vec<TopLogprob>,
}

impl Row {
    pub(crate) fn try_new(logits: &[f32], top: u32) -> Result<Self, SampleError> {
        let best = best(logits)?.logit;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "between 0 and the logarithm of the vocabulary's size"
        )]
        let excess = sum_exp(logits, best, 1.0).ln() as f32;
        let mut row = Self {
            norm: best + excess,
            top: Vec::new(),
        };
        let count = usize::try_from(top).unwrap_or(usize::MAX).min(logits.len());
        if count > 0 {
            row.top = ranked(logits, count)
                .map(|key| row.candidate(key))
                .collect();
        }
        Ok(row)
    }

    fn candidate(&self, (token_id, logit): (TokenId, f32)) -> TopLogprob {
        TopLogprob {
            token_id,
            logprob: self.logprob(logit),
        }
    }

    fn logprob(&self, logit: f32) -> f32 {
        (logit - self.norm).clamp(MIN_LOGPROB, 0.0)
    }

    pub(crate) fn of(self, logit: f32) -> TokenLogprob {
        TokenLogprob {
            logprob: self.logprob(logit),
            top: self.top,
        }
    }
}

/// The `count` best tokens. Impossible ones fill up the rest, lowest id first.
fn ranked(logits: &[f32], count: usize) -> impl Iterator<Item = (TokenId, f32)> {
    let mut keys = Vec::new();
    top_k(logits, count, f32::NEG_INFINITY, &mut keys);
    keys.sort_unstable_by(|a, b| b.cmp(a));
    let impossible = (0..)
        .zip(logits)
        .filter(|(_, logit)| **logit == f32::NEG_INFINITY)
        .map(|(token, logit)| Key::new(token, *logit));
    let missing: Vec<Key> = impossible.take(count - keys.len()).collect();
    keys.into_iter()
        .chain(missing)
        .map(|key| (key.token(), key.logit()))
}
