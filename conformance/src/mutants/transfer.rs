//! Faults that the checks of DG catch for held and fetched blocks.

use super::Mutant;
use super::capable::{Flaw, with_flaw};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "fetch-copies",
        stands_for: "blocks that are copied out and freed by nothing but their time",
        killed_by: &["DG08"],
        build: |_, _| with_flaw(Flaw::FetchCopies),
    },
    Mutant {
        name: "fetched-again",
        stands_for: "a name of blocks that stays good when the blocks are another request's",
        killed_by: &["DG09"],
        build: |_, _| with_flaw(Flaw::FetchedAgain),
    },
    Mutant {
        name: "refused-holds",
        stands_for: "a place for blocks that is taken before the parameters are looked at",
        killed_by: &["DG10"],
        build: |_, _| with_flaw(Flaw::RefusedHolds),
    },
    Mutant {
        name: "release-ignored",
        stands_for: "a release that is left to the lease",
        killed_by: &["DG11"],
        build: |_, _| with_flaw(Flaw::ReleaseIgnored),
    },
    Mutant {
        name: "cancelled-prefill-holds",
        stands_for: "blocks named when the prompt is admitted, and forgotten when it is cancelled",
        killed_by: &["DG12"],
        build: |_, _| with_flaw(Flaw::CancelledPrefillHolds),
    },
    Mutant {
        name: "fetched-after-lease",
        stands_for: "a lease that frees the blocks and leaves their name",
        killed_by: &["DG13"],
        build: |_, _| with_flaw(Flaw::FetchedAfterLease),
    },
    Mutant {
        name: "dropped-decode-holds",
        stands_for: "blocks on their way that nobody frees when the client leaves",
        killed_by: &["DG14"],
        build: |_, _| with_flaw(Flaw::DroppedDecodeHolds),
    },
    Mutant {
        name: "decode-draws-anew",
        stands_for: "a random generator that the instance stirs its own id into",
        killed_by: &["DG15"],
        build: |_, _| with_flaw(Flaw::DecodeDrawsAnew),
    },
    Mutant {
        name: "holds-what-has-ended",
        stands_for: "a prefill that hands over whatever its first token says",
        killed_by: &["DG16"],
        build: |_, _| with_flaw(Flaw::HoldsWhatHasEnded),
    },
];
