//! Faults that the checks of DT catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
