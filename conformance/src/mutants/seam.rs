//! Faults that the checks of MG for request options catch.

use super::Mutant;
use super::capable::{Flaw, with_flaw};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "seed-restarts-on-resume",
        stands_for: "a random generator that begins at its seed on the new instance",
        killed_by: &["MG06", "MG12"],
        build: |_, _| with_flaw(Flaw::SeedRestartsOnResume),
    },
    Mutant {
        name: "rounds-on-resume",
        stands_for: "a prompt that is summed up in another order than single tokens, and not a word of it",
        killed_by: &["MG06", "MG12"],
        build: |_, _| with_flaw(Flaw::DrawsRoundOnResume),
    },
    Mutant {
        name: "penalties-forgotten-on-resume",
        stands_for: "penalties that count what this instance generated",
        killed_by: &["MG07", "MG12"],
        build: |_, _| with_flaw(Flaw::PenaltiesForgottenOnResume),
    },
    Mutant {
        name: "min-tokens-taken-twice",
        stands_for: "a router and an engine that both take the resumed tokens off min_tokens",
        killed_by: &["MG08"],
        build: |_, _| with_flaw(Flaw::MinTokensTakenTwice),
    },
    Mutant {
        name: "logprobs-shifted-on-resume",
        stands_for: "log probabilities of the prompt's last place given to the first new token",
        killed_by: &["MG09"],
        build: |_, _| with_flaw(Flaw::LogprobsShiftedOnResume),
    },
    Mutant {
        name: "schema-forgotten-on-resume",
        stands_for: "one kind of grammar that starts at its beginning on the new instance",
        killed_by: &["MG10"],
        build: |_, _| with_flaw(Flaw::SchemaForgottenOnResume),
    },
    Mutant {
        name: "guided-seed-restarts-on-resume",
        stands_for: "a sampler for guided requests with a count of its own",
        killed_by: &["MG11"],
        build: |_, _| with_flaw(Flaw::GuidedSeedRestartsOnResume),
    },
    Mutant {
        name: "penalties-forgotten-by-draws",
        stands_for: "a sampler that is warmed up with resumed tokens where it is greedy only",
        killed_by: &["MG12"],
        build: |_, _| with_flaw(Flaw::PenaltiesForgottenByDraws),
    },
];
