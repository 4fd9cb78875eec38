//! DG: prefill and decode.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
