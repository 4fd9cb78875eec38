//! CC: concurrency and isolation.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
