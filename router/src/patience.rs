//! [`Patience`]: how long a request waits for an instance that takes it, and how often it looks for one meanwhile. For the layers
//! that wait where none is left.

use std::time::Duration;

use genset_backend_common::RequestContext;
use tokio::time::Instant;

/// Pauses between two looks for an instance when none is left, doubling from the first to the last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(400));

/// A request's wait, which its deadline may end before.
#[derive(Debug)]
pub(crate) struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    /// Begins to wait, for as long as `wait`.
    pub(crate) fn new(wait: Duration, ctx: &RequestContext) -> Self {
        let until = Instant::now() + wait;
        Self {
            until: ctx.deadline().map_or(until, |deadline| deadline.min(until)),
            pause: PAUSES.0,
        }
    }

    /// Waits until it is worth another look; false when the wait is over, or the request was cancelled.
    ///
    /// # Cancel safety
    /// The next pause is as long as this one when the future is dropped.
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
