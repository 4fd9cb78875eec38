//! Faults that the checks of US catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
