//! Faults that the checks of CC catch.

mod crosstalk;
mod locks;
mod poison;
mod stops;

use super::Mutant;
use super::fault::with_fault;
use super::slotted::{SlotFault, without_probe};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "locks-in-both-orders",
        stands_for: "two locks held across awaits, in either order: a burst of requests ends in a deadlock",
        killed_by: &[
            "CC01", "CC06", "CC07", "CC13", "CC14", "CN05", "CN10", "ER09", "MT06", "SH14",
        ],
        build: |clean, scenario| with_fault(clean, scenario, locks::BothOrders::default()),
    },
    Mutant {
        name: "race-between-polls",
        stands_for: "unguarded scratch memory shared by all streams: two polls at once lose a token",
        killed_by: &["CC02", "RD02"],
        build: |clean, scenario| with_fault(clean, scenario, locks::SharedScratch::default()),
    },
    Mutant {
        name: "swaps-streams",
        stands_for: "an output table indexed by batch place: a client reads its neighbour's tokens",
        killed_by: &["CC03", "CC04", "DT15", "DT16"],
        build: |clean, scenario| {
            with_fault(clean, scenario, crosstalk::NeighboursTokens::default())
        },
    },
    Mutant {
        name: "batch-variant",
        stands_for: "kernels whose sums depend on the batch: late tokens differ when others run beside",
        killed_by: &["CC04", "DT15", "DT16"],
        build: |clean, scenario| with_fault(clean, scenario, crosstalk::BatchVariant::default()),
    },
    Mutant {
        name: "serial",
        stands_for: "an engine behind one big lock: everybody waits for the longest answer",
        killed_by: &["CN09", "CC05"],
        build: |clean, scenario| without_probe(clean, scenario, 1, SlotFault::None),
    },
    Mutant {
        name: "newest-first",
        stands_for: "a queue that is a stack: who waits longest goes on waiting while others come",
        killed_by: &["CC06"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::NewestFirst),
    },
    Mutant {
        name: "priority-ignored",
        stands_for: "a priority that is declared, carried to the scheduler and not looked at",
        killed_by: &["CC12"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::PriorityIgnored),
    },
    Mutant {
        name: "lowest-first",
        stands_for: "a scheduler whose smaller numbers run first, given ours as they are",
        killed_by: &["CC12"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::LowestFirst),
    },
    Mutant {
        name: "hangs-over-capacity",
        stands_for: "requests over capacity are parked and nobody wakes them",
        killed_by: &["CC07", "CC12"],
        build: |clean, scenario| without_probe(clean, scenario, 24, SlotFault::ForgetsTheQueue),
    },
    Mutant {
        name: "blocks-the-runtime",
        stands_for: "prefill computed on the async runtime: health checks fail for as long as it takes",
        killed_by: &["CC08"],
        build: |clean, scenario| with_fault(clean, scenario, locks::BlocksRuntime),
    },
    Mutant {
        name: "poisoned-by-a-failure",
        stands_for: "an error path that leaves a shared lock poisoned: every later request fails",
        killed_by: &["CC09"],
        build: |clean, scenario| with_fault(clean, scenario, poison::AfterFailure::default()),
    },
    Mutant {
        name: "sessions-by-id",
        stands_for: "sgl-project/sglang#36475: a second request with an id in use takes over the first one's session",
        killed_by: &["CC10"],
        build: |clean, scenario| with_fault(clean, scenario, crosstalk::SessionsById::default()),
    },
    Mutant {
        name: "anti-scaling",
        stands_for: "EricLBuehler/mistral.rs#2343: each further request slows all of them by more than its share",
        killed_by: &["CC11"],
        build: |clean, scenario| with_fault(clean, scenario, locks::AntiScaling::default()),
    },
    Mutant {
        name: "stop-tokens-of-the-batch",
        stands_for: "one set of stop tokens a batch, which each request that joins adds its own to",
        killed_by: &["CC16"],
        build: |clean, scenario| with_fault(clean, scenario, stops::OfTheBatch::default()),
    },
    Mutant {
        name: "row-not-reset",
        stands_for: "a row of the batch that is given to whoever waits with the last token of its former request in it",
        killed_by: &["CC13"],
        build: |clean, scenario| without_probe(clean, scenario, 8, SlotFault::KeepsRow),
    },
    Mutant {
        name: "shortest-first",
        stands_for: "a scheduler that fills what is left of a step with prompts that fit: a long one never does",
        killed_by: &["CC14"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::ShortestFirst),
    },
    Mutant {
        name: "chunk-at-the-wrong-place",
        stands_for: "a prefill in chunks whose last chunk is put where the batch's newest request stands",
        killed_by: &["CC14"],
        build: |clean, scenario| {
            with_fault(
                clean,
                scenario,
                crosstalk::MixedPrefill::wrong_for(crosstalk::Victim::Long),
            )
        },
    },
    Mutant {
        name: "prefilled-as-a-chunk",
        stands_for: "a prompt that joins a step of somebody else's prefill and is computed as a part of it",
        killed_by: &["CC15"],
        build: |clean, scenario| {
            with_fault(
                clean,
                scenario,
                crosstalk::MixedPrefill::wrong_for(crosstalk::Victim::Short),
            )
        },
    },
];
