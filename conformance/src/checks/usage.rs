//! US: usage.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
