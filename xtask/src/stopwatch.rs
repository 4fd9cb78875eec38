//! How long a step of a task took.
#![expect(
    clippy::disallowed_types,
    reason = "the real time of real programs is measured; there is no clock to pause"
)]

use std::fmt;
use std::time::Instant;

/// A running clock. Displays the time since its start, as `12.3 s` or `3 min 07 s`.
#[derive(Debug)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }
}

impl fmt::Display for Stopwatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let elapsed = self.0.elapsed();
        let (minutes, seconds) = (elapsed.as_secs() / 60, elapsed.as_secs() % 60);
        if minutes == 0 {
            write!(f, "{:.1} s", elapsed.as_secs_f64())
        } else {
            write!(f, "{minutes} min {seconds:02} s")
        }
    }
}
