//! Faults that the checks of CC catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
