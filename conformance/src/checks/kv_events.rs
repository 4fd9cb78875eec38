//! KV: KV events.

use crate::check::Check;

pub(super) const CHECKS: &[Check] = &[];
