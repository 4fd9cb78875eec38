//! Changes to single logits: `logit_bias` and the three penalties. They touch only the tokens that are named or were seen,
//! never the whole row.

use std::collections::HashMap;

use genset_backend_common::{SamplingOptions, TokenId};

/// The bias and penalties of one request, and the count of each token.
#[derive(Debug, Clone)]
pub(crate) struct Adjustments {
    bias: Vec<(TokenId, f32)>,
    presence: f32,
    frequency: f32,
    repetition: f32,
    /// Every token seen, once. Empty without penalties.
    seen: Vec<Seen>,
    /// Indices into `seen`.
    places: HashMap<TokenId, usize>,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    token: TokenId,
    /// Occurrences in the output; 0 for tokens that are only in the prompt.
    generated: u32,
}

impl Adjustments {
    /// `prompt` is the part before the output, and `resumed` is the output so far.
    pub(crate) fn new(options: &SamplingOptions, prompt: &[TokenId], resumed: &[TokenId]) -> Self {
        let mut adjustments = Self {
            bias: options
                .logit_bias
                .iter()
                .map(|(token, bias)| (*token, *bias))
                .collect(),
            presence: options.presence_penalty.unwrap_or(0.0),
            frequency: options.frequency_penalty.unwrap_or(0.0),
            repetition: options.repetition_penalty.unwrap_or(1.0),
            seen: Vec::new(),
            places: HashMap::new(),
        };
        if adjustments.repetition != 1.0 {
            prompt.iter().for_each(|token| adjustments.see(*token, 0));
        }
        resumed.iter().for_each(|token| adjustments.record(*token));
        adjustments
    }

    /// Whether no logit is ever changed.
    pub(crate) fn is_none(&self) -> bool {
        self.bias.is_empty() && !self.has_penalty()
    }

    fn has_penalty(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0 || self.repetition != 1.0
    }

    /// Records that `token` was generated.
    pub(crate) fn record(&mut self, token: TokenId) {
        if self.has_penalty() {
            self.see(token, 1);
        }
    }

    fn see(&mut self, token: TokenId, generated: u32) {
        let place = *self.places.entry(token).or_insert(self.seen.len());
        match self.seen.get_mut(place) {
            Some(seen) => seen.generated = seen.generated.saturating_add(generated),
            None => self.seen.push(Seen { token, generated }),
        }
    }

    /// Changes `logits: [vocab]` in place. Finite logits stay finite; minus infinity stays.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        for (token, bias) in &self.bias {
            change(logits, *token, |logit| logit + bias);
        }
        for seen in &self.seen {
            change(logits, seen.token, |logit| {
                self.penalized(logit, seen.generated)
            });
        }
    }

    fn penalized(&self, logit: f32, generated: u32) -> f32 {
        let logit = if logit > 0.0 {
            logit / self.repetition
        } else {
            logit * self.repetition
        };
        if generated == 0 {
            return logit;
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count above 2^24 exceeds every context"
        )]
        let times = generated as f32;
        logit - self.frequency * times - self.presence
    }
}

fn change(logits: &mut [f32], token: TokenId, to: impl Fn(f32) -> f32) {
    let place = usize::try_from(token).unwrap_or(usize::MAX);
    if let Some(logit) = logits.get_mut(place)
        && *logit != f32::NEG_INFINITY
    {
        *logit = to(*logit).clamp(f32::MIN, f32::MAX);
    }
}
