//! The system clock, for timestamps. Code that waits or measures uses `tokio::time` instead.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time since 1970; zero if the machine's clock is before that.
pub(crate) fn since_1970() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    since_1970().as_secs()
}
