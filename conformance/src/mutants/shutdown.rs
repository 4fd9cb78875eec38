//! Faults that the checks of SH catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
