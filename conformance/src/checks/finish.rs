//! FN: limits and finish reasons.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
