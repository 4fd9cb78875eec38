//! [`OncePerMinute`]: limits how often an event that others can trigger at will is logged. The caller counts in metrics the events
//! that are not logged, if anybody asks for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The minimum time between two log lines for one reason: a port scanner must not fill the log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The last log time of each reason, and the number of events since. Clones share state.
///
/// # Examples
/// ```
/// use genset_backend_common::log_limit::OncePerMinute;
///
/// let logged = OncePerMinute::default();
/// assert_eq!(logged.unlogged("full"), Some(0));
/// assert_eq!(logged.unlogged("full"), None);
/// assert!(logged.may_log("broken"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct OncePerMinute {
    logged: Arc<Mutex<HashMap<&'static str, (Instant, u64)>>>,
}

impl OncePerMinute {
    /// Whether an event for `reason` may be logged now.
    #[must_use]
    pub fn may_log(&self, reason: &'static str) -> bool {
        self.unlogged(reason).is_some()
    }

    /// Like [`Self::may_log`], but returns the number of unlogged events since the last line.
    #[must_use]
    pub fn unlogged(&self, reason: &'static str) -> Option<u64> {
        let now = Instant::now();
        let mut logged = self.logged.lock();
        if let Some((last, unlogged)) = logged.get_mut(reason)
            && now.duration_since(*last) < LOG_INTERVAL
        {
            *unlogged += 1;
            return None;
        }
        let last = logged.insert(reason, (now, 0));
        Some(last.map_or(0, |(_, unlogged)| unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_not_logged_is_counted() {
        let limit = OncePerMinute::default();
        assert_eq!(limit.unlogged("ended"), Some(0));
        for _ in 0..600 {
            assert_eq!(limit.unlogged("ended"), None);
        }
        assert_eq!(limit.unlogged("another"), Some(0));
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!(limit.unlogged("ended"), Some(600));
        assert_eq!(limit.unlogged("ended"), None);
    }
}
