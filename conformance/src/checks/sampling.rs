//! DT: sampling and determinism.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
