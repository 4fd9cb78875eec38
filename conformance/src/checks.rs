//! The catalogue: every check, by group. A group is a module with a `CHECKS` table and its functions.

mod bodies;
mod cancellation;
mod concurrency;
mod controls;
mod disaggregated;
mod embeddings;
mod errors;
mod finish;
mod foretold;
mod growth;
mod guided;
mod kv_events;
mod leaks;
mod lifecycle;
mod metrics;
mod near;
mod performance;
mod pressure;
mod process;
mod ranks;
mod resume;
mod rules;
mod sampling;
mod scores;
mod seam;
mod sequences;
mod shutdown;
mod stream;
mod transfer;
mod usage;
mod words;

use crate::check::Check;

/// Every check, in the catalogue's order.
pub fn catalogue() -> impl Iterator<Item = &'static Check> {
    GROUPS.iter().flat_map(|group| group.iter())
}

/// A check by id, in any case.
#[must_use]
pub fn find(id: &str) -> Option<&'static Check> {
    catalogue().find(|check| check.id.eq_ignore_ascii_case(id))
}

const GROUPS: &[&[Check]] = &[
    lifecycle::CHECKS,
    stream::CHECKS,
    finish::CHECKS,
    usage::CHECKS,
    cancellation::CHECKS,
    concurrency::CHECKS,
    sampling::CHECKS,
    guided::CHECKS,
    errors::CHECKS,
    shutdown::CHECKS,
    metrics::CHECKS,
    kv_events::CHECKS,
    disaggregated::CHECKS,
    transfer::CHECKS,
    resume::CHECKS,
    seam::CHECKS,
    embeddings::CHECKS,
    scores::CHECKS,
    controls::CHECKS,
    ranks::CHECKS,
    bodies::CHECKS,
    process::CHECKS,
    rules::CHECKS,
    sequences::CHECKS,
    performance::CHECKS,
];

#[cfg(test)]
pub(crate) mod tests;
