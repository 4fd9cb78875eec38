//! How long a step of a task took.
#![expect(
    clippy::disallowed_types,
    reason = "the real time of real programs is measured; there is no clock to pause"
)]

use std::fmt;
use std::time::{Duration, Instant};

/// A running clock. Displays the time since its start, as [`shown`].
#[derive(Debug)]
pub(crate) struct Stopwatch(Instant);

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }
}

impl fmt::Display for Stopwatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(self.0.elapsed()))
    }
}

/// A time as `12.3 s` or `3 min 07 s`.
pub(crate) fn shown(time: Duration) -> String {
    let (minutes, seconds) = (time.as_secs() / 60, time.as_secs() % 60);
    if minutes == 0 {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{minutes} min {seconds:02} s")
    }
}
