//! Faults that the checks of GD catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
