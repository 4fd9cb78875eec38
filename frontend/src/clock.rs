//! The machine's clock, as what is made says when. What waits or measures takes `tokio::time` instead.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time since 1970; none on a machine whose clock is before.
pub(crate) fn since_1970() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    since_1970().as_secs()
}
