//! Faults that the checks of KV catch.

use super::Mutant;
use super::capable::{Flaw, with_flaw};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "stops-publishing",
        stands_for: "a publisher's connection that breaks after a while and is not made again",
        killed_by: &["KV01", "KV08", "KV12"],
        build: |_, _| with_flaw(Flaw::StopsPublishing),
    },
    Mutant {
        name: "unknown-parent",
        stands_for: "parents hashed by another scheme than blocks",
        killed_by: &["KV02", "RD05"],
        build: |_, _| with_flaw(Flaw::UnknownParent),
    },
    Mutant {
        name: "removed-before-stored",
        stands_for: "a slot whose old block is reported removed under the name of its new one",
        killed_by: &["KV03", "RD05"],
        build: |_, _| with_flaw(Flaw::RemovedBeforeStored),
    },
    Mutant {
        name: "partial-blocks",
        stands_for: "a last block that is hashed and published before it is full",
        killed_by: &["KV02", "KV04"],
        build: |_, _| with_flaw(Flaw::PartialBlocks),
    },
    Mutant {
        name: "event-storm",
        stands_for: "an engine that publishes its whole cache at every change",
        killed_by: &["KV05"],
        build: |_, _| with_flaw(Flaw::EventStorm),
    },
    Mutant {
        name: "silent-clear",
        stands_for: "a cache that is cleared for new weights without an event",
        killed_by: &["KV06"],
        build: |_, _| with_flaw(Flaw::SilentClear),
    },
    Mutant {
        name: "other-block-size",
        stands_for: "a block size in the config that is the scheduler's and not the cache's",
        killed_by: &[
            "KV01", "KV02", "KV04", "KV06", "KV07", "KV08", "KV10", "KV12",
        ],
        build: |_, _| with_flaw(Flaw::OtherBlockSize),
    },
    Mutant {
        name: "cached-not-counted",
        stands_for: "cached tokens that are always reported as none",
        killed_by: &["KV08"],
        build: |_, _| with_flaw(Flaw::CachedNotCounted),
    },
    Mutant {
        name: "silent-eviction",
        stands_for: "evictions that no event tells of",
        killed_by: &["KV09"],
        build: |_, _| with_flaw(Flaw::SilentEviction),
    },
    Mutant {
        name: "late-events",
        stands_for: "events that are published in batches, long after the blocks are reused",
        killed_by: &["KV10"],
        build: |_, _| with_flaw(Flaw::LateEvents),
    },
    Mutant {
        name: "abandoned-freed-silently",
        stands_for: "an abort path that frees a request's blocks itself, past the code that publishes",
        killed_by: &["KV11"],
        build: |_, _| with_flaw(Flaw::AbandonedFreedSilently),
    },
    Mutant {
        name: "salt-ignored",
        stands_for: "a prefix cache that all tenants share, whatever their salts",
        killed_by: &["KV12"],
        build: |_, _| with_flaw(Flaw::SaltIgnored),
    },
    Mutant {
        name: "unsalted-blocks-for-all",
        stands_for: "a lookup that falls back on the blocks of prompts without a salt",
        killed_by: &["KV12"],
        build: |_, _| with_flaw(Flaw::UnsaltedForAll),
    },
    Mutant {
        name: "stored-together",
        stands_for: "the blocks of a step in one event, as if they were one sequence's",
        killed_by: &["KV13", "RD05"],
        build: |_, _| with_flaw(Flaw::StoredTogether),
    },
];
