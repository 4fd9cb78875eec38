//! Faults that the checks of LC catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
