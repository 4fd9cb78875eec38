//! Faults that the checks of DG catch.

use super::Mutant;
use super::capable::{Flaw, with_flaw};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "wrong-source",
        stands_for: "transfer parameters with the rank where the worker's id belongs",
        killed_by: &[
            "DG01", "DG03", "DG05", "DG06", "DG07", "DG08", "DG09", "DG14", "DG15",
        ],
        build: |_, _| with_flaw(Flaw::WrongSource),
    },
    Mutant {
        name: "prefill-goes-on",
        stands_for: "a prefill that goes on with its answer until the scheduler looks at the role",
        killed_by: &["DG01"],
        build: |_, _| with_flaw(Flaw::PrefillGoesOn),
    },
    Mutant {
        name: "transfer-optional",
        stands_for: "a decode instance that computes the prompt itself when the parameters are missing",
        killed_by: &["DG02"],
        build: |_, _| with_flaw(Flaw::TransferOptional),
    },
    Mutant {
        name: "transfer-corrupts",
        stands_for: "blocks that arrive in another layout than they left in",
        killed_by: &["DG03", "DG15"],
        build: |_, _| with_flaw(Flaw::TransferCorrupts),
    },
    Mutant {
        name: "no-ttl",
        stands_for: "blocks held for a decode instance that never comes, for ever",
        killed_by: &["DG04"],
        build: |_, _| with_flaw(Flaw::NoTtl),
    },
    Mutant {
        name: "drain-leaves-transfers",
        stands_for: "a drain that looks at running requests only",
        killed_by: &["DG05"],
        build: |_, _| with_flaw(Flaw::DrainLeavesTransfers),
    },
    Mutant {
        name: "abort-ignored",
        stands_for: "an abort that knows running requests only, not finished prefills",
        killed_by: &["DG06"],
        build: |_, _| with_flaw(Flaw::AbortIgnored),
    },
    Mutant {
        name: "lost-source-is-internal",
        stands_for: "a lost prefill instance reported as a bug of the decode instance's",
        killed_by: &["DG07"],
        build: |_, _| with_flaw(Flaw::LostSourceIsInternal),
    },
];
