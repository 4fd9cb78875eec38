//! A language model whose logits are hashes of the context: it has no weights, but every sampling option has its effect.

use genset_backend_common::output::{TokenChunk, TokenLogprob, TopLogprob};
use genset_backend_common::{SamplingOptions, TokenId, random};

/// Token ids 0 to 255 are bytes; this one ends a text.
pub(super) const END: TokenId = 256;
/// Bytes and [`END`].
pub(super) const VOCAB_SIZE: u32 = 257;

/// Mixes `value` into `hash`.
pub(super) fn mix(hash: u64, value: u64) -> u64 {
    let step = value.wrapping_add(1).wrapping_mul(random::STEP);
    random::mix(hash.wrapping_add(step))
}

/// A number in `0.0..1.0`.
#[expect(clippy::cast_precision_loss, reason = "24 bits fit a f32")]
pub(super) fn unit(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1_u64 << 24) as f32
}

/// A sequence: its tokens, and how often each was generated.
pub(super) struct Sequence {
    hash: u64,
    is_seen: Vec<bool>,
    generated: Vec<u16>,
}

impl Sequence {
    /// The last `resumed` tokens of `prompt` count as generated.
    pub(super) fn new(prompt: &[TokenId], resumed: usize) -> Self {
        let size = usize::try_from(VOCAB_SIZE).unwrap_or_default();
        let mut sequence = Self {
            hash: 0,
            is_seen: vec![false; size],
            generated: vec![0; size],
        };
        for (place, token) in prompt.iter().enumerate() {
            sequence.push(*token, place + resumed >= prompt.len());
        }
        sequence
    }

    pub(super) fn push(&mut self, token: TokenId, is_generated: bool) {
        self.hash = mix(self.hash, u64::from(token));
        let place = usize::try_from(token).unwrap_or_default();
        if let Some(seen) = self.is_seen.get_mut(place) {
            *seen = true;
            self.generated[place] += u16::from(is_generated);
        }
    }

    /// logits: `[VOCAB_SIZE]` f32, after bias and penalties.
    pub(super) fn logits(&self, sampling: &SamplingOptions) -> Vec<f32> {
        let presence = sampling.presence_penalty.unwrap_or(0.0);
        let frequency = sampling.frequency_penalty.unwrap_or(0.0);
        let repetition = sampling.repetition_penalty.unwrap_or(1.0);
        let mut logits = Vec::new();
        for (token, (is_seen, times)) in (0..).zip(self.is_seen.iter().zip(&self.generated)) {
            let mut logit = unit(mix(self.hash, u64::from(token))) * 8.0 - 4.0;
            if *is_seen {
                logit = if logit > 0.0 {
                    logit / repetition
                } else {
                    logit * repetition
                };
            }
            if *times > 0 {
                logit -= presence + frequency * f32::from(*times);
            }
            logits.push(logit + sampling.logit_bias.get(&token).copied().unwrap_or(0.0));
        }
        logits
    }

    /// Changes `logits` by up to half of `by`, like another order of summation. Deterministic for a sequence.
    pub(super) fn add_noise(&self, logits: &mut [f32], by: f32) {
        for (token, logit) in (0..).zip(logits) {
            *logit += by * (unit(mix(!self.hash, token)) - 0.5);
        }
    }
}

/// Every token with its probability, best first. Masked tokens have the logit minus infinity.
fn ranked(logits: &[f32], temperature: f32) -> Vec<(TokenId, f32)> {
    let mut ranked: Vec<(TokenId, f32)> = (0..).zip(logits.iter().copied()).collect();
    // Equal ones in token order.
    ranked.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let best = ranked.first().map_or(0.0, |first| first.1);
    for (_, logit) in &mut ranked {
        *logit = ((*logit - best) / temperature).exp();
    }
    let sum: f32 = ranked.iter().map(|(_, weight)| weight).sum();
    for (_, weight) in &mut ranked {
        *weight /= sum;
    }
    ranked
}

/// The next token. `draw` is a number in `0.0..1.0`.
pub(super) fn choose(logits: &[f32], sampling: &SamplingOptions, draw: f32) -> TokenId {
    let temperature = sampling.temperature.unwrap_or(0.0);
    if temperature == 0.0 {
        let best = (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
        return best.map_or(END, |(token, _)| token);
    }
    let mut ranked = ranked(logits, temperature);
    let top_k = sampling.top_k.unwrap_or(VOCAB_SIZE);
    ranked.truncate(usize::try_from(top_k).unwrap_or(usize::MAX).max(1));
    let least = ranked[0].1 * sampling.min_p.unwrap_or(0.0);
    ranked.retain(|(_, probability)| *probability >= least && *probability > 0.0);
    let mut mass = 0.0;
    let top_p = sampling.top_p.unwrap_or(1.0);
    let kept = ranked.iter().take_while(|(_, probability)| {
        let is_kept = mass < top_p;
        mass += probability;
        is_kept
    });
    let kept = kept.count().max(1);
    ranked.truncate(kept);
    let mut left = draw
        * ranked
            .iter()
            .map(|(_, probability)| probability)
            .sum::<f32>();
    for (token, probability) in &ranked {
        left -= probability;
        if left <= 0.0 {
            return *token;
        }
    }
    ranked[0].0
}

/// A token as an item, with `top` log probabilities if requested.
pub(super) fn chunk(token: TokenId, logits: &[f32], top: Option<u32>) -> TokenChunk {
    let mut chunk = TokenChunk::from(token);
    if let Some(top) = top {
        let ranked = ranked(logits, 1.0);
        let top = usize::try_from(top).unwrap_or(usize::MAX);
        let of = |(token_id, probability): &(TokenId, f32)| TopLogprob {
            token_id: *token_id,
            logprob: probability.ln(),
        };
        let chosen = ranked.iter().find(|(candidate, _)| *candidate == token);
        chunk.logprobs = vec![TokenLogprob {
            logprob: chosen.map_or(f32::NEG_INFINITY, |(_, probability)| probability.ln()),
            top: ranked.iter().take(top).map(of).collect(),
        }];
    }
    chunk
}
