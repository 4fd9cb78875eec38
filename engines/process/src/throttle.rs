//! [`Throttle`]: limits how much of a process's output is logged. A process that prints without pause must neither fill the disk
//! nor block: output above the limit is read and dropped.

use std::num::NonZeroU32;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::lines::MAX_LINE_BYTES;

/// The burst allowance, in seconds of the limit: starts and tracebacks come in bursts.
const BURST_S: f64 = 10.0;

/// How much of a process's output is logged, on average. Up to ten seconds' worth may come at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimit {
    /// Lines per second.
    pub lines_per_second: NonZeroU32,
    /// Bytes per second.
    pub bytes_per_second: NonZeroU32,
}

impl Default for LogLimit {
    /// 200 lines and 64 KiB per second: more than a server prints while it loads, and at most 5.5 GB per day.
    fn default() -> Self {
        let lines_per_second = NonZeroU32::MIN.saturating_add(200 - 1);
        let bytes_per_second = NonZeroU32::MIN.saturating_add((64 << 10) - 1);
        Self {
            lines_per_second,
            bytes_per_second,
        }
    }
}

/// Passes the lines of one process, from both of its outputs, to the log up to the limit. It counts the dropped lines and reports
/// the count with the next line that passes, or at the end of the output.
#[derive(Debug)]
pub(crate) struct Throttle {
    limit: LogLimit,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lines: Allowance,
    bytes: Allowance,
    at: Instant,
    dropped: Dropped,
}

/// The lines that were not logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Dropped {
    lines: u64,
    bytes: u64,
}

/// The remaining allowance; grows with time up to `most`.
#[derive(Debug)]
struct Allowance {
    left: f64,
    per_second: f64,
    most: f64,
}

impl Allowance {
    fn new(per_second: NonZeroU32, least: f64) -> Self {
        let per_second = f64::from(per_second.get());
        let most = (per_second * BURST_S).max(least);
        Self {
            left: most,
            per_second,
            most,
        }
    }

    fn grow(&mut self, seconds: f64) {
        self.left = (self.left + self.per_second * seconds).min(self.most);
    }
}

impl State {
    /// Whether a line of this length passes; if so, returns what was dropped before it. After a dropped line, all lines are
    /// dropped until a second's worth may pass: contiguous passages are more useful than every other line, and need only one
    /// count.
    fn admit(&mut self, bytes: usize, now: Instant) -> Option<Dropped> {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.lines.grow(elapsed);
        self.bytes.grow(elapsed);
        self.at = now;
        let length = u32::try_from(bytes).map_or(f64::MAX, f64::from);
        let is_closed = self.dropped.lines > 0;
        let pause = |allowance: &Allowance| match is_closed {
            true => allowance.per_second,
            false => 0.0,
        };
        let lines = pause(&self.lines).max(1.0);
        // A line above the maximum was cut already.
        let length = length.min(self.bytes.most);
        if self.lines.left < lines || self.bytes.left < pause(&self.bytes).max(length) {
            self.dropped.lines += 1;
            self.dropped.bytes = self
                .dropped
                .bytes
                .saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
            return None;
        }
        self.lines.left -= 1.0;
        self.bytes.left -= length;
        Some(std::mem::take(&mut self.dropped))
    }
}

impl Throttle {
    /// A throttle with its full allowance.
    pub(crate) fn new(limit: LogLimit) -> Self {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a line's length is far below 2^52"
        )]
        let longest = MAX_LINE_BYTES as f64;
        let state = State {
            lines: Allowance::new(limit.lines_per_second, 1.0),
            bytes: Allowance::new(limit.bytes_per_second, longest),
            at: Instant::now(),
            dropped: Dropped::default(),
        };
        Self {
            limit,
            state: Mutex::new(state),
        }
    }

    /// Passes `line` to `log`, unless it exceeds the limit.
    pub(crate) fn pass(&self, line: &str, log: impl FnOnce(&str)) {
        let admitted = self.state.lock().admit(line.len(), Instant::now());
        if let Some(dropped) = admitted {
            self.tell(dropped);
            log(line);
        }
    }

    fn tell(&self, dropped: Dropped) {
        if dropped == Dropped::default() {
            return;
        }
        let Dropped { lines, bytes } = dropped;
        let LogLimit {
            lines_per_second,
            bytes_per_second,
        } = self.limit;
        tracing::warn!(
            target: "genset::engine",
            lines,
            bytes,
            lines_per_second,
            bytes_per_second,
            "lines of the process were dropped: it prints more than the log takes of it (--engine-log-lines, --engine-log-bytes)"
        );
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let dropped = std::mem::take(&mut self.state.get_mut().dropped);
        self.tell(dropped);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn throttle(lines: u32, bytes: u32) -> Throttle {
        Throttle::new(LogLimit {
            lines_per_second: NonZeroU32::new(lines).unwrap(),
            bytes_per_second: NonZeroU32::new(bytes).unwrap(),
        })
    }

    /// The number of lines out of `count` that pass at once.
    fn passed(throttle: &Throttle, count: usize, line: &str) -> usize {
        let passed = std::cell::Cell::new(0);
        for _ in 0..count {
            throttle.pass(line, |_| passed.set(passed.get() + 1));
        }
        passed.get()
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_and_then_so_much_a_second() {
        let by_lines = throttle(20, 1 << 20);
        assert_eq!(passed(&by_lines, 100_000, "line"), 200);
        tokio::time::advance(Duration::from_millis(500)).await;
        assert_eq!(passed(&by_lines, 100, "line"), 0);
        for _ in 0..5 {
            tokio::time::advance(Duration::from_secs(1)).await;
            let now = passed(&by_lines, 1000, "line");
            assert!((20..=30).contains(&now), "{now}");
        }
        let by_bytes = throttle(1 << 20, 10_000);
        assert_eq!(passed(&by_bytes, 100_000, &"x".repeat(1000)), 100);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(passed(&by_bytes, 100_000, &"x".repeat(1000)), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_dropped_is_counted_up_to_the_next_line_that_passes() {
        let throttle = throttle(1, 1 << 20);
        let admit = |text: &str| throttle.state.lock().admit(text.len(), Instant::now());
        for _ in 0..10 {
            assert_eq!(admit("burst"), Some(Dropped::default()));
        }
        for _ in 0..3 {
            assert_eq!(admit("1234"), None);
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        let dropped = Dropped {
            lines: 3,
            bytes: 12,
        };
        assert_eq!(admit("next"), Some(dropped));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(admit("more"), Some(Dropped::default()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_line_passes_the_smallest_limit_in_time() {
        let throttle = throttle(1, 1);
        let longest = "x".repeat(usize::try_from(MAX_LINE_BYTES).unwrap());
        assert_eq!(passed(&throttle, 2, &longest), 1);
        tokio::time::advance(Duration::from_secs(MAX_LINE_BYTES)).await;
        assert_eq!(passed(&throttle, 2, &longest), 1);
    }
}
