//! Faults that the checks of ER catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
