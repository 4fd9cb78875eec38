//! Faults that the checks of DG catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
