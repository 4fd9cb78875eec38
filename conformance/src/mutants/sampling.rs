//! Faults that the checks of DT catch.

use super::Mutant;
use super::capable::{Flaw, with_flaw};
use super::fault::mending;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "greedy-draws",
        stands_for: "a sampler that clamps temperature 0 to a small number and draws from an unseeded generator",
        killed_by: &[
            "DT01", "DT04", "DT05", "DT08", "DT10", "DT11", "DT16", "MG01", "MG05", "MG07", "MG08",
            "MG09", "MG10",
        ],
        build: |_, _| with_flaw(Flaw::GreedyDraws),
    },
    Mutant {
        name: "temperature-zero-divides",
        stands_for: "the seeded path divides logits by a temperature of 0: not a number everywhere, and token 0 wins",
        killed_by: &["DT04"],
        build: |_, _| with_flaw(Flaw::ZeroTemperatureDivides),
    },
    Mutant {
        name: "seed-ignored",
        stands_for: "one generator for all requests: a seed changes nothing",
        killed_by: &["DT02", "DT15", "MG06", "MG11", "MG12"],
        build: |_, _| with_flaw(Flaw::SeedIgnored),
    },
    Mutant {
        name: "seed-constant",
        stands_for: "a generator that is made anew, with its default seed, for each request",
        killed_by: &["DT03", "DT12"],
        build: |_, _| with_flaw(Flaw::SeedConstant),
    },
    Mutant {
        name: "top-k-ignored",
        stands_for: "a sampler that draws first and filters afterwards",
        killed_by: &["DT05", "DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::TopKAfterDraw),
    },
    Mutant {
        name: "bias-ignored",
        stands_for: "a logit bias that is declared, parsed and never added",
        killed_by: &["DT06", "DT14"],
        build: |_, _| with_flaw(Flaw::BiasIgnored),
    },
    Mutant {
        name: "logprobs-unsorted",
        stands_for: "candidates in the order a partial sort left them",
        killed_by: &["DT07"],
        build: |_, _| with_flaw(Flaw::LogprobsUnsorted),
    },
    Mutant {
        name: "penalties-ignored",
        stands_for: "penalties that are declared and never applied",
        killed_by: &["DT08", "DT14"],
        build: |_, _| with_flaw(Flaw::PenaltiesIgnored),
    },
    Mutant {
        name: "top-p-ignored",
        stands_for: "nucleus sampling that is declared, for it is in the API, and not built",
        killed_by: &["DT11", "DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::TopPIgnored),
    },
    Mutant {
        name: "min-p-ignored",
        stands_for: "an option of one sampler that the fused kernel does not know",
        killed_by: &["DT11", "DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::MinPIgnored),
    },
    Mutant {
        name: "unseeded-constant",
        stands_for: "a missing seed that is read as 0",
        killed_by: &["DT12"],
        build: |_, _| with_flaw(Flaw::UnseededConstant),
    },
    Mutant {
        name: "logprobs-from-the-best",
        stands_for: "logits less their maximum, which a stable softmax begins with, sent without the rest of it",
        killed_by: &["DT13", "DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::LogprobsFromTheBest),
    },
    Mutant {
        name: "logprobs-of-candidates",
        stands_for: "a softmax over the candidates that are sent",
        killed_by: &["DT13", "DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::LogprobsOfCandidates),
    },
    Mutant {
        name: "frequency-counts-once",
        stands_for: "a mask of seen tokens where counts are wanted",
        killed_by: &["DT14"],
        build: |_, _| with_flaw(Flaw::FrequencyCountsOnce),
    },
    Mutant {
        name: "presence-counts-each",
        stands_for: "a presence penalty that is taken off once more at each step",
        killed_by: &["DT14"],
        build: |_, _| with_flaw(Flaw::PresenceCountsEach),
    },
    Mutant {
        name: "seeds-share-a-generator",
        stands_for: "a generator a batch, seeded by whoever comes first",
        killed_by: &["DT15"],
        build: |_, _| with_flaw(Flaw::SeedsShareAGenerator),
    },
    Mutant {
        name: "hottest-for-all",
        stands_for: "one temperature a batch, broadcast from the wrong row",
        killed_by: &["DT16"],
        build: |_, _| with_flaw(Flaw::HottestForAll),
    },
    Mutant {
        name: "biases-for-all",
        stands_for: "biases written into the batch's logits at a row of the step before",
        killed_by: &["CC16"],
        build: |_, _| with_flaw(Flaw::BiasesForAll),
    },
    Mutant {
        name: "logprobs-for-all-or-none",
        stands_for: "log probabilities computed for a batch where anybody asks, and given to everybody",
        killed_by: &["RD03"],
        build: |_, _| with_flaw(Flaw::LogprobsForAll),
    },
    Mutant {
        name: "logprobs-after-bias",
        stands_for: "log probabilities taken from the logits that were drawn from, biases and penalties included",
        killed_by: &["DT17"],
        build: |_, _| with_flaw(Flaw::LogprobsAfterBias),
    },
    Mutant {
        name: "repetition-overflows",
        stands_for: "a large penalty in half precision: no number any more, and so the best of all",
        killed_by: &["DT08"],
        build: |_, _| with_flaw(Flaw::RepetitionOverflows),
    },
    Mutant {
        name: "one-candidate-too-many",
        stands_for: "a top_k that is the place of the last candidate, counted from 0",
        killed_by: &["DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::OneCandidateTooMany),
    },
    Mutant {
        name: "nucleus-too-large",
        stands_for: "a nucleus that is summed in half precision, and so reached late",
        killed_by: &["DT19", "DT20"],
        build: |_, _| with_flaw(Flaw::NucleusTooLarge),
    },
    Mutant {
        name: "nucleus-of-one",
        stands_for: "a running sum that is compared the wrong way round: only the best token is left",
        killed_by: &["DT20"],
        build: |_, _| with_flaw(Flaw::NucleusOfOne),
    },
    Mutant {
        name: "narrows-whatever-is-said",
        stands_for: "an option at its neutral value taken for one that is not set, so that the server's own default narrows",
        killed_by: &["DT20"],
        build: |_, _| with_flaw(Flaw::NarrowsAlways),
    },
    Mutant {
        name: "min-p-lost-beside-top-k",
        stands_for: "a fast path for the k best that looks at nothing else",
        killed_by: &["DT19"],
        build: |_, _| with_flaw(Flaw::MinPLostBesideTopK),
    },
    Mutant {
        name: "min-p-in-another-base",
        stands_for: "a min_p that became a bound on logits by a logarithm of base 2",
        killed_by: &["DT19"],
        build: |_, _| with_flaw(Flaw::MinPInAnotherBase),
    },
    Mutant {
        name: "temperature-is-one",
        stands_for: "a temperature that switches drawing on, and is not divided by",
        killed_by: &["DT20"],
        build: |_, _| with_flaw(Flaw::TemperatureIsOne),
    },
    Mutant {
        name: "draws-uneven",
        stands_for: "a generator whose high bits are not even: the first candidate comes too often",
        killed_by: &["DT20"],
        build: |_, _| with_flaw(Flaw::DrawsUneven),
    },
    Mutant {
        name: "undeclared-options-dropped",
        stands_for: "a worker that reads the options it knows and drops the others in silence",
        killed_by: &["DT09", "ER01"],
        build: |clean, scenario| {
            mending(clean, scenario, |_, request| {
                request.sampling.presence_penalty = None;
                request.sampling.frequency_penalty = None;
            })
        },
    },
];
