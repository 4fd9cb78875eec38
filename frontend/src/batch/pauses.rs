//! [`Pauses`] says how long a request waits while every worker is full.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How often a request is sent at most, unless something else ends it earlier.
const MAX_ATTEMPTS: u32 = 12;

/// How often a request may be lost with its workers; each loss may include several workers. The request itself may
/// crash them.
const MAX_LOSSES: u32 = 2;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(10);

/// Pauses that double, up to 10 s, between attempts.
#[derive(Debug)]
pub struct Pauses {
    attempts_left: Option<u32>,
    losses: u32,
    next: Duration,
    stop: CancellationToken,
}

impl Pauses {
    /// Before the first of 12 attempts.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "it begins a wait, and is no value"
    )]
    pub fn new() -> Self {
        Self {
            attempts_left: Some(MAX_ATTEMPTS),
            ..Self::until(CancellationToken::new())
        }
    }

    /// Before the first of any number of attempts, until `stop`.
    #[must_use]
    pub fn until(stop: CancellationToken) -> Self {
        Self {
            attempts_left: None,
            losses: 0,
            next: FIRST,
            stop,
        }
    }

    /// Waits after an attempt, longer if the server asks for it; returns false if that was the last attempt.
    ///
    /// # Cancel safety
    /// If the future is dropped, the attempt is counted.
    pub async fn wait(&mut self, wanted: Option<Duration>) -> bool {
        if let Some(left) = &mut self.attempts_left {
            *left -= 1;
            if *left == 0 {
                return false;
            }
        }
        let pause = wanted.unwrap_or_default().clamp(self.next, LONGEST);
        self.next = (self.next * 2).min(LONGEST);
        tokio::select! {
            biased;
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    /// Like [`wait`](Self::wait), after an attempt that was lost with its worker; returns false at the second loss.
    ///
    /// # Cancel safety
    /// If the future is dropped, the attempt and the loss are counted.
    pub async fn wait_after_loss(&mut self) -> bool {
        self.losses += 1;
        self.losses < MAX_LOSSES && self.wait(None).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn attempts_are_counted_or_end_with_the_token() {
        let mut counted = Pauses::new();
        let mut attempts = 1;
        while counted.wait(None).await {
            attempts += 1;
        }
        assert_eq!(attempts, MAX_ATTEMPTS);
        let stop = CancellationToken::new();
        let mut endless = Pauses::until(stop.clone());
        for _ in 0..100 {
            assert!(endless.wait(Some(Duration::from_secs(3600))).await);
        }
        stop.cancel();
        assert!(!endless.wait(None).await);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_lost_twice_is_not_asked_again() {
        let mut pauses = Pauses::new();
        assert!(pauses.wait_after_loss().await && pauses.wait(None).await);
        assert!(!pauses.wait_after_loss().await);
    }
}
