//! [`Quota`]: an amount per minute, as a token bucket.

use std::num::NonZeroU64;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// An amount per minute. What is not used in one minute does not carry over to the next.
#[derive(Debug)]
pub(super) struct Quota {
    per_minute: NonZeroU64,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    /// What is left; negative if a request cost more than there was.
    left: f64,
    filled: Instant,
}

impl Quota {
    /// A full bucket.
    pub(super) fn new(per_minute: NonZeroU64) -> Self {
        Self {
            per_minute,
            bucket: Mutex::new(Bucket {
                left: as_f64(per_minute.get()),
                filled: Instant::now(),
            }),
        }
    }

    pub(super) const fn per_minute(&self) -> NonZeroU64 {
        self.per_minute
    }

    /// Takes one if it is available.
    ///
    /// # Errors
    /// The time until it will be.
    pub(super) fn take(&self) -> Result<(), Duration> {
        let mut bucket = self.filled();
        self.has_one(&bucket)?;
        bucket.left -= 1.0;
        Ok(())
    }

    /// Whether one is left.
    ///
    /// # Errors
    /// The time until it will be.
    pub(super) fn check(&self) -> Result<(), Duration> {
        self.has_one(&self.filled())
    }

    /// Takes `amount`, whether it is available or not.
    pub(super) fn spend(&self, amount: u64) {
        self.filled().left -= as_f64(amount);
    }

    fn has_one(&self, bucket: &Bucket) -> Result<(), Duration> {
        if bucket.left >= 1.0 {
            return Ok(());
        }
        let missing = (1.0 - bucket.left) / self.a_second();
        // A debt that takes centuries is a wait of the longest duration.
        Err(Duration::try_from_secs_f64(missing).unwrap_or(Duration::MAX))
    }

    fn filled(&self) -> parking_lot::MutexGuard<'_, Bucket> {
        let mut bucket = self.bucket.lock();
        let now = Instant::now();
        let since = now.saturating_duration_since(bucket.filled).as_secs_f64();
        bucket.filled = now;
        let full = as_f64(self.per_minute.get());
        bucket.left = (bucket.left + since * self.a_second()).min(full);
        bucket
    }

    fn a_second(&self) -> f64 {
        as_f64(self.per_minute.get()) / 60.0
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a quota of more than 2^53 is off by less than anybody counts"
)]
const fn as_f64(amount: u64) -> f64 {
    amount as f64
}
