//! Faults that the checks of MG catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
