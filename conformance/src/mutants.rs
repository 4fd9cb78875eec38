//! The corpus of broken engines that prove the checks: each is a clean engine with one fault.

mod bodies;
mod cancellation;
pub mod capable;
mod concurrency;
mod controls;
mod cut;
mod deviations;
mod disaggregated;
mod embeddings;
mod errors;
pub mod fault;
mod finish;
mod guided;
mod kv_events;
mod lengths;
mod lifecycle;
mod memory;
mod metrics;
mod ranks;
mod resume;
mod rules;
mod sampling;
mod scores;
mod seam;
mod shutdown;
pub mod slotted;
mod stream;
pub mod text;
mod transfer;
mod usage;

use std::sync::Arc;

use crate::subject::{Factory, Scenario, Subject};

/// A clean engine's factory, which mutants wrap.
pub type Clean = Arc<dyn Factory>;

/// A broken engine: a clean one with one fault.
#[derive(Clone, Copy)]
pub struct Mutant {
    /// Stable name, in kebab-case.
    pub name: &'static str,
    /// The fault, and the public bug or production failure that it stands for.
    pub stands_for: &'static str,
    /// Exactly the checks that catch it.
    pub killed_by: &'static [&'static str],
    /// Builds it on top of the clean engine.
    pub build: fn(&Clean, &Scenario) -> Subject,
}

genset_backend_common::debug_as!(|it| Mutant {
    name: it.name,
    killed_by: it.killed_by,
    ..
});

impl Mutant {
    /// A factory of this mutant, based on `clean`.
    #[must_use]
    pub fn factory(self, clean: Clean) -> impl Factory {
        move |scenario: &Scenario| (self.build)(&clean, scenario)
    }
}

/// Every mutant.
pub fn corpus() -> impl Iterator<Item = &'static Mutant> {
    groups().flat_map(|(_, mutants)| mutants)
}

/// Every mutant, grouped by module.
pub fn groups() -> impl Iterator<Item = (&'static str, &'static [Mutant])> {
    GROUPS.iter().copied()
}

/// Engines that wrap the clean engine like mutants but have no fault: no check may catch them. They cover what the clean engine
/// cannot, since it publishes nothing and does not crash.
pub fn controls() -> impl Iterator<Item = &'static Mutant> {
    [
        errors::CONTROLS,
        metrics::CONTROLS,
        embeddings::CONTROLS,
        scores::CONTROLS,
        controls::CONTROLS,
        ranks::CONTROLS,
        bodies::CONTROLS,
        deviations::CONTROLS,
        memory::CONTROLS,
        resume::CONTROLS,
    ]
    .into_iter()
    .flatten()
}

const GROUPS: &[(&str, &[Mutant])] = &[
    ("lifecycle", lifecycle::MUTANTS),
    ("stream", stream::MUTANTS),
    ("finish", finish::MUTANTS),
    ("usage", usage::MUTANTS),
    ("lengths", lengths::MUTANTS),
    ("cancellation", cancellation::MUTANTS),
    ("concurrency", concurrency::MUTANTS),
    ("sampling", sampling::MUTANTS),
    ("deviations", deviations::MUTANTS),
    ("memory", memory::MUTANTS),
    ("guided", guided::MUTANTS),
    ("errors", errors::MUTANTS),
    ("shutdown", shutdown::MUTANTS),
    ("metrics", metrics::MUTANTS),
    ("kv_events", kv_events::MUTANTS),
    ("disaggregated", disaggregated::MUTANTS),
    ("transfer", transfer::MUTANTS),
    ("resume", resume::MUTANTS),
    ("seam", seam::MUTANTS),
    ("rules", rules::MUTANTS),
    ("embeddings", embeddings::MUTANTS),
    ("scores", scores::MUTANTS),
    ("controls", controls::MUTANTS),
    ("ranks", ranks::MUTANTS),
    ("bodies", bodies::MUTANTS),
    ("text", text::MUTANTS),
];
