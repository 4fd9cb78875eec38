//! [`Patience`]: how long a request waits for an instance, and how often it retries. For layers that wait when no instance is
//! left.

use std::time::Duration;

use genset_backend_common::RequestContext;
use tokio::time::Instant;

/// The first and the longest pause between retries; pauses double.
const PAUSES: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(400));

/// A request's wait, bounded by its deadline.
#[derive(Debug)]
pub(crate) struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    /// Starts a wait of at most `wait`.
    pub(crate) fn new(wait: Duration, ctx: &RequestContext) -> Self {
        let until = Instant::now() + wait;
        Self {
            until: ctx.deadline().map_or(until, |deadline| deadline.min(until)),
            pause: PAUSES.0,
        }
    }

    /// Waits until the next retry; returns false when the wait is over or the request was cancelled.
    ///
    /// # Cancel safety
    /// If the future is dropped, the next pause has the same length.
    pub(crate) async fn pause(&mut self, ctx: &RequestContext) -> bool {
        let now = Instant::now();
        if now >= self.until || ctx.is_cancelled() {
            return false;
        }
        let wakes = self.until.min(now + self.pause);
        tokio::select! {
            biased;
            () = ctx.cancelled() => return false,
            () = tokio::time::sleep_until(wakes) => {}
        }
        self.pause = (self.pause * 2).min(PAUSES.1);
        true
    }
}
