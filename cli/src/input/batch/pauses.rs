//! [`Pauses`]: how long to wait while every worker is full.

use std::time::Duration;

/// How often a prompt is sent.
const MAX_ATTEMPTS: u32 = 12;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(10);

/// Pauses that double, between attempts that are counted.
#[derive(Debug)]
pub(super) struct Pauses {
    attempts: u32,
    next: Duration,
}

impl Pauses {
    /// Before the first attempt.
    pub(super) fn new() -> Self {
        Self {
            attempts: 1,
            next: FIRST,
        }
    }

    /// Waits after an attempt, longer where the server says so; false when there was the last one.
    pub(super) async fn wait(&mut self, wanted: Option<Duration>) -> bool {
        if self.attempts == MAX_ATTEMPTS {
            return false;
        }
        self.attempts += 1;
        tokio::time::sleep(wanted.unwrap_or_default().clamp(self.next, LONGEST)).await;
        self.next = (self.next * 2).min(LONGEST);
        true
    }
}
