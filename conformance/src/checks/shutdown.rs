//! SH: drain and shutdown.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
