//! Faults that the checks of KV catch.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[];
