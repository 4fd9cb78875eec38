//! Faults that the checks of FN catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
