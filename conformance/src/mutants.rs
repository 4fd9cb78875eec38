//! The corpus of broken engines that prove the checks: each is a clean engine with one fault.

mod cancellation;
pub mod capable;
mod concurrency;
mod cut;
mod disaggregated;
mod errors;
mod fault;
mod finish;
mod guided;
mod kv_events;
mod lifecycle;
mod metrics;
mod resume;
mod sampling;
mod shutdown;
pub mod slotted;
mod stream;
pub mod text;
mod usage;

use std::sync::Arc;

use crate::subject::{Factory, Scenario, Subject};

/// A clean engine's factory, which mutants wrap.
pub type Clean = Arc<dyn Factory>;

/// A broken engine: one fault on top of a clean one.
#[derive(Clone, Copy)]
pub struct Mutant {
    /// Stable name, in kebab-case.
    pub name: &'static str,
    /// The fault, and the public bug or the production failure it stands for.
    pub stands_for: &'static str,
    /// Exactly the checks that catch it.
    pub killed_by: &'static [&'static str],
    /// Builds it on top of the clean engine.
    pub build: fn(&Clean, &Scenario) -> Subject,
}

impl std::fmt::Debug for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mutant")
            .field("name", &self.name)
            .field("killed_by", &self.killed_by)
            .finish_non_exhaustive()
    }
}

impl Mutant {
    /// A factory of this mutant, on top of `clean`.
    #[must_use]
    pub fn factory(self, clean: Clean) -> impl Factory {
        move |scenario: &Scenario| (self.build)(&clean, scenario)
    }
}

/// Every mutant.
pub fn corpus() -> impl Iterator<Item = &'static Mutant> {
    GROUPS.iter().flat_map(|group| group.iter())
}

/// Engines that are wrapped like mutants and have no fault: no check may catch them. They prove what the clean engine
/// cannot, since it publishes nothing and does not crash.
pub fn controls() -> impl Iterator<Item = &'static Mutant> {
    [errors::CONTROLS, metrics::CONTROLS].into_iter().flatten()
}

const GROUPS: &[&[Mutant]] = &[
    lifecycle::MUTANTS,
    stream::MUTANTS,
    finish::MUTANTS,
    usage::MUTANTS,
    cancellation::MUTANTS,
    concurrency::MUTANTS,
    sampling::MUTANTS,
    guided::MUTANTS,
    errors::MUTANTS,
    shutdown::MUTANTS,
    metrics::MUTANTS,
    kv_events::MUTANTS,
    disaggregated::MUTANTS,
    resume::MUTANTS,
    text::MUTANTS,
];
