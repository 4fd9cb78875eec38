//! An engine that scores pairs, and faults that the checks of SC catch.

use genset_backend_common::{
    EngineConfig, EngineError, Finish, Input, OutputStream, TokenId, async_trait,
    config::InputKind, output, request::ScorePair,
};

use super::Mutant;
use super::embeddings::SharesABuffer;
use super::fault::{Call, Fault, Inner, digest, with_fault};

pub(super) const CONTROLS: &[Mutant] = &[Mutant {
    name: "scores",
    stands_for: "an engine that scores, and generates too",
    killed_by: &[],
    build: |clean, scenario| with_fault(clean, scenario, Scores(|_, _| {})),
}];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "scored-by-length",
        stands_for: "a batch sorted by length to save padding, and not put back",
        killed_by: &["SC01"],
        build: |clean, scenario| {
            let sort: Wrong = |scores, pairs| {
                let mut order: Vec<usize> = (0..pairs.len()).collect();
                order.sort_unstable_by_key(|place| (pairs[*place].token_ids.len(), *place));
                *scores = order.iter().map(|place| scores[*place]).collect();
            };
            with_fault(clean, scenario, Scores(sort))
        },
    },
    Mutant {
        name: "scored-once",
        stands_for: "pairs that are alike scored once, and answered once",
        killed_by: &["SC01", "SC02"],
        build: |clean, scenario| {
            let once: Wrong = |scores, _| {
                let first = scores[0];
                let mut place = 0;
                scores.retain(|score| {
                    place += 1;
                    place == 1 || score.to_bits() != first.to_bits()
                });
            };
            with_fault(clean, scenario, Scores(once))
        },
    },
    Mutant {
        name: "scored-among-others",
        stands_for: "scores divided by the sum of the batch's, as a softmax over documents would",
        killed_by: &["SC01"],
        build: |clean, scenario| {
            let divided: Wrong = |scores, _| {
                let sum: f32 = scores.iter().sum();
                scores.iter_mut().for_each(|score| *score /= sum);
            };
            with_fault(clean, scenario, Scores(divided))
        },
    },
    Mutant {
        name: "second-text-cut",
        stands_for: "pairs cut to the room that the first text was meant to have",
        killed_by: &["SC02"],
        build: |clean, scenario| {
            let cut: Wrong = |scores, pairs| {
                for (score, pair) in scores.iter_mut().zip(pairs) {
                    let first = usize::try_from(pair.first_tokens).unwrap_or(usize::MAX);
                    *score = score_of(&pair.token_ids[..first]);
                }
            };
            with_fault(clean, scenario, Scores(cut))
        },
    },
    Mutant {
        name: "score-overflows",
        stands_for: "a sigmoid that divides infinity by infinity",
        killed_by: &["SC02"],
        build: |clean, scenario| {
            let overflows: Wrong = |scores, pairs| {
                for (score, pair) in scores.iter_mut().zip(pairs) {
                    if pair.token_ids.len() > 50 {
                        *score = f32::INFINITY;
                    }
                }
            };
            with_fault(clean, scenario, Scores(overflows))
        },
    },
    Mutant {
        name: "scored-from-a-shared-buffer",
        stands_for: "a buffer for the pairs that the next request fills again: one client's ranking of another's documents",
        killed_by: &["SC01"],
        build: |clean, scenario| with_fault(clean, scenario, SharesABuffer::of(InputKind::Score)),
    },
];

/// A change to the scores of pairs.
type Wrong = fn(&mut Vec<f32>, &[ScorePair]);

/// Adds scores to a clean engine.
struct Scores(Wrong);

/// A number above 0 that distinguishes token sequences.
pub(super) fn score_of(tokens: &[TokenId]) -> f32 {
    f32::from(digest(tokens) + 1)
}

#[async_trait]
impl Fault for Scores {
    fn declare(&self, config: &mut EngineConfig) {
        config.capabilities.inputs.insert(InputKind::Score);
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let Input::Score(pairs) = &call.request.input else {
            return inner.generate(call.request, call.ctx).await;
        };
        let mut scores = (pairs.iter())
            .map(|pair| score_of(&pair.token_ids))
            .collect();
        self.0(&mut scores, pairs);
        Ok(output::stream(call.ctx, |out| async move {
            out.scores(scores).await?;
            Ok(Finish::stop())
        }))
    }
}
