//! Faults that the checks of CN catch.

mod deaf;
mod misdirected;

use std::sync::atomic::AtomicUsize;

use genset_backend_common::{CancelReason, FinishReason};

use super::fault::{Declares, ended, faulty, with_fault};
use super::slotted::{SlotFault, with_slots, without_probe};
use super::{Clean, Mutant};
use crate::subject::{Scenario, Subject};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "cancel-seen-after-first-token",
        stands_for: "a cancel flag that is looked at only after each step: work is begun for clients that have left",
        killed_by: &["CN01"],
        build: |clean, scenario| with_fault(clean, scenario, deaf::UntilFirstToken),
    },
    Mutant {
        name: "cancel-ignored",
        stands_for: "an engine without cancellation: abandoned requests run to their limit",
        killed_by: &[
            "CN01", "CN02", "CN05", "CN07", "CN10", "CN14", "CN16", "ER09", "SH15",
        ],
        build: |clean, scenario| with_fault(clean, scenario, deaf::Always),
    },
    Mutant {
        name: "cancel-ignored-while-decoding",
        stands_for: "an engine that hears a cancel while it prefills and never again",
        killed_by: &["CN02", "CN05", "CN07", "CN10", "CN14", "ER09", "SH15"],
        build: |clean, scenario| {
            with_fault(clean, scenario, deaf::Heeds(|_, has_items| !has_items))
        },
    },
    Mutant {
        name: "cancelled-as-stop",
        stands_for: "an engine that reports a cancelled answer as a finished one",
        killed_by: &["CN01", "CN02", "CN07", "CN12", "CN14"],
        build: |clean, scenario| {
            ended(clean, scenario, |finished| {
                if finished.reason == FinishReason::Cancelled {
                    finished.reason = FinishReason::Stop;
                }
            })
        },
    },
    Mutant {
        name: "slot-leaked-on-drop",
        stands_for: "sgl-project/sglang#36333: requests of clients that hung up keep their slots until none is left",
        killed_by: &["CN03", "CN15"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::KeepsSlotOnDrop),
    },
    Mutant {
        name: "slot-of-many-leaked-on-drop",
        stands_for: "as slot-leaked-on-drop, in an engine with room for many: it serves for hours before nobody is served",
        killed_by: &["CN03"],
        build: |clean, scenario| of_64(clean, scenario, SlotFault::KeepsSlotOnDrop),
    },
    Mutant {
        name: "reservation-of-many-lost-on-drop",
        stands_for: "as reservation-lost-on-drop, in an engine with room for many",
        killed_by: &["CN13"],
        build: |clean, scenario| of_64(clean, scenario, SlotFault::LosesReservation),
    },
    Mutant {
        name: "kv-leaked-on-drop",
        stands_for: "KV blocks of dropped requests that are never given back: invisible until the cache is full",
        killed_by: &["CN03"],
        build: |clean, scenario| with_slots(clean, scenario, 4, SlotFault::KeepsKvOnDrop),
    },
    Mutant {
        name: "prefill-not-interruptible",
        stands_for: "ikawrakow/ik_llama.cpp#1020: a long prompt is read through although its client has left",
        killed_by: &["CN04"],
        build: |clean, scenario| with_fault(clean, scenario, deaf::WhilePrefilling),
    },
    Mutant {
        name: "deaf-in-queue",
        stands_for: "ggml-org/llama.cpp#13262: an abandoned request waits its turn in the queue and is then computed",
        killed_by: &["CN05", "CN10", "ER09"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::DeafInQueue),
    },
    Mutant {
        name: "late-cancel-hits-next-tenant",
        stands_for: "a cancel that is addressed to a slot: it ends the request that has the slot by then",
        killed_by: &["CN06"],
        build: |clean, scenario| with_fault(clean, scenario, misdirected::NextTenant::default()),
    },
    Mutant {
        name: "second-abort-undoes-the-first",
        stands_for: "an abort flag that is toggled instead of set",
        killed_by: &["CN07"],
        build: |clean, scenario| with_fault(clean, scenario, misdirected::Toggle::default()),
    },
    Mutant {
        name: "unknown-abort-hits-the-newest",
        stands_for: "a lookup that falls back to the last request when the id is not found",
        killed_by: &["CN08"],
        build: |clean, scenario| {
            let matching: misdirected::Matching = |id, aborted| id == aborted;
            with_fault(clean, scenario, misdirected::ByLookup::new(matching, true))
        },
    },
    Mutant {
        name: "abort-by-prefix",
        stands_for: "ids matched by their beginning, so that request-1 also aborts request-10",
        killed_by: &["CN08"],
        build: |clean, scenario| {
            let matching: misdirected::Matching = |id, aborted| id.starts_with(aborted);
            with_fault(clean, scenario, misdirected::ByLookup::new(matching, false))
        },
    },
    Mutant {
        name: "cancel-shifts-the-batch",
        stands_for: "a batch that is compacted after a cancel while its tokens still go by the old places",
        killed_by: &["CN09"],
        build: |clean, scenario| with_fault(clean, scenario, misdirected::ShiftedBatch::default()),
    },
    Mutant {
        name: "computes-on-after-cancel",
        stands_for: "a stream that ends for the client while the engine computes the rest of the answer unseen",
        killed_by: &["CN10", "ER09"],
        build: |clean, scenario| {
            with_slots(clean, scenario, 1000, SlotFault::ComputesOnAfterCancel)
        },
    },
    Mutant {
        name: "slot-kept-after-cancel",
        stands_for: "as computes-on-after-cancel, seen from outside: the abandoned answers keep their slots",
        killed_by: &["CN05", "CN10", "ER09"],
        build: |clean, scenario| {
            without_probe(clean, scenario, 4, SlotFault::ComputesOnAfterCancel)
        },
    },
    Mutant {
        name: "cancel-swallows-the-terminal",
        stands_for: "a cancel between the last token and the end that takes the request out of the table first",
        killed_by: &["CN12"],
        build: |clean, scenario| with_fault(clean, scenario, deaf::LosesTerminal),
    },
    Mutant {
        name: "reservation-lost-on-drop",
        stands_for: "admission that counts a request before it guards it: who leaves in between is counted for ever",
        killed_by: &["CN13"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::LosesReservation),
    },
    Mutant {
        name: "task-leaked-on-cancel",
        stands_for: "a watcher task for each request that does not end with a cancelled one",
        killed_by: &["CN11"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::LeaksTaskOnCancel),
    },
    Mutant {
        name: "task-leaked-on-every-sixth-cancel",
        stands_for: "a watcher task that is left behind where a cancel meets a step: seldom, and for ever",
        killed_by: &["CN11"],
        build: |clean, scenario| {
            without_probe(clean, scenario, 4, SlotFault::LeaksTaskOnSixthCancel)
        },
    },
    Mutant {
        name: "stalls-after-200-aborts",
        stands_for: "InternLM/lmdeploy#1788: the engine stops answering after some hundred aborted requests",
        killed_by: &["CN11"],
        build: |clean, scenario| {
            let left = AtomicUsize::new(200);
            with_fault(clean, scenario, misdirected::StallsAfterAborts { left })
        },
    },
    Mutant {
        name: "deaf-to-deadlines",
        stands_for: "a cancel that is looked for by its reason, from before there were deadlines",
        killed_by: &["CN14"],
        build: |clean, scenario| {
            let heeds = deaf::Heeds(|ctx, _| ctx.cancel_reason() != Some(CancelReason::Deadline));
            with_fault(clean, scenario, heeds)
        },
    },
    Mutant {
        name: "slot-leaked-in-prefill",
        stands_for: "a slot that is taken before the prefill and guarded after it",
        killed_by: &["CN15"],
        build: |clean, scenario| without_probe(clean, scenario, 4, SlotFault::KeepsSlotInPrefill),
    },
    Mutant {
        name: "early-abort-panics",
        stands_for: "an abort that takes the scheduler for granted",
        killed_by: &["CN16"],
        build: |clean, scenario| {
            with_fault(clean, scenario, misdirected::AbortNeedsStart::default())
        },
    },
    Mutant {
        name: "late-abort-waits",
        stands_for: "an abort that waits for an answer from a scheduler that is gone",
        killed_by: &["CN16"],
        build: |clean, scenario| {
            with_fault(clean, scenario, misdirected::LateAbortWaits::default())
        },
    },
];

/// An engine that declares 64 slots and has no probe.
fn of_64(clean: &Clean, scenario: &Scenario, fault: SlotFault) -> Subject {
    let declares = Declares(|config| config.max_num_seqs = Some(64));
    faulty(without_probe(clean, scenario, 64, fault), declares)
}
