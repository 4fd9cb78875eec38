//! Faults of engines that declare deviations from the contract: a false declaration, and a fault that hides behind a true one.
//! A deviation excuses only what it declares.

use genset_backend_common::config::Deviation;

use super::Mutant;
use super::capable::{Flaw, deviating, with_flaw};
use super::fault::{Declares, faulty, mending, with_fault};
use super::lengths::Warm;

const BATCH_VARIANT: &[Deviation] = &[Deviation::BatchVariant];
const ALL: &[Deviation] = &[Deviation::BatchVariant, Deviation::NoMinTokens];
const BIASED: &[Deviation] = &[Deviation::LogprobsAfterBias];
const COUNTING: &[Deviation] = &[Deviation::PenaltiesCountPrompt];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "variance-hides-other-rows",
        stands_for: "an attention mask that lets a row see its neighbours, taken for the rounding that the engine declares",
        killed_by: &[
            "CC04", "CC13", "CC14", "CC15", "CC16", "CC17", "CN09", "DT15", "DT16",
        ],
        build: |_, _| deviating(Flaw::NoiseInCompany, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-the-hottest",
        stands_for: "one temperature a batch, in an engine whose answers may be others in a batch",
        killed_by: &["DT16"],
        build: |_, _| deviating(Flaw::HottestForAll, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-a-shared-generator",
        stands_for: "a generator a batch, in an engine whose answers may be others in a batch",
        killed_by: &["DT15"],
        build: |_, _| deviating(Flaw::SeedsShareAGenerator, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-biases-for-all",
        stands_for: "biases written at a row of the step before, in an engine whose answers may be others in a batch",
        killed_by: &["CC16"],
        build: |_, _| deviating(Flaw::BiasesForAll, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-a-restarted-seed",
        stands_for: "a random generator that begins at its seed on the new instance, taken for the rounding that the engine declares",
        killed_by: &["MG06", "MG12"],
        build: |_, _| deviating(Flaw::SeedRestartsOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-a-restarted-guided-seed",
        stands_for: "a sampler for guided requests with a count of its own, in an engine whose answers may be others in a batch",
        killed_by: &["MG11"],
        build: |_, _| deviating(Flaw::GuidedSeedRestartsOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-shifted-logprobs",
        stands_for: "log probabilities of the prompt's last place given to the first new token, taken for that rounding",
        killed_by: &[
            "MG01", "MG04", "MG06", "MG07", "MG08", "MG09", "MG10", "MG11", "MG12",
        ],
        build: |_, _| deviating(Flaw::LogprobsShiftedOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-forgotten-penalties",
        stands_for: "penalties that count what this instance generated, in an engine whose answers may be others in a batch",
        killed_by: &["MG07", "MG12"],
        build: |_, _| deviating(Flaw::PenaltiesForgottenOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-penalties-forgotten-by-draws",
        stands_for: "a sampler that is warmed up with resumed tokens where it is greedy only, in such an engine",
        killed_by: &["MG12"],
        build: |_, _| deviating(Flaw::PenaltiesForgottenByDraws, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-a-forgotten-grammar",
        stands_for: "a grammar matcher that starts at its beginning on the new instance, in such an engine",
        killed_by: &["MG04", "MG10", "MG11"],
        build: |_, _| deviating(Flaw::GuideForgottenOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-min-tokens-taken-twice",
        stands_for: "a router and an engine that both take the resumed tokens off min_tokens, in such an engine",
        killed_by: &["MG08"],
        build: |_, _| deviating(Flaw::MinTokensTakenTwice, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-a-corrupt-transfer",
        stands_for: "blocks that arrive in another layout than they left in, in such an engine",
        killed_by: &["DG03", "DG15"],
        build: |_, _| deviating(Flaw::TransferCorrupts, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-draws",
        stands_for: "a temperature of 0 that is a small number, so that answers vary on an idle engine, too",
        killed_by: &[
            "CC16", "DT01", "DT04", "DT05", "DT08", "DT10", "DT11", "DT16", "MG01", "MG05", "MG08",
            "MG09",
        ],
        build: |_, _| deviating(Flaw::GreedyDraws, BATCH_VARIANT),
    },
    Mutant {
        name: "variance-hides-a-wrong-prefix",
        stands_for: "a prompt reused to its last token, which is then computed at the next one's position, taken for that rounding",
        killed_by: &["DT10"],
        build: |clean, scenario| {
            let warm = with_fault(clean, scenario, Warm::new(|prompt| prompt.to_vec()));
            let declares = Declares(|config| {
                config
                    .capabilities
                    .deviations
                    .insert(Deviation::BatchVariant);
            });
            faulty(warm, declares)
        },
    },
    Mutant {
        name: "min-tokens-dropped-though-declared",
        stands_for: "a worker that says that it cannot keep min_tokens, takes them and drops them",
        killed_by: &["DT09", "ER01"],
        build: |clean, scenario| {
            let dropping = mending(clean, scenario, |_, request| request.stop.min_tokens = 0);
            let declares = Declares(|config| {
                config
                    .capabilities
                    .deviations
                    .insert(Deviation::NoMinTokens);
            });
            faulty(dropping, declares)
        },
    },
    Mutant {
        name: "penalties-count-the-prompt",
        stands_for: "penalties over the whole context, as some engines have them, and not a word of it",
        killed_by: &["DT08", "DT18"],
        build: |_, _| with_flaw(Flaw::PenaltiesCountPrompt),
    },
    Mutant {
        name: "penalties-said-to-count-the-prompt",
        stands_for: "a deviation that was copied with the rest of another engine's declaration",
        killed_by: &["DT18"],
        build: |_, _| deviating(Flaw::None, COUNTING),
    },
    Mutant {
        name: "logprobs-said-to-be-biased",
        stands_for: "a deviation of another version of the server, which tells the model's own log probabilities by now",
        killed_by: &["DT17"],
        build: |_, _| deviating(Flaw::None, BIASED),
    },
];

/// Engines that deviate as declared.
pub(super) const CONTROLS: &[Mutant] = &[
    Mutant {
        name: "batch-variant",
        stands_for: "sums whose order depends on the size of a batch",
        killed_by: &[],
        build: |_, _| deviating(Flaw::RoundsInCompany, ALL),
    },
    Mutant {
        name: "batch-variant-on-resume",
        stands_for: "inputs rounded to 8 bits, which another order of sums rounds to the other side",
        killed_by: &[],
        build: |_, _| deviating(Flaw::DrawsRoundOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "batch-variant-on-greedy-resume",
        stands_for: "a prompt that is summed up in another order than single tokens",
        killed_by: &[],
        build: |_, _| deviating(Flaw::GreedyRoundsOnResume, BATCH_VARIANT),
    },
    Mutant {
        name: "batch-variant-on-decode",
        stands_for: "a prompt computed elsewhere, so that what is left of it is another batch",
        killed_by: &[],
        build: |_, _| deviating(Flaw::DecodeRounds, BATCH_VARIANT),
    },
    Mutant {
        name: "penalties-count-prompt",
        stands_for: "penalties over the last tokens, wherever they came from",
        killed_by: &[],
        build: |_, _| deviating(Flaw::PenaltiesCountPrompt, COUNTING),
    },
    Mutant {
        name: "biased-logprobs",
        stands_for: "log probabilities of the logits that tokens are chosen from",
        killed_by: &[],
        build: |_, _| deviating(Flaw::LogprobsAfterBias, BIASED),
    },
    Mutant {
        name: "narrows-unasked",
        stands_for: "defaults of a server's own that narrow a choice, which the contract leaves to it",
        killed_by: &[],
        build: |_, _| with_flaw(Flaw::NarrowsUnasked),
    },
];
