//! Faults that the checks of MT catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
