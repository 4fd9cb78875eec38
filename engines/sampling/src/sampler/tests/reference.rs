//! The reference that the sampler is compared with.

use super::*;

/// Sampling by definition: every step on the whole row, with a softmax and a sort. `None` if rounding alone could decide
/// which tokens are kept.
pub(super) struct Reference {
    /// Best first.
    pub(super) kept: Vec<(TokenId, f64)>,
}

impl Reference {
    pub(super) fn new(
        request: &GenerateRequest,
        output: &[TokenId],
        logits: &[f32],
        mask: Option<&TokenMask>,
    ) -> Option<Self> {
        let mut row = logits.to_vec();
        change(&mut row, request, output, mask);
        let options = &request.sampling;
        let mut ranked: Vec<(TokenId, f32)> = (0..)
            .zip(row)
            .filter(|(_, logit)| *logit > f32::NEG_INFINITY)
            .collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let best = f64::from(ranked.first()?.1);
        let temperature = f64::from(options.temperature.unwrap_or(0.0));
        if temperature == 0.0 {
            return Some(Self {
                kept: vec![(ranked[0].0, 1.0)],
            });
        }
        let weight = |logit: f32| ((f64::from(logit) - best) / temperature).exp();
        let mut kept: Vec<(TokenId, f64)> = ranked
            .iter()
            .map(|(token, logit)| (*token, weight(*logit)))
            .collect();
        let min_p = f64::from(options.min_p.unwrap_or(0.0));
        if kept
            .iter()
            .any(|(_, weight)| (weight - min_p).abs() < 1e-6 * min_p)
        {
            return None;
        }
        kept.retain(|(_, weight)| *weight >= min_p && *weight > 1e-37);
        kept.truncate(usize::try_from(options.top_k.unwrap_or(u32::MAX)).unwrap());
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let (top_p, mut mass, mut count) = (f64::from(options.top_p.unwrap_or(1.0)), 0.0, 0);
        while top_p < 1.0 && mass < top_p * total {
            mass += kept[count].1;
            count += 1;
            if (mass - top_p * total).abs() < 1e-6 * total {
                return None;
            }
        }
        if top_p < 1.0 {
            kept.truncate(count);
        }
        let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
        kept.iter_mut().for_each(|(_, weight)| *weight /= total);
        // If nothing is cut, draws run in order of ids.
        if options
            .top_k
            .is_none_or(|k| usize::try_from(k).unwrap() >= logits.len())
            && top_p == 1.0
            && min_p == 0.0
        {
            kept.sort_by_key(|(token, _)| *token);
        }
        Some(Self { kept })
    }

    /// Whether `draw` selects `token`, up to the rounding of a sum.
    pub(super) fn draws(&self, draw: f64, token: TokenId) -> bool {
        let mut sum = 0.0;
        self.kept.iter().any(|(candidate, probability)| {
            let (from, to) = (sum - 1e-5, sum + probability + 1e-5);
            sum += probability;
            *candidate == token && (from..to).contains(&draw)
        })
    }
}

/// The changes in the crate's order, in the precision of the logits.
fn change(
    row: &mut [f32],
    request: &GenerateRequest,
    output: &[TokenId],
    mask: Option<&TokenMask>,
) {
    let (options, stop) = (&request.sampling, &request.stop);
    let tokens = request.tokens().unwrap();
    let resumed = &tokens[tokens.len() - usize::try_from(request.resumed_tokens).unwrap()..];
    let is_stop = |token| {
        StopConditions {
            min_tokens: 0,
            ..stop.clone()
        }
        .is_stop(token, 0)
    };
    let is_allowed = |token| mask.is_none_or(|mask| mask.allows(token));
    let can_ban = mask.is_none_or(|mask| mask.iter().any(|token| !is_stop(token)));
    let is_early = u32::try_from(output.len()).unwrap() < stop.min_tokens;
    for (token, logit) in (0..).zip(row) {
        if !is_allowed(token) || (is_early && can_ban && is_stop(token)) {
            *logit = f32::NEG_INFINITY;
        }
        if *logit == f32::NEG_INFINITY {
            continue;
        }
        *logit += options.logit_bias.get(&token).copied().unwrap_or(0.0);
        let times = [resumed, output]
            .concat()
            .iter()
            .filter(|seen| **seen == token)
            .count();
        let repetition = options.repetition_penalty.unwrap_or(1.0);
        if times > 0 || tokens.contains(&token) {
            *logit = if *logit > 0.0 {
                *logit / repetition
            } else {
                *logit * repetition
            };
        }
        if times > 0 {
            *logit -=
                options.frequency_penalty.unwrap_or(0.0) * f32::from(u16::try_from(times).unwrap());
            *logit -= options.presence_penalty.unwrap_or(0.0);
        }
    }
}
