//! Faults that the checks of CN catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
