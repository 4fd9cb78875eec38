//! Faults that the checks of GD catch.

use super::Mutant;
use super::capable::{Flaw, with_flaw};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "schema-ignored",
        stands_for: "a schema that becomes \"any JSON object\" because its compiler failed",
        killed_by: &["GD01", "GD05", "GD08"],
        build: |_, _| with_flaw(Flaw::SchemaIgnored),
    },
    Mutant {
        name: "grammar-ends-early",
        stands_for: "a choice that ends as soon as the rest is certain: \"neg\" for \"negative\"",
        killed_by: &["GD02", "GD05", "GD08"],
        build: |_, _| with_flaw(Flaw::EndsEarly),
    },
    Mutant {
        name: "bad-grammar-ignored",
        stands_for: "a compiler's error that is logged, and the request served without a grammar",
        killed_by: &["GD03", "GD09"],
        build: |_, _| with_flaw(Flaw::BadGrammarIgnored),
    },
    Mutant {
        name: "truncated-is-stop",
        stands_for: "a guided answer that always ends with stop, also when max_tokens cut it",
        killed_by: &["GD04"],
        build: |_, _| with_flaw(Flaw::TruncatedIsStop),
    },
    Mutant {
        name: "guide-shared",
        stands_for: "one grammar matcher for the whole batch, set by whoever came last",
        killed_by: &["GD05"],
        build: |_, _| with_flaw(Flaw::GuideShared),
    },
    Mutant {
        name: "guide-end-ignored",
        stands_for: "ignore_eos that holds past the end of a grammar: padding until max_tokens",
        killed_by: &["GD06"],
        build: |_, _| with_flaw(Flaw::GuideEndIgnored),
    },
    Mutant {
        name: "hot-unguided",
        stands_for: "a mask that is laid over the greedy path, and over the first draw only",
        killed_by: &["GD08", "MG11"],
        build: |_, _| with_flaw(Flaw::HotUnguided),
    },
    Mutant {
        name: "grammar-ignored",
        stands_for: "a kind of guide that the API reads and the sampler does not know",
        killed_by: &["GD09"],
        build: |_, _| with_flaw(Flaw::GrammarIgnored),
    },
];
